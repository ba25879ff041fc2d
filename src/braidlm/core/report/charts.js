/* Charts from data, as SVG that can be hovered, zoomed, read by keyboard and saved.

   const chart = draw(element, { kind: "lines", series: { loss: [[1, 2], [3.1, 2.9]] }, x_label: "step", y_label: "loss" });
   chart.update(newer); // the zoom, and which series are hidden, stay

   The fields are those of the classes in report.py; a kind is "lines", "points", "bars", "shares" or "heat". Texts only
   ever become text nodes, and no style is set but through the CSSOM, so that a strict content security policy holds. */

import "./vendor/d3.js";
const { bisectCenter, line, scaleLinear, scaleLog, ticks } = globalThis.d3;

const SVG = "http://www.w3.org/2000/svg";
const PALETTE = [1, 2, 3, 4, 5].map((n) => `var(--c${n})`);
const DASHES = ["", "7 4", "2 3"]; // with more names than colours, the colours repeat dashed, then dotted
const GREY = "var(--soft)";
const FONT = "12px ui-sans-serif, system-ui, sans-serif";
const LINE = 15; // the height of a line of text
const BOLD = 0.92; // how much of a text fits where it is bold
const LETTERS = document.createElement("canvas").getContext("2d");
let serial = 0;

/** Draw a chart into an element; it follows the width of the element, and the theme of the page. */
export function draw(element, chart) {
  const view = new View(element, chart);
  return {
    update: (newer) => view.update(newer),
    destroy: () => view.destroy(),
    svg: () => exported(view),
    png: () => pictured(exported(view)),
    csv: () => csv(rows(view.chart)),
  };
}

