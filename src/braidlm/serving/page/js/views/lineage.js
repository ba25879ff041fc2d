/** Lineage: what a model came from, as a picture; each part tells its facts. */
import { Graph, layout } from "../../vendor/dagre.js";
import { get } from "../api.js";
import { update } from "../address.js";
import { useAnswer } from "../asking.js";
import { colourOf } from "../colours.js";
import { Downloads } from "../parts/downloads.js";
import { Problem } from "../parts/fields.js";
import { figure, html, useEffect, useRef, useState } from "../ui.js";

const HIGH = 58;
const PAD = 8;
const LETTER = 6.5; // of an edge's label
/** The gap beside a node, and how many letters of its name are shown: with room, and on a phone. */
const [ROOMY, NARROW] = [{ gap: 22, letters: 28, letter: 9.1 }, { gap: 10, letters: 11, letter: 8.2 }];
const KINDS = { model: "model", edit: "edit", recipe: "recipe", data: "data" };

export function Lineage({ model, state }) {
  const name = encodeURIComponent(model.name);
  const { answer, error, busy } = useAnswer((signal) => get(`/braid/models/${name}/lineage`, signal), [model.name]);
  const { answer: facts, error: unknown } = useAnswer((signal) => get(`/braid/models/${name}/facts`, signal), [model.name]);
  const chosen = answer?.nodes.find((node) => node.id === state.node);
  return html`${busy && !answer && html`<p class="soft" role="status">Asking where it came from …</p>`}<${Problem} error=${error} />
    ${answer && html`<${Picture} model=${model} graph=${answer} chosen=${chosen} />`}
    ${chosen && html`<section class="panel" aria-label="Facts of what is chosen" aria-live="polite"><div class="panel-head"><h2>${chosen.label}</h2><button type="button" class="quiet" aria-label="Close" onClick=${() => update({ node: "" })}>✕</button></div>
      <p class="soft">${KINDS[chosen.kind] ?? ""}</p><${Facts} facts=${chosen.facts ?? {}} /></section>`}
    <section aria-label="Facts of the model"><h2>${model.name}</h2><${Problem} error=${unknown} />${facts && html`<${Facts} facts=${facts} />`}
      ${facts && html`<${Downloads} name=${`${model.name} facts`} data=${() => facts} />`}</section>`;
}

/** Places of all nodes and edges; from left to right where there is room for it. */
function placed(graph, across, size) {
  const made = new Graph({ multigraph: true });
  made.setGraph({ rankdir: across ? "LR" : "TB", nodesep: size.gap, ranksep: across ? 56 : 44, marginx: PAD, marginy: PAD });
  made.setDefaultEdgeLabel(() => ({}));
  graph.nodes.forEach((node) => made.setNode(node.id, { width: 28 + size.letter * Math.min(Math.max(node.label.length, 9), size.letters), height: HIGH }));
  const known = new Set(graph.nodes.map((node) => node.id));
  const edges = graph.edges.filter((edge) => known.has(edge.from) && known.has(edge.to));
  edges.forEach((edge, index) => made.setEdge(edge.from, edge.to, edge.label ? { width: LETTER * edge.label.length, height: 14, labelpos: "c" } : {}, String(index)));
  layout(made);
  const { width, height } = made.graph();
  return {
    width,
    height,
    nodes: graph.nodes.map((node) => ({ ...node, ...made.node(node.id) })),
    edges: edges.map((edge, index) => ({ ...edge, ...made.edge(edge.from, edge.to, String(index)) })),
  };
}

