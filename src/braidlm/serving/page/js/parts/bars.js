/** Probabilities, weights or shares as rows with bars; rows that can be taken are buttons. */
import { html, percent } from "../ui.js";

/**
 * @param {object} props
 * @param {{name: string, value: number, kind?: string, note?: string}[]} props.rows `kind`: classes of the colour
 * @param {(index: number) => void} [props.take]
 * @param {(name: string) => string} [props.takes] what the button does, in words
 */
export function Bars({ rows, take, takes }) {
  const largest = Math.max(...rows.map((row) => row.value), 1e-9);
  return html`<ul class="bars">${rows.map((row, index) => {
    const inside = html`<span class="name">${row.name}</span>
      <span class="bar" aria-hidden="true"><span class=${`fill ${row.kind ?? ""}`} style=${{ width: `${(100 * Math.max(row.value, 0)) / largest}%` }}></span></span>
      <span class="value">${row.note ?? percent(row.value)}</span>`;
    return html`<li key=${index}>${
      take
        ? html`<button type="button" class="row" aria-label=${`${takes?.(row.name) ?? row.name}, ${percent(row.value)}`} onClick=${() => take(index)}>${inside}</button>`
        : html`<div class="row">${inside}</div>`
    }</li>`;
  })}</ul>`;
}

/** Text of a token where its spaces and line breaks have to be seen. */
export function quoted(text) {
  if (text === "") return "◦";
  return text.replace(/^ /, "␣").replaceAll("\n", "↵");
}