/** Give a file to the reader. */
export function save(name, content, type) {
  const url = content instanceof Blob ? URL.createObjectURL(content) : URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Rows as comma-separated values. */
export function csv(lines) {
  const cell = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  return lines.map((line) => line.map((value) => cell(String(value ?? ""))).join(",") + "\n").join("");
}

class View {
  constructor(element, chart) {
    Object.assign(this, { element, chart, hidden: new Set(), zoom: null, at: -1, id: `chart-${++serial}` });
    this.title = make("p", { className: "title" });
    this.legend = make("ul", { className: "legend" });
    this.svg = svg("svg", { role: "img" });
    this.tip = make("div", { className: "tip", role: "status", hidden: true });
    this.plot = make("div", { className: "plot", tabIndex: 0, role: "group" }, this.svg, this.tip);
    this.hint = make("span", { className: "hint" });
    this.all = make("button", { type: "button", textContent: "Show all", hidden: true, onclick: () => this.zoomTo(null) });
    const files = ["SVG", "PNG", "CSV"].map((kind) =>
      make("button", { type: "button", textContent: kind, title: `Save as ${kind}`, onclick: () => this.save(kind) }),
    );
    this.tools = make("div", { className: "tools" }, this.hint, this.all, ...files);
    element.classList.add("chart");
    element.replaceChildren(this.title, this.legend, this.plot, this.tools);
    this.listen();
    this.observer = new ResizeObserver(() => element.clientWidth !== this.width && this.render());
    this.observer.observe(element);
    this.render();
  }

  update(chart) {
    this.chart = chart;
    this.render();
  }

  destroy() {
    this.observer.disconnect();
    this.element.replaceChildren();
  }

  save(kind) {
    const name = (this.chart.name || this.chart.title || this.chart.y_label || "chart").replace(/[^\p{L}\p{N}]+/gu, "-");
    if (kind === "SVG") save(`${name}.svg`, exported(this), "image/svg+xml");
    else if (kind === "CSV") save(`${name}.csv`, csv(rows(this.chart)), "text/csv");
    else pictured(exported(this)).then((png) => save(`${name}.png`, png));
  }

  render() {
    const { chart } = this;
    this.width = this.element.clientWidth;
    if (!this.width) return; // drawn once it is shown
    this.title.textContent = chart.title ?? "";
    this.title.hidden = !chart.title;
    this.svg.replaceChildren();
    Object.assign(this, { spots: [], stride: 1, area: null, entries: [] });
    this.plot.classList.remove("beside");
    KINDS[chart.kind](this, chart);
    this.front = svg("g", {}, this.svg);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.describe();
    this.listNames();
    this.all.hidden = !this.zoom;
    this.hint.textContent = this.area ? (this.zoom ? "Double-click shows all." : "Drag to zoom.") : "";
    this.show(Math.min(this.at, this.spots.length - 1));
  }

  describe() {
    const { title, x_label: x, y_label: y, value_label: value, scale } = this.chart;
    const text = [title, value ?? scale ?? [y, x].filter(Boolean).join(" against ")].filter(Boolean).join(": ") || "shares";
    this.svg.setAttribute("aria-label", text);
    this.plot.setAttribute("aria-label", `Chart of ${text}. Arrow keys read its values${this.area ? ", plus and minus zoom" : ""}.`);
  }

  /** The legend: above the plot, or each name beside the end of its line. */
  listNames() {
    const beside = this.entries.some((entry) => entry.y !== undefined);
    const items = this.entries.map(({ name, colour, dash, y, filled }) => {
      const shown = !this.hidden.has(name);
      const button = make("button", { type: "button", disabled: filled }, swatch(colour, dash, filled), make("span", { textContent: name }));
      if (!filled) {
        button.setAttribute("aria-pressed", shown);
        button.title = shown ? "Hide" : "Show";
        button.onclick = () => {
          this.hidden[shown ? "add" : "delete"](name);
          this.render();
          [...this.legend.querySelectorAll("button")].find((one) => one.textContent === name)?.focus();
        };
      }
      const item = make("li", {}, button);
      if (beside) {
        item.style.left = `${this.area.right + 6}px`;
        item.style.top = `${y}px`;
      }
      return item;
    });
    this.legend.replaceChildren(...items);
    this.legend.hidden = !items.length;
    this.plot.classList.toggle("beside", beside);
    beside ? this.plot.append(this.legend) : this.plot.before(this.legend);
  }

  /** Show the values of a spot, or of none. */
  show(at, point = null) {
    this.at = at;
    const spot = this.spots[at];
    this.tip.hidden = !spot;
    this.front.replaceChildren();
    if (!spot) return;
    spot.mark?.(this.front);
    const lines = spot.rows.map(({ name, colour, dash, filled, value }) =>
      make("div", {}, ...(colour ? [swatch(colour, dash, filled)] : []), make("span", { textContent: name }), make("output", { textContent: value })),
    );
    this.tip.replaceChildren(...(spot.title ? [make("b", { textContent: spot.title })] : []), ...lines);
    const [x, y] = point ?? [spot.x, spot.y];
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = x + 14 + width > this.width ? x - 14 - width : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.width - width))}px`;
    this.tip.style.top = `${Math.max(-20, Math.min(y - height / 2, this.height - height))}px`;
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    this.at = -1;
    this.render();
  }

  /** Zoom about a point, by a factor above 1 to see less. */
  zoomBy(factor, x, y) {
    const { area } = this;
    if (!area) return;
    const around = (scale, low, high, centre, full) => {
      const ends = [low, high].map((end) => scale.invert(centre + (end - centre) / factor)).sort((a, b) => a - b);
      return [Math.max(ends[0], full[0]), Math.min(ends[1], full[1])];
    };
    const zoom = { x: around(area.x, area.left, area.right, x, area.full.x) };
    if (area.both) zoom.y = around(area.y, area.top, area.bottom, y, area.full.y);
    const everything = ["x", "y"].every((side) => !zoom[side] || String(zoom[side]) === String(area.full[side]));
    this.zoomTo(everything ? null : zoom);
  }

  listen() {
    const { plot } = this;
    let start = null;
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const inside = ([x, y]) => this.area && x >= this.area.left && x <= this.area.right && y >= this.area.top && y <= this.area.bottom;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.target.closest("svg") === this.svg && inside(place(event))) start = place(event);
    });
    plot.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (start && Math.hypot(x - start[0], y - start[1]) > 5) {
        if (!plot.hasPointerCapture(event.pointerId)) plot.setPointerCapture(event.pointerId);
        this.show(-1);
        svg("rect", { class: "brush", ...this.brushed(start, [x, y]) }, this.front);
      } else if (event.target.closest(".legend")) this.show(-1);
      else this.show(this.find?.(x, y) ?? -1, [x, y]);
    });
    plot.addEventListener("pointerup", (event) => {
      const from = start;
      start = null;
      if (!from || !plot.hasPointerCapture(event.pointerId)) return;
      const { x, y, width, height } = this.brushed(from, place(event));
      const ends = (scale, a, b) => [scale.invert(a), scale.invert(b)].sort((one, other) => one - other);
      if (width > 5 && height > 5) {
        const { area } = this;
        this.zoomTo({ x: ends(area.x, x, x + width), ...(area.both ? { y: ends(area.y, y, y + height) } : {}) });
      }
    });
    plot.addEventListener("pointercancel", () => (start = null));
    plot.addEventListener("pointerleave", () => start || this.show(-1));
    plot.addEventListener("blur", () => this.show(-1));
    plot.addEventListener("dblclick", () => this.zoom && this.zoomTo(null));
    plot.addEventListener(
      "wheel",
      (event) => {
        if (!this.area || !(event.ctrlKey || event.metaKey)) return; // a plain wheel scrolls the page
        event.preventDefault();
        this.zoomBy(event.deltaY < 0 ? 1.25 : 0.8, ...place(event));
      },
      { passive: false },
    );
    plot.addEventListener("keydown", (event) => {
      if (event.target !== plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = this.spots.length - 1;
      const spot = this.spots[this.at];
      const centre = () => (spot ? [spot.x, spot.y] : [(this.area.left + this.area.right) / 2, (this.area.top + this.area.bottom) / 2]);
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.stride, ArrowUp: -this.stride }[event.key];
      if (by) this.show(Math.max(0, Math.min(last, this.at < 0 ? 0 : this.at + by)));
      else if (event.key === "Home") this.show(0);
      else if (event.key === "End") this.show(last);
      else if (event.key === "Escape") this.zoom ? this.zoomTo(null) : this.show(-1);
      else if (this.area && "+=".includes(event.key)) this.zoomBy(1.5, ...centre());
      else if (this.area && event.key === "-") this.zoomBy(1 / 1.5, ...centre());
      else return;
      event.preventDefault();
    });
  }

  brushed([x0, y0], [x1, y1]) {
    const { left, right, top, bottom, both } = this.area;
    const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
    const x = [clamp(x0, left, right), clamp(x1, left, right)].sort((a, b) => a - b);
    const y = both ? [clamp(y0, top, bottom), clamp(y1, top, bottom)].sort((a, b) => a - b) : [top, bottom];
    return { x: x[0], y: y[0], width: x[1] - x[0], height: y[1] - y[0] };
  }
}

const KINDS = { lines: drawLines, points: drawPoints, bars: drawBars, shares: drawShares, heat: drawHeat };

function drawLines(view, chart) {
  const counts = {};
  const series = Object.entries(chart.series).map(([name, [xs, ys]], index) => {
    const colour = chart.colours?.[name] ?? PALETTE[index % PALETTE.length];
    counts[colour] = (counts[colour] ?? -1) + 1; // lines of one colour differ in their dashes
    const usable = (x, y) => Number.isFinite(x) && Number.isFinite(y) && (x > 0 || !chart.log_x) && (y > 0 || !chart.log_y);
    const errors = chart.errors?.[name] ?? [];
    return { name, colour, dash: DASHES[counts[colour] % DASHES.length], xs, errors, ys: ys.map((y, at) => (usable(xs[at], y) ? y : null)) };
  });
  const levels = Object.entries(chart.levels ?? {}).map(([name, y]) => ({ name, y, colour: "var(--ink)", dash: "5 4" }));
  const shown = series.filter(({ name }) => !view.hidden.has(name));
  const shownLevels = levels.filter(({ name }) => !view.hidden.has(name));
  const everyX = [...new Set(series.flatMap(({ xs, ys }) => xs.filter((_, at) => ys[at] !== null)))].sort((a, b) => a - b);
  const full = { x: span(everyX, chart.log_x, 0) };
  const [from, to] = view.zoom?.x ?? full.x;
  const near = shown.flatMap(({ xs, ys, errors }) => {
    const here = ys.flatMap((y, at) => (y !== null && xs[at] >= from && xs[at] <= to ? [at] : []));
    return here.flatMap((at) => [ys[at], ...(errors[at] ? [ys[at] - errors[at], ys[at] + errors[at]] : [])]);
  });
  const yDomain = span(view.zoom ? near : [...near, ...shownLevels.map(({ y }) => y)], chart.log_y, 0.05);
  const named = series.length > 1 || levels.length ? [...series, ...levels] : [];
  const room = Math.max(0, ...named.map(({ name }) => measure(name))) + 36;
  const height = Math.max(220, Math.min(340, view.width * 0.52));
  const beside = named.length > 0 && room < view.width * 0.38 && view.width >= 480 && named.length * 17 < height - 40;
  const area = frame(view, chart, { x: [from, to], y: yDomain }, height, beside ? room : 12, { falling: chart.falling_x, whole: everyX.every(Number.isInteger) });
  view.area = Object.assign(area, { full, both: false });

  const clip = svg("clipPath", { id: view.id }, view.svg);
  svg("rect", { x: area.left - 3, y: area.top - 3, width: area.right - area.left + 6, height: area.bottom - area.top + 6 }, clip);
  const inside = svg("g", { "clip-path": `url(#${view.id})` }, view.svg);
  for (const { y } of shownLevels) svg("line", { class: "level", x1: area.left, x2: area.right, y1: area.y(y), y2: area.y(y) }, inside);
  for (const { xs, ys, errors, colour, dash } of shown) {
    const sure = xs.flatMap((_, at) => (ys[at] !== null && errors[at] && (ys[at] > errors[at] || !chart.log_y) ? [at] : []));
    const side = (sign, order) => order.map((at) => `${area.x(xs[at])},${area.y(ys[at] + sign * errors[at])}`);
    if (sure.length > 1) svg("polygon", { class: "band", points: [...side(1, sure), ...side(-1, sure.toReversed())].join(" "), fill: colour }, inside);
    const points = xs.map((x, at) => [x, ys[at]]);
    const path = line((p) => area.x(p[0]), (p) => area.y(p[1])).defined((p) => p[1] !== null);
    svg("path", { class: "series", d: path(points) ?? "", stroke: colour, "stroke-dasharray": dash || null }, inside);
    const few = points.filter(([x, y]) => y !== null && x >= from && x <= to);
    if (few.length < 20) for (const [x, y] of few) svg("circle", { cx: area.x(x), cy: area.y(y), r: 2.8, fill: colour }, inside);
  }
  if (chart.mark && chart.mark[0] >= from && chart.mark[0] <= to) {
    const x = area.x(chart.mark[0]);
    const late = x > (area.left + area.right) / 2;
    svg("line", { class: "mark", x1: x, x2: x, y1: area.top, y2: area.bottom }, view.svg);
    const room = (late ? x - area.left : view.width - x) - 6;
    svg("text", { x: x + (late ? -6 : 6), y: area.top + 9, "text-anchor": late ? "end" : "start" }, view.svg, clipped(chart.mark[1], room));
  }

  const ends = named.map((one) => {
    const last = one.ys?.findLastIndex((y, at) => y !== null && one.xs[at] >= from && one.xs[at] <= to) ?? -1;
    const y = one.ys ? one.ys[last] ?? yDomain[0] : one.y;
    return Math.max(area.top, Math.min(area.bottom, area.y(y)));
  });
  const heights = beside ? spread(ends, 17, area.top - 6, area.bottom + 6) : [];
  view.entries = named.map(({ name, colour, dash }, at) => ({ name, colour, dash, y: heights[at] }));

  const xs = everyX.filter((x) => x >= from && x <= to);
  view.spots = xs.map((x) => {
    const here = shown.map((one) => ({ ...one, y: one.ys[one.xs.indexOf(x)], error: one.errors[one.xs.indexOf(x)] })).filter(({ y }) => y !== null && y !== undefined);
    return {
      x: area.x(x),
      y: area.top + 30,
      title: `${chart.x_label || "x"} ${number(x)}`,
      rows: here.sort((a, b) => b.y - a.y).map(({ name, colour, dash, y, error }) => ({ name, colour, dash, value: error ? `${number(y)} ± ${number(error)}` : number(y) })),
      mark(front) {
        svg("line", { class: "cursor", x1: area.x(x), x2: area.x(x), y1: area.top, y2: area.bottom }, front);
        for (const { y, colour } of here) svg("circle", { class: "halo", cx: area.x(x), cy: area.y(y), r: 4.5, fill: colour }, front);
      },
    };
  });
  view.stride = Math.max(1, Math.round(xs.length / 10));
  view.find = (x, y) => (xs.length && y <= area.bottom + 20 && x >= area.left - 8 && x <= area.right + 8 ? bisectCenter(xs, area.x.invert(x)) : -1);
}