function Picture({ model, graph, chosen }) {
  const box = useRef(null);
  const [room, setRoom] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(() => setRoom(box.current?.clientWidth ?? 0));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const size = room && room < 560 ? NARROW : ROOMY;
  const across = placed(graph, true, size);
  const drawing = room && across.width > room ? placed(graph, false, size) : across;
  const shrunk = room && drawing.width > room && drawing.width < 1.4 * room ? room / drawing.width : 1;
  const choose = (node) => update({ node: node.id === chosen?.id ? "" : node.id });
  const short = (text) => (text.length > size.letters ? `${text.slice(0, size.letters - 1)}…` : text);
  const svg = () => standalone(box.current.querySelector("svg"));
  return html`<figure class="lineage" ref=${box}>
    <div class="scroll" tabindex="0" role="region" aria-label="Picture of the lineage"><svg role="group" aria-label=${`Lineage of ${model.name}`} width=${shrunk * drawing.width} height=${shrunk * drawing.height} viewBox=${`0 0 ${drawing.width} ${drawing.height}`}>
      <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="head-of-arrow" /></marker></defs>
      ${drawing.edges.map((edge, index) => html`<g key=${index} class="edge"><path d=${curve(edge.points)} marker-end="url(#arrow)" />${edge.label && html`<text x=${edge.x} y=${edge.y + 4} text-anchor="middle">${edge.label}</text>`}</g>`)}
      ${drawing.nodes.map((node) => html`<g key=${node.id} class=${`node ${KINDS[node.kind] ?? "model"} ${node.id === chosen?.id ? "chosen" : ""}`} role="button" tabindex="0" aria-pressed=${String(node.id === chosen?.id)}
        transform=${`translate(${node.x - node.width / 2} ${node.y - HIGH / 2})`} onClick=${() => choose(node)} onKeyDown=${(event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          choose(node);
        }}>${short(node.label) === node.label ? "" : html`<title>${node.label}</title>`}<rect width=${node.width} height=${HIGH} rx=${node.kind === "data" ? 28 : 9} />
        <text class="kind" x="14" y="22">${KINDS[node.kind] ?? ""}</text> <text class="name" x="14" y="42">${short(node.label)}</text></g>`)}
    </svg></div>
    <figcaption>What ${model.name} came from. Choose a part for its facts.</figcaption>
    <${Downloads} name=${`${model.name} lineage`} picture=${svg} data=${() => graph} />
  </figure>`;
}

function curve(points) {
  const [first, ...rest] = points;
  if (rest.length < 2) return `M${first.x} ${first.y}L${rest[0].x} ${rest[0].y}`;
  let path = `M${first.x} ${first.y}`;
  for (let index = 0; index + 1 < rest.length; index += 1) {
    const [bend, next] = [rest[index], rest[index + 1]];
    const end = index + 2 === rest.length ? next : { x: (bend.x + next.x) / 2, y: (bend.y + next.y) / 2 };
    path += `Q${bend.x} ${bend.y} ${end.x} ${end.y}`;
  }
  return path;
}

/** A copy of a drawing that keeps its looks without the page's stylesheet. */
function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  const [from, to] = [drawing, copy].map((root) => [...root.querySelectorAll("rect, path, text")]);
  const kept = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size", "font-weight"];
  from.forEach((element, index) => {
    const looks = getComputedStyle(element);
    kept.forEach((name) => to[index].setAttribute(name, looks.getPropertyValue(name)));
  });
  copy.querySelectorAll("[tabindex]").forEach((one) => one.removeAttribute("tabindex"));
  const sheet = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: colourOf("--paper") })) sheet.setAttribute(name, value);
  copy.prepend(sheet);
  return new XMLSerializer().serializeToString(copy);
}

/** Facts as a table; what is nested is opened, and long lists of values stand in one cell. */
function Facts({ facts }) {
  const entries = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "" && value.length !== 0);
  if (!entries.length) return html`<p class="soft">Nothing more is known.</p>`;
  return html`<dl class="facts-list">${entries.map(([name, value]) => html`<div key=${name}><dt>${name.replaceAll("_", " ")}</dt><dd><${Fact} value=${value} /></dd></div>`)}</dl>`;
}

function Fact({ value }) {
  if (Array.isArray(value) && value.some((one) => typeof one === "object")) {
    return html`<details><summary>${value.length} ${value.length === 1 ? "entry" : "entries"}</summary>${value.map((one, index) => (typeof one === "object" && one ? html`<${Facts} key=${index} facts=${one} />` : html`<p key=${index}>${figure(one)}</p>`))}</details>`;
  }
  if (Array.isArray(value)) return value.map((one) => figure(one)).join(", ") || "–";
  if (typeof value === "object" && value) return html`<details><summary>${Object.keys(value).slice(0, 4).join(", ").replaceAll("_", " ") || "nothing"}</summary><${Facts} facts=${value} /></details>`;
  return typeof value === "boolean" ? (value ? "yes" : "no") : figure(value);
}
