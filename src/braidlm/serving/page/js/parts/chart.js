/** A chart of reports on the page; it keeps its zoom when more comes. */
import { draw } from "/static/report/charts.js";
import { html, useEffect, useRef } from "../ui.js";

export function Chart({ chart }) {
  const box = useRef(null);
  const drawn = useRef(null);
  useEffect(() => {
    drawn.current = draw(box.current, chart);
    return () => drawn.current.destroy();
  }, []);
  useEffect(() => drawn.current.update(chart), [JSON.stringify(chart)]);
  return html`<div ref=${box}></div>`;
}
