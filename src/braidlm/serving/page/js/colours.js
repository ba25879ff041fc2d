/** Every name has one colour on the whole page. With more names than colours, the colours repeat dashed, then dotted. */

const COLOURS = 5;
const LINES = ["", "dashed", "dotted"];

/**
 * The classes of names, in the order in which they are first met; `combined` and the like are grey.
 * @param {Iterable<string>} names
 * @param {Set<string>} [neutral]
 * @returns {Map<string, string>}
 */
export function namedClasses(names, neutral = new Set()) {
  const made = new Map();
  let met = 0;
  for (const name of names) {
    if (made.has(name)) continue;
    if (neutral.has(name)) made.set(name, "grey");
    else {
      made.set(name, `c${(met % COLOURS) + 1} ${LINES[Math.floor(met / COLOURS) % LINES.length]}`.trim());
      met += 1;
    }
  }
  return made;
}

/** A colour of the stylesheet in the theme of the moment, for pictures that leave the page. */
export function colourOf(name, element = document.documentElement) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