function drawPoints(view, chart) {
  const names = Object.keys(chart.points);
  const points = names.map((name, index) => {
    const [x, y] = chart.points[name];
    return { name, x, y, colour: chart.colours?.[name] ?? PALETTE[index % PALETTE.length] };
  });
  const full = { x: span(points.map(({ x }) => x), chart.log, 0.08), y: span(points.map(({ y }) => y), chart.log, 0.1) };
  const height = Math.max(280, Math.min(420, view.width * 0.62));
  const log = { ...chart, log_x: chart.log, log_y: chart.log };
  const area = frame(view, log, { x: view.zoom?.x ?? full.x, y: view.zoom?.y ?? full.y }, height, 16, { grid: true });
  view.area = Object.assign(area, { full, both: true });
  const inside = ({ x, y }) => x >= area.left && x <= area.right && y >= area.top && y <= area.bottom;
  const placed = points.map((point) => ({ ...point, x: area.x(point.x), y: area.y(point.y) })).filter(inside);
  const taken = placed.map(({ x, y }) => [x - 5, y - 5, x + 5, y + 5]);
  for (const point of placed) {
    // A name stands at the right or left of its point, or nearby with a line to it, wherever it covers nothing.
    const name = clipped(point.name, view.width * 0.45);
    const width = measure(name) + 4;
    const steps = [0, ...Array.from({ length: 24 }, (_, at) => (at % 2 ? -1 : 1) * 8 * (1 + (at >> 1)))];
    const places = steps.flatMap((up) => [
      { end: false, x: point.x + 9, y: point.y + up },
      { end: true, x: point.x - 9, y: point.y + up },
    ]);
    const boxOf = ({ end, x, y }) => [end ? x - width : x, y - 7, end ? x : x + width, y + 7];
    const clear = (box) =>
      box[0] >= area.left && box[2] <= view.width && box[1] >= area.top - 4 && box[3] <= area.bottom && !taken.some((other) => overlap(box, other));
    const place = places.find((one) => clear(boxOf(one)));
    if (place) {
      taken.push(boxOf(place));
      if (Math.abs(place.y - point.y) > 9) svg("line", { class: "leader", x1: point.x, y1: point.y, x2: place.x, y2: place.y }, view.svg);
      svg("text", { x: place.x, y: place.y + 4, "text-anchor": place.end ? "end" : "start" }, view.svg, name);
    }
    svg("circle", { cx: point.x, cy: point.y, r: 5, fill: point.colour }, view.svg);
  }
  view.spots = placed.map(({ name, x, y, colour }) => ({
    x,
    y,
    title: name,
    rows: [
      { name: chart.x_label || "x", value: number(chart.points[name][0]) },
      { name: chart.y_label || "y", value: number(chart.points[name][1]) },
    ],
    mark: (front) => svg("circle", { class: "halo", cx: x, cy: y, r: 7, fill: colour }, front),
  }));
  view.find = (x, y) => {
    const distances = placed.map((point) => Math.hypot(point.x - x, point.y - y));
    const nearest = Math.min(Infinity, ...distances);
    return nearest < 40 ? distances.indexOf(nearest) : -1;
  };
}

