/** The sign of Braid: three strands, as on every report. */
import { html } from "../ui.js";

const STRANDS = [0, 1, 2];
const TURN = 2 * Math.PI;

/** Between two crossings the strands keep their order in depth; the nearest is drawn last, with an outline. */
function strokes() {
  const drawn = [];
  for (let crossing = 0; crossing < 10; crossing += 1) {
    const middle = (crossing * Math.PI) / 3;
    const depth = (k) => Math.sin(2 * (middle + 0.26 + (k * TURN) / 3));
    for (const k of [...STRANDS].sort((a, b) => depth(a) - depth(b))) {
      const points = [...Array(7).keys()].map((step) => {
        const t = middle + (Math.PI / 3) * (step / 6 - 0.5);
        return `${(t * 12 + 8).toFixed(1)},${(13 + 8 * Math.sin(t + (k * TURN) / 3)).toFixed(1)}`;
      });
      drawn.push([points.join(" "), k]);
    }
  }
  return drawn;
}

const STROKES = strokes();

export function Mark() {
  return html`<svg class="mark" viewBox="0 0 130 26" fill="none" aria-hidden="true">${STROKES.map(
    ([points, k]) => html`<polyline points=${points} class="outline" /><polyline points=${points} class=${`strand c${k + 1}`} />`,
  )}</svg>`;
}
