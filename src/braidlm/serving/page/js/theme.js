/* The theme that was chosen before, set before anything is drawn. Without a choice the page follows the system. */
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // a browser that keeps nothing follows the system
}