function drawBars(view, chart) {
  const inGroups = Object.values(chart.values).some((value) => typeof value === "object" && value !== null);
  const groups = Object.entries(chart.values).map(([group, v]) => [group, typeof v === "object" && v !== null ? v : { [group]: v }]);
  const ordered = [...new Set([...Object.keys(chart.colours ?? {}), ...groups.flatMap(([, bars]) => Object.keys(bars))])];
  const names = ordered.filter((name) => groups.some(([, bars]) => name in bars));
  const colour = (name) => (inGroups ? chart.colours?.[name] ?? PALETTE[names.indexOf(name) % PALETTE.length] : PALETTE[0]);
  const digits = chart.digits ?? 2;
  const text = (value) => fixed(value, digits);
  const values = groups.flatMap(([, bars]) => Object.values(bars)).filter(Number.isFinite);
  const room = Math.max(0, ...values.map((value) => measure(text(value)))) + 10;
  const widest = Math.max(...groups.map(([group]) => measure(group)));
  const above = widest > view.width * 0.34; // long names stand above their bars
  const left = above ? 2 : widest + 12;
  const low = Math.min(0, ...values);
  const scale = scaleLinear([low, Math.max(0, ...values, 1e-12)], [left + (low < 0 ? room : 0), view.width - room]);
  const thick = inGroups ? 18 : 22;
  let y = 6;
  for (const [group, bars] of groups) {
    const inside = names.filter((name) => name in bars);
    const middle = y + (inside.length * (thick + 3)) / 2;
    if (above) y += written(view, group, { x: 2, y: y + 10, class: "group" }, view.width - 2) - LINE;
    else svg("text", { x: left - 8, y: middle + 3, "text-anchor": "end", class: inGroups ? "group" : null }, view.svg, group);
    if (above) y += 17;
    for (const name of inside) {
      const value = bars[name] ?? NaN;
      const finite = Number.isFinite(value);
      const ends = [scale(0), finite ? scale(value) : scale(0)].sort((a, b) => a - b);
      const box = { x: ends[0], y, width: Math.max(1, ends[1] - ends[0]), height: thick };
      svg("rect", { ...box, rx: 1.5, fill: colour(name) }, view.svg);
      const past = value < 0 ? ends[0] - 5 : ends[1] + 5;
      svg("text", { x: past, y: y + thick / 2 + 4, "text-anchor": value < 0 ? "end" : "start" }, view.svg, text(value));
      view.spots.push({
        x: ends[1],
        y: y + thick / 2,
        box: [0, y - 1.5, view.width, y + thick + 1.5],
        title: inGroups ? group : "",
        rows: [{ name, colour: colour(name), filled: true, value: number(value) }],
        mark: (front) => svg("rect", { ...box, rx: 1.5, fill: "none", class: "over" }, front),
      });
      y += thick + 3;
    }
    y += inGroups ? 12 : 5;
  }
  svg("line", { class: "base", x1: scale(0), x2: scale(0), y1: 2, y2: y - 4 }, view.svg);
  const named = measure(chart.value_label) > view.width - left ? 2 : left;
  view.height = y + 3 + written(view, chart.value_label, { x: named, y: y + 10, class: "axis" }, view.width - named);
  view.entries = inGroups ? names.map((name) => ({ name, colour: colour(name), filled: true })) : [];
  view.find = boxed(view);
}

