/** Coloured texts as a picture of their own, with a legend: what one takes into slides and papers. */
import { colourOf } from "../colours.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, MARGIN, LINE, SIZE] = [860, 28, 30, 16];

/**
 * @param {string} title
 * @param {{name: string, kind: string}[]} legend
 * @param {{label: string, tokens: {text: string, kind: string, strength: number}[]}[]} rows
 * @returns {string} an SVG in the theme of the moment
 */
export function textPicture(title, legend, rows) {
  const picture = document.createElementNS(NAMESPACE, "svg");
  // Control characters and halves of characters cannot stand in an SVG.
  const drawable = (text) => text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]|\p{Surrogate}/gu, "◦");
  const draw = (name, attributes, text) => {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = drawable(text);
    picture.append(made);
    return made;
  };
  const [paper, ink, soft] = ["--paper", "--ink", "--soft"].map((name) => colourOf(name));
  const ownOf = (kind) => (kind.includes("grey") ? soft : colourOf(`--${kind.split(" ")[0]}`));
  const dashOf = (kind) => (kind.includes("dashed") ? "5 3" : kind.includes("dotted") ? "2 2" : "none");
  const ruler = document.createElement("canvas").getContext("2d");
  const fonts = getComputedStyle(document.documentElement);
  const [sans, serif] = [fonts.getPropertyValue("--sans"), fonts.getPropertyValue("--serif")];
  const wide = (text, font) => {
    ruler.font = font;
    return ruler.measureText(text).width;
  };
  const sheet = draw("rect", { width: WIDTH, fill: paper });
  let [x, y] = [MARGIN, MARGIN + 14];
  draw("text", { x, y, fill: ink, "font-family": sans, "font-size": 15, "font-weight": 600 }, title);
  y += 28;
  for (const { name, kind } of legend) {
    const width = wide(name, `13px ${sans}`) + 40;
    if (x + width > WIDTH - MARGIN) [x, y] = [MARGIN, y + 22];
    draw("rect", { x, y: y - 10, width: 14, height: 11, rx: 2, fill: ownOf(kind), "fill-opacity": 0.75 });
    draw("text", { x: x + 20, y, fill: ink, "font-family": sans, "font-size": 13 }, name);
    x += width;
  }
  for (const { label, tokens } of rows) {
    [x, y] = [MARGIN, y + LINE + 6];
    if (label) {
      draw("text", { x, y, fill: soft, "font-family": sans, "font-size": 12 }, label);
      y += LINE - 6;
    }
    for (const { text, kind, strength } of tokens) {
      const shown = text.replaceAll("\n", "↵");
      const width = wide(shown, `${SIZE}px ${serif}`);
      if (x + width > WIDTH - MARGIN) [x, y] = [MARGIN, y + LINE];
      if (kind) {
        const own = ownOf(kind);
        draw("rect", { x, y: y - 15, width, height: 21, fill: own, "fill-opacity": (0.34 * strength).toFixed(3) });
        draw("line", { x1: x, x2: x + width - 1, y1: y + 6, y2: y + 6, stroke: own, "stroke-width": 2, "stroke-dasharray": dashOf(kind) });
      }
      draw("text", { x, y, fill: ink, "font-family": serif, "font-size": SIZE, "xml:space": "preserve" }, shown);
      x += width;
      if (text.includes("\n")) [x, y] = [MARGIN, y + LINE];
    }
  }
  const height = y + MARGIN;
  sheet.setAttribute("height", height);
  for (const [key, value] of Object.entries({ width: WIDTH, height, viewBox: `0 0 ${WIDTH} ${height}` })) picture.setAttribute(key, value);
  return new XMLSerializer().serializeToString(picture);
}
