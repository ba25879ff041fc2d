/* What a report page does in a browser: it draws the charts, sorts and scrolls tables, and switches between light and dark. */

import { draw } from "./charts.js";

const UNITS = { k: 1e3, M: 1e6, B: 1e9, T: 1e12, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, ms: 1e-3, s: 1, m: 60, h: 3600, days: 86400 };

/** The number that a cell begins with, in the unit of all ("1.2M", "3m04s", "0.71 ± 0.02"), or null. */
function value(text) {
  const plain = text.replace("−", "-").replaceAll(",", "").replace(/^[✓✗~<>±+(\s]+/, "");
  if (!/^-?[\d.]/.test(plain)) return null;
  const [first, ...rest] = [...plain.split("±")[0].matchAll(/(-?\d*\.?\d+(?:e[-+]?\d+)?)\s*([a-zA-Z]*)/g)];
  if (!first) return null;
  const sizes = [first, ...rest.filter(([, , unit]) => ["s", "m"].includes(unit) && ["h", "m"].includes(first[2]))];
  return sizes.reduce((sum, [, number, unit]) => sum + Number(number) * (UNITS[unit] ?? 1), 0);
}

/** Make every column of a table a button that sorts its rows: down, up, then as they were. */
export function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...(table.tHead?.rows[table.tHead.rows.length - 1]?.cells ?? [])];
  const original = [...(body?.rows ?? [])];
  if (original.length < 2) return;
  heads.forEach((head, column) => {
    const texts = original.map((row) => row.cells[column]?.textContent.trim() ?? "");
    const numbers = texts.map(value);
    const known = texts.map((text) => !["", "–", "-"].includes(text));
    const numeric = texts.every((_, at) => !known[at] || numbers[at] !== null);
    const before = (a, b) => (numeric ? numbers[a] - numbers[b] : texts[a].localeCompare(texts[b], undefined, { numeric: true }));
    const button = document.createElement("button");
    button.type = "button";
    if (!head.textContent.trim()) {
      button.setAttribute("aria-label", `Column ${column + 1}`);
      button.append("\u00a0");
    } else button.append(...head.childNodes);
    button.title = "Sort";
    head.append(button);
    button.addEventListener("click", () => {
      const next = { descending: "ascending", ascending: null }[head.getAttribute("aria-sort")];
      const direction = next === undefined ? "descending" : next;
      for (const other of heads) other.removeAttribute("aria-sort");
      if (direction) head.setAttribute("aria-sort", direction);
      const order = original.map((_, at) => at);
      const sign = direction === "ascending" ? 1 : -1;
      if (direction) order.sort((a, b) => known[b] - known[a] || (known[a] ? sign * before(a, b) : 0) || a - b);
      body.append(...order.map((at) => original[at]));
    });
  });
  table.classList.add("sortable");
}

/** Where a table is wider than its place: its first column stays, and a button below says how much more there is. */
export function scrollable(box) {
  const heads = [...(box.querySelector("thead tr:last-child")?.cells ?? [])];
  const button = document.createElement("button");
  button.type = "button";
  button.className = "more";
  button.tabIndex = -1; // the table itself scrolls by keyboard
  const update = () => {
    const { right } = box.getBoundingClientRect();
    const rest = heads.filter((head) => head.getBoundingClientRect().right > right + 2).length;
    const wider = box.scrollWidth > box.clientWidth + 2;
    box.classList.toggle("cut", wider);
    button.hidden = !wider;
    button.textContent = rest ? `${rest} more column${rest > 1 ? "s" : ""} \u2192` : "\u2190 first columns";
    button.onclick = () => box.scrollTo({ left: rest ? box.scrollLeft + box.clientWidth * 0.6 : 0, behavior: "smooth" });
  };
  box.after(button);
  box.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(box);
  update();
}

/** A button that switches between the theme of the system, light and dark. */
export function themes() {
  const names = { "": "Auto", light: "Light", dark: "Dark" };
  const root = document.documentElement;
  const button = document.createElement("button");
  const set = (theme) => {
    theme ? (root.dataset.theme = theme) : delete root.dataset.theme;
    button.textContent = names[theme];
    button.setAttribute("aria-label", `Theme: ${names[theme]}`);
    try {
      localStorage.setItem("braid-theme", theme);
    } catch {} // a page without an origin forgets it
  };
  let kept = "";
  try {
    kept = localStorage.getItem("braid-theme") ?? "";
  } catch {}
  button.type = "button";
  button.className = "theme";
  button.title = "Switch between light and dark";
  button.addEventListener("click", () => set({ "": "light", light: "dark", dark: "" }[root.dataset.theme ?? ""]));
  set(kept in names ? kept : "");
  return button;
}

if (document.querySelector("body > header.report")) {
  document.querySelector("body > header.report").append(themes());
  for (const figure of document.querySelectorAll("figure.picture")) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const element = figure.querySelector(".chart");
    figure.querySelector("details").open = false; // the values, for readers without a chart
    draw(element, chart);
  }
  document.querySelectorAll("main table").forEach(sortable);
  document.querySelectorAll("main .scroll").forEach(scrollable);
  const contents = document.querySelector(".contents details");
  if (contents) contents.open = matchMedia("(min-width: 80rem)").matches;
}