function drawShares(view, chart) {
  const panels = Object.entries(chart.panels);
  const keys = [...new Map(panels.flatMap(([, shares]) => shares).map(([group, row]) => [JSON.stringify([group, row]), [group, row]])).values()];
  const neutral = new Set(chart.neutral ?? []);
  const coloured = chart.names.filter((name) => !neutral.has(name));
  const looks = Object.fromEntries(
    chart.names.map((name) => {
      const at = coloured.indexOf(name);
      return [name, neutral.has(name) ? { fill: GREY, "fill-opacity": 0.4 } : { fill: PALETTE[at % 5], "fill-opacity": 0.55 ** (Math.floor(at / 5) % 3) }];
    }),
  );
  const seen = new Set();
  const left = Math.min(view.width * 0.3, Math.max(...keys.map(([, row]) => measure(row))) + 12);
  const across = panels.length > 1 && (view.width - left) / panels.length > 130 ? panels.length : 1;
  const width = (view.width - left - 6) / across - (across > 1 ? 14 : 0);
  const thick = 17;
  let y = 0;
  let bottom = 0;
  panels.forEach(([title, shares], index) => {
    const start = left + (index % across) * (width + 14);
    if (index % across === 0) y = index ? bottom + 22 : 0;
    let at = y;
    if (panels.length > 1) svg("text", { x: start, y: (at += 16) - 4, class: "group" }, view.svg, clipped(title, width));
    const byKey = new Map(shares.map(([group, row, parts]) => [JSON.stringify([group, row]), parts]));
    let group = null;
    for (const key of keys) {
      const parts = byKey.get(JSON.stringify(key));
      if (!parts && across === 1) continue;
      if (key[0] !== group) {
        group = key[0];
        at += 18;
        if (index % across === 0) svg("text", { x: left, y: at - 5, class: "group" }, view.svg, clipped(group, BOLD * (view.width - left)));
      }
      if (index % across === 0) svg("text", { x: left - 8, y: at + thick - 5, "text-anchor": "end" }, view.svg, clipped(key[1], left - 10));
      let x = start;
      for (const name of chart.names) {
        const share = parts?.[name] ?? 0;
        if (share <= 0) continue;
        seen.add(name);
        const box = { x, y: at, width: share * width, height: thick };
        svg("rect", { ...box, ...looks[name] }, view.svg);
        const inside = `${Math.round(share * 100)}%`;
        if (box.width > measure(inside) + 6) {
          const pale = (looks[name]["fill-opacity"] ?? 1) < 1;
          svg("text", { x: x + box.width / 2, y: at + thick - 5, "text-anchor": "middle", class: pale ? "inside dark" : "inside" }, view.svg, inside);
        }
        view.spots.push({
          x: x + box.width / 2,
          y: at + thick / 2,
          box: [x, at - 1, x + box.width, at + thick + 1],
          title: [panels.length > 1 ? title : "", ...key].filter(Boolean).join(", "),
          rows: [{ name, look: looks[name], colour: looks[name].fill, filled: true, value: `${(share * 100).toFixed(1)}%` }],
          mark: (front) => svg("rect", { ...box, fill: "none", class: "over" }, front),
        });
        x += box.width;
      }
      at += thick + 3;
    }
    bottom = Math.max(bottom, at);
    for (const share of [0, 0.5, 1]) {
      const anchor = { 0: "start", 0.5: "middle", 1: "end" }[share];
      svg("text", { x: start + share * width, y: at + 13, "text-anchor": anchor, class: "tick" }, view.svg, `${share * 100}%`);
    }
  });
  view.height = bottom + 20;
  view.entries = chart.names.filter((name) => seen.has(name)).map((name) => ({ name, colour: looks[name].fill, filled: looks[name]["fill-opacity"] }));
  view.find = boxed(view);
}

