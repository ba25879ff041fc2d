/** Files for the reader: tables as CSV, what the server said as JSON, pictures as SVG or PNG. */
import { csv, pictured, save } from "/static/report/charts.js";
import { html } from "../ui.js";

/**
 * @param {object} props
 * @param {string} props.name of the files, without an ending
 * @param {() => any[][]} [props.table]
 * @param {() => any} [props.data]
 * @param {() => string} [props.picture] an SVG
 */
export function Downloads({ name, table, data, picture }) {
  const file = name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "braid";
  const kinds = [
    table && ["CSV", () => save(`${file}.csv`, csv(table()), "text/csv")],
    data && ["JSON", () => save(`${file}.json`, JSON.stringify(data(), null, 2), "application/json")],
    picture && ["SVG", () => save(`${file}.svg`, picture(), "image/svg+xml")],
    picture && ["PNG", async () => save(`${file}.png`, await pictured(picture()))],
  ].filter(Boolean);
  return html`<p class="downloads"><span>Save as</span>${kinds.map(
    ([kind, todo]) => html`<button type="button" class="quiet" key=${kind} onClick=${todo}>${kind}</button>`,
  )}</p>`;
}