function drawHeat(view, chart) {
  const values = chart.maps.flat().flatMap((map) => map.values.flat()).filter(Number.isFinite);
  const largest = Math.max(...values, 1e-12);
  const narrow = view.width < 480;
  let y = 0;
  for (const line of narrow ? chart.maps.flat().map((map) => [map]) : chart.maps) {
    const across = narrow ? 1 : Math.max(...chart.maps.map((maps) => maps.length));
    const each = (view.width - 4) / across;
    let bottom = y;
    line.forEach((map, index) => {
      const left = index * each + Math.min(each * 0.3, Math.max(...map.rows.map((row) => measure(row))) + 8);
      const width = (each * (index + 1) - 10 - left) / map.columns.length;
      const height = Math.max(9, Math.min(20, 240 / map.rows.length));
      svg("text", { x: left, y: y + 13, class: "group" }, view.svg, clipped(map.title, BOLD * (each * (index + 1) - left)));
      const every = Math.ceil(map.rows.length / Math.max(1, Math.floor((map.rows.length * height) / 14)));
      const widest = Math.max(...map.columns.map((column) => measure(column))) + 6;
      const everyColumn = Math.max(1, Math.ceil(widest / width));
      map.rows.forEach((row, r) => {
        const top = y + 20 + r * height;
        if (r % every === 0) svg("text", { x: left - 5, y: top + height / 2 + 4, "text-anchor": "end", class: "tick" }, view.svg, clipped(row, left - index * each - 6));
        map.columns.forEach((column, c) => {
          const value = map.values[r][c];
          const box = { x: left + c * width, y: top, width: Math.max(0.5, width - 0.6), height: height - 0.6 };
          svg("rect", { ...box, fill: PALETTE[0], "fill-opacity": Math.max(0, (value ?? 0) / largest) }, view.svg);
          view.spots.push({
            x: box.x + box.width / 2,
            y: top + height / 2,
            box: [box.x, top, box.x + width, top + height],
            title: map.title,
            rows: [{ name: `${row}, ${column}`, value: number(value) }],
            mark: (front) => svg("rect", { ...box, fill: "none", class: "over" }, front),
          });
        });
      });
      const end = y + 20 + map.rows.length * height;
      svg("rect", { x: left, y: y + 20, width: width * map.columns.length, height: map.rows.length * height, fill: "none", class: "grid" }, view.svg);
      map.columns.forEach((column, c) => {
        if (c % everyColumn === 0) svg("text", { x: left + (c + 0.5) * width, y: end + 13, "text-anchor": "middle", class: "tick" }, view.svg, column);
      });
      bottom = Math.max(bottom, end + 24);
    });
    y = bottom;
  }
  for (let step = 0; step < 10; step++) svg("rect", { x: 2 + step * 11, y: y + 4, width: 11, height: 9, fill: PALETTE[0], "fill-opacity": (step + 0.5) / 10 }, view.svg);
  const scale = `0 to ${number(largest)}: ${chart.scale}`;
  view.height = y + 7 + written(view, scale, { x: 120, y: y + 13, class: "axis" }, view.width - 120);
  view.stride = chart.maps[0][0].columns.length;
  view.find = boxed(view);
}

/** Axes, ticks, grid and labels; returns the scales and the sides of the area inside. */
function frame(view, chart, domain, height, right, { falling = false, grid = false, whole = false }) {
  const scaled = (log, ends, range) => (log ? scaleLog(ends, range) : scaleLinear(ends, range));
  const above = chart.y_label ? written(view, chart.y_label, { class: "axis", x: 0, y: 12 }, view.width) : 0;
  const top = above ? above + 15 : 10;
  height += Math.max(0, above - LINE);
  const bottom = height - (chart.x_label ? 40 : 24);
  const y = scaled(chart.log_y, domain.y, [bottom, top]);
  const yTicks = round(domain.y, chart.log_y, (bottom - top) / 46);
  const left = Math.max(...yTicks.map((tick) => measure(short(tick, domain.y)))) + 10;
  const end = view.width - right;
  const x = scaled(chart.log_x, domain.x, falling ? [end, left] : [left, end]);
  const xTicks = round(domain.x, chart.log_x, (end - left) / 84).filter((tick) => !whole || Number.isInteger(tick));
  svg("rect", { class: "zooms", x: left, y: top, width: end - left, height: bottom - top, fill: "transparent" }, view.svg);
  for (const tick of yTicks) {
    svg("line", { class: "grid", x1: left, x2: end, y1: y(tick), y2: y(tick) }, view.svg);
    svg("text", { class: "tick", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, view.svg, short(tick, domain.y));
  }
  svg("line", { class: "base", x1: left, x2: end, y1: bottom, y2: bottom }, view.svg);
  for (const tick of xTicks) {
    if (grid) svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom }, view.svg);
    svg("line", { class: "base", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }, view.svg);
    svg("text", { class: "tick", x: x(tick), y: bottom + 17, "text-anchor": "middle" }, view.svg, short(tick, domain.x));
  }
  const below = chart.x_label ? written(view, chart.x_label, { class: "axis", x: end, y: height - 4, "text-anchor": "end" }, end) : 0;
  view.height = height + Math.max(0, below - LINE);
  return { x, y, left, right: end, top, bottom };
}

/** Round values within a domain, about `count` of them. */
function round(domain, log, count) {
  const [low, high] = domain;
  if (!log || high / low <= 5) return ticks(low, high, Math.max(2, count));
  const factors = high / low < 400 ? [1, 2, 5] : [1];
  const powers = Array.from({ length: 40 }, (_, at) => at - 20);
  const all = powers.flatMap((power) => factors.map((factor) => factor * 10 ** power)).filter((value) => value >= low && value <= high);
  const step = Math.ceil(all.length / Math.max(3, count * 1.6));
  return all.filter((_, at) => at % step === 0);
}

/** The smallest and the largest value, with a margin; never of no width. */
function span(values, log, margin) {
  const usable = values.filter((value) => Number.isFinite(value) && (value > 0 || !log));
  let low = usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low > high) return [1, 10];
  if (log) {
    if (low === high) return [low / 2, high * 2];
    const extra = (high / low) ** margin;
    return [low / extra, high * extra];
  }
  if (low === high) return [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const extra = (high - low) * margin;
  return [low - extra, high + extra];
}

/** Heights at least `gap` apart, near the given ones and between two bounds; each group of close ones keeps its mean. */
function spread(heights, gap, low, high) {
  const order = heights.map((_, at) => at).sort((a, b) => heights[a] - heights[b]);
  const groups = [];
  const first = (group) => {
    const mean = group.reduce((sum, at) => sum + heights[at], 0) / group.length;
    const start = mean - (gap * (group.length - 1)) / 2;
    return Math.max(low, Math.min(high - gap * (group.length - 1), start));
  };
  for (const at of order) {
    groups.push([at]);
    while (groups.length > 1 && first(groups.at(-1)) - first(groups.at(-2)) < gap * groups.at(-2).length) {
      groups.splice(-2, 2, [...groups.at(-2), ...groups.at(-1)]);
    }
  }
  const result = [];
  for (const group of groups) group.forEach((at, place) => (result[at] = first(group) + gap * place));
  return result;
}

function boxed(view) {
  return (x, y) => view.spots.findIndex(({ box: [left, top, right, bottom] }) => x >= left && x < right && y >= top && y < bottom);
}

function overlap(one, other) {
  return one[0] < other[2] && one[2] > other[0] && one[1] < other[3] && one[3] > other[1];
}

/** A number as people read it, to four digits. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1e4) return fixed(value, 0);
  const digits = size ? Math.max(0, 3 - Math.floor(Math.log10(size))) : 0;
  return (digits > 7 ? value.toExponential(3) : String(Number(value.toFixed(digits)))).replace("-", "−");
}

function fixed(value, digits) {
  if (!Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

/** The text of a tick: 2000 as 2k where a domain is large. */
function short(value, domain) {
  const size = Math.abs(value);
  const found = Math.max(...domain.map(Math.abs)) >= 2000 && [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([unit]) => size >= unit);
  const text = found ? `${Number((value / found[0]).toPrecision(4))}${found[1]}` : String(Number(value.toPrecision(6)));
  return text.replace("-", "−");
}

function measure(text) {
  LETTERS.font = FONT;
  return LETTERS.measureText(text).width;
}

/** Write a text in lines that are at most this wide; the height of all of them. */
function written(view, text, attributes, width) {
  const most = attributes.class === "group" ? BOLD * width : width;
  const lines = [];
  for (const word of text.split(" ")) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && measure(longer) <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  lines.forEach((one, at) => svg("text", { ...attributes, y: attributes.y + LINE * at }, view.svg, clipped(one, most)));
  return LINE * lines.length;
}

/** A text that is at most this wide. */
function clipped(text, width) {
  if (measure(text) <= width) return text;
  let kept = text;
  while (kept.length > 1 && measure(`${kept}…`) > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

function swatch(colour, dash, filled) {
  const picture = svg("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" });
  if (filled) svg("rect", { x: 2, width: 12, height: 10, rx: 2, fill: colour, "fill-opacity": filled === true ? 1 : filled }, picture);
  else svg("line", { x1: 0, x2: 16, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash || null }, picture);
  return picture;
}

function svg(name, attributes = {}, parent = null, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent?.append(element);
  return element;
}

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The chart as rows of values, names first. */
export function rows(chart) {
  switch (chart.kind) {
    case "lines": {
      const series = Object.entries(chart.series).flatMap(([name, [xs, ys]]) => {
        const errors = chart.errors?.[name];
        return [[name, xs, ys], ...(errors ? [[`${name}, standard error`, xs, errors]] : [])];
      });
      const columns = series.map(([, xs, ys]) => new Map(xs.map((x, at) => [x, ys[at]])));
      const xs = [...new Set(columns.flatMap((values) => [...values.keys()]))].sort((a, b) => a - b);
      return [[chart.x_label, ...series.map(([name]) => name)], ...xs.map((x) => [x, ...columns.map((values) => values.get(x))])];
    }
    case "points":
      return [["name", chart.x_label, chart.y_label], ...Object.entries(chart.points).map(([name, point]) => [name, ...point])];
    case "bars": {
      const grouped = Object.entries(chart.values).flatMap(([group, value]) =>
        typeof value === "object" && value !== null ? Object.entries(value).map(([name, v]) => [group, name, v]) : [[group, "", value]],
      );
      return [["group", "name", chart.value_label], ...grouped];
    }
    case "shares":
      return [
        ["panel", "group", "row", ...chart.names],
        ...Object.entries(chart.panels).flatMap(([panel, shares]) =>
          shares.map(([group, row, parts]) => [panel, group, row, ...chart.names.map((name) => parts[name] ?? 0)]),
        ),
      ];
    default:
      return [
        ["map", "row", "column", chart.scale],
        ...chart.maps.flat().flatMap((map) => map.rows.flatMap((row, r) => map.columns.map((column, c) => [map.title, row, column, map.values[r][c]]))),
      ];
  }
}

const EXPORTED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight"];

/** The chart as a complete SVG file: its title and legend in it, every colour and font as it is seen now. */
function exported(view) {
  const { svg: shown, legend, width } = view;
  view.show(-1);
  const copy = shown.cloneNode(true);
  const copies = copy.querySelectorAll("*");
  shown.querySelectorAll("*").forEach((element, at) => {
    const style = getComputedStyle(element);
    for (const name of EXPORTED) copies[at].setAttribute(name, style.getPropertyValue(name));
  });
  const box = shown.getBoundingClientRect();
  const style = getComputedStyle(view.plot);
  const text = { fill: style.color, "font-family": style.fontFamily, "font-size": 12 };
  const names = [...legend.querySelectorAll("button")].map((button) => [button, button.getBoundingClientRect()]);
  const above = names.length && !view.plot.contains(legend) ? box.top - Math.min(...names.map(([, { top }]) => top)) : 0;
  const top = above + (view.chart.title ? 26 : 4);
  for (const [button, place] of names) {
    const [x, y] = [place.left - box.left, place.top + place.height / 2 - box.top];
    const mark = button.querySelector("svg").firstChild;
    const colour = getComputedStyle(mark);
    const dash = mark.getAttribute("stroke-dasharray");
    if (mark.localName === "rect") svg("rect", { x: x + 2, y: y - 5, width: 12, height: 10, rx: 2, fill: colour.fill, "fill-opacity": colour.fillOpacity }, copy);
    else svg("line", { x1: x, x2: x + 16, y1: y, y2: y, stroke: colour.stroke, "stroke-width": 2.5, "stroke-dasharray": dash }, copy);
    svg("text", { ...text, x: x + 22, y: y + 4 }, copy, button.textContent);
  }
  if (view.chart.title) svg("text", { ...text, x: 0, y: 14 - top, "font-size": 14, "font-weight": 600 }, copy, view.chart.title);
  const paper = getComputedStyle(document.documentElement).getPropertyValue("background-color");
  const size = { x: -8, y: -top - 4, width: width + 16, height: view.height + top + 12 };
  copy.prepend(svg("rect", { ...size, fill: paper === "rgba(0, 0, 0, 0)" ? "#ffffff" : paper }));
  copy.setAttribute("viewBox", Object.values(size).join(" "));
  copy.setAttribute("width", size.width);
  copy.setAttribute("height", size.height);
  return new XMLSerializer().serializeToString(copy);
}

/** An SVG as a PNG that is sharp on dense screens. */
export async function pictured(text) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = make("canvas", { width: image.width * 2, height: image.height * 2 });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
