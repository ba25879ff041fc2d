/** Who goes where: the path, expert or member that served each token, one layer at a time or all below each other. */
import { post } from "../api.js";
import { update } from "../address.js";
import { useAnswer } from "../asking.js";
import { namedClasses } from "../colours.js";
import { Bars, quoted } from "../parts/bars.js";
import { Downloads } from "../parts/downloads.js";
import { Check, Problem, Slider, TextBox } from "../parts/fields.js";
import { textPicture } from "../parts/picture.js";
import { Tokens } from "../parts/tokens.js";
import { html, percent, useState } from "../ui.js";

const SHOWN = 8;
const PALEST = 0.3;

export function Routes({ model, state }) {
  const { answer, error, busy } = useAnswer(
    (signal) => post("/braid/routings", { model: model.name, text: state.prompt }, signal),
    [model.name, state.prompt],
    350,
  );
  return html`<section class="sheet" aria-label="Text">
      <${TextBox} label="Text" value=${state.prompt} change=${(prompt) => update({ prompt, written: "" })} rows=${2} placeholder="A text whose tokens are followed through the model" />
      <p class="soft" role="status">${busy ? "Following the tokens …" : ""}</p><${Problem} error=${error} />
    </section>
    ${answer && (answer.layers.length ? html`<${Routed} model=${model} state=${state} answer=${answer} />` : html`<p class="soft">${model.name} has nothing that chooses: every token takes the same way.</p>`)}`;
}

/** A layer as it is shown: of each token what served it, how much, and all weights. */
function readLayer(layer, tokens) {
  const gates = layer.kind === "gates";
  const largest = gates ? Math.max(...layer.weights.map((row) => row[0] ?? 0), 1e-9) : 1;
  const served = tokens.map((_, index) => {
    const weights = layer.weights[index] ?? [];
    const among = layer.chosen[index] ?? [];
    if (!among.length) return null;
    const best = among.reduce((a, b) => (weights[b] > weights[a] ? b : a));
    return { name: layer.choices[best], weight: weights[best], strength: PALEST + (1 - PALEST) * Math.min(1, weights[best] / largest) };
  });
  return { ...layer, label: layer.label ?? layer.name, gates, served };
}

/** Of each choice: the tokens that it served most of, those that chose it at all, and its part of all weights. */
function sharesOf(layer) {
  const tokens = layer.served.length;
  return layer.choices.map((name, index) => ({
    name,
    first: layer.served.filter((one) => one?.name === name).length / tokens,
    chosen: layer.chosen.filter((among) => among.includes(index)).length / tokens,
    weight: layer.weights.reduce((sum, row) => sum + (row[index] ?? 0), 0) / tokens,
  }));
}

function Routed({ model, state, answer }) {
  const [only, setOnly] = useState(null);
  const layers = answer.layers.map((layer) => readLayer(layer, answer.tokens));
  const at = Math.min(Math.max(state.layer, 0), layers.length - 1);
  const shown = state.rows ? layers : [layers[at]];
  const longestFirst = [...layers].sort((a, b) => b.choices.length - a.choices.length);
  const every = [...(model.paths ?? []), ...(model.members ?? []), ...longestFirst.flatMap((layer) => layer.choices)];
  const known = new Set([...(model.paths ?? []), ...(model.members ?? [])]);
  const combined = new Set(layers.filter((l) => l.kind === "paths").flatMap((l) => l.choices).filter((name) => known.size && !known.has(name)));
  const kinds = namedClasses(every, combined);
  const names = [...new Set(shown.flatMap((layer) => layer.choices))];
  const lookIn = (layer) => (index) => {
    const one = layer.served[index];
    return one ? { name: kinds.get(one.name), strength: one.strength, faint: only && one.name !== only } : { faint: true };
  };
  const picture = () =>
    textPicture(
      `${model.name}: who goes where`,
      names.map((name) => ({ name, kind: kinds.get(name) })),
      shown.map((layer) => ({
        label: layer.label,
        tokens: answer.tokens.map(({ text }, index) => ({ text, kind: layer.served[index] ? kinds.get(layer.served[index].name) : "", strength: layer.served[index]?.strength ?? 0 })),
      })),
    );
  const table = () => [
    ["layer", "position", "token", "text", "choice", "weight", "chosen"],
    ...layers.flatMap((layer) =>
      answer.tokens.flatMap((token, index) => layer.choices.map((name, which) => [layer.label, index, token.id, token.text, name, layer.weights[index]?.[which], layer.chosen[index]?.includes(which) ?? false])),
    ),
  ];
  return html`<section class="routed" aria-label="Who goes where">
    <div class="controls">
      ${!state.rows && layers.length > 1 && html`<${Slider} label="Layer" value=${at} least=${0} most=${layers.length - 1} step=${1} say=${(value) => layers[value].label} change=${(layer) => update({ layer })} />`}
      ${layers.length > 1 && html`<${Check} label="All layers, row by row" checked=${state.rows} change=${(rows) => update({ rows })} />`}
    </div>
    <${Legend} names=${names} kinds=${kinds} only=${only} choose=${setOnly} />
    ${shown.map((layer) => html`<div class="layer" key=${layer.name}>
      ${(state.rows || layers.length === 1) && html`<h2 class="small-title">${layer.label}</h2>`}
      <${Tokens} label=${`The text in ${layer.label}`} tokens=${answer.tokens} look=${lookIn(layer)} say=${(index) => spoken(layer.served[index], layer)}
        tip=${(index) => html`<${Weights} layer=${layer} index=${index} token=${answer.tokens[index]} kinds=${kinds} />`} />
    </div>`)}
    <p class="soft">Point at a token, or walk through them with the arrow keys, for its weights. ${layers.some((l) => l.gates) ? "A gate serves every token: the stronger the colour, the more it adds, as a share of its layer's output." : "The stronger the colour, the larger the weight."}</p>
    <${Shares} layers=${shown} kinds=${kinds} />
    <${Downloads} name=${`${model.name} routes`} picture=${picture} table=${table} data=${() => ({ model: model.name, text: state.prompt, ...answer })} />
  </section>`;
}

function spoken(one, layer) {
  if (!one) return "passes by";
  return layer.gates ? `the gate adds ${percent(one.weight)}` : `${one.name} ${percent(one.weight)}`;
}

/** Names with their colours; one that is pressed, or pointed at, alone keeps its colour in the text. */
function Legend({ names, kinds, only, choose }) {
  const [held, hold] = useState(null);
  const point = (name) => choose(name ?? held);
  return html`<ul class="names" aria-label="Legend">${names.map(
    (name) => html`<li key=${name}><button type="button" aria-pressed=${String(held === name)} onPointerEnter=${() => point(name)} onPointerLeave=${() => point(null)}
      onClick=${() => {
        const next = held === name ? null : name;
        hold(next);
        choose(next);
      }} class=${only && only !== name ? "faint" : ""}><span class=${`swatch ${kinds.get(name)}`}></span>${name}</button></li>`,
  )}</ul>`;
}

/** All weights of one token in one layer. */
function Weights({ layer, index, token, kinds }) {
  const chosen = layer.chosen[index] ?? [];
  if (!chosen.length) return html`<b>${quoted(token.text)}</b> passes by ${layer.label}`;
  const weights = layer.choices.map((name, which) => ({
    name,
    value: layer.weights[index][which],
    kind: kinds.get(name),
  }));
  const best = weights.sort((a, b) => b.value - a.value).slice(0, SHOWN);
  const left = weights.length - best.length;
  return html`<p><b>${quoted(token.text)}</b> in ${layer.label}</p><${Bars} rows=${best} />${left > 0 && html`<p class="soft">and ${left} more</p>`}`;
}

function Shares({ layers, kinds }) {
  if (layers.every((layer) => layer.gates)) return null;
  const rows = layers.filter((layer) => !layer.gates).flatMap((layer) => sharesOf(layer).map((share) => ({ layer: layer.label, ...share })));
  const several = layers.length > 1;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of shares"><table>
    <caption>Of the tokens of this text: whom each choice served most, who took it at all, and its part of all weight.</caption>
    <thead><tr>${several && html`<th scope="col">layer</th>`}<th scope="col">choice</th><th scope="col" class="number">serves most</th><th scope="col" class="number">taken</th><th scope="col" class="number">weight</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${`${row.layer} ${row.name}`}>${several && html`<td>${row.layer}</td>`}<th scope="row"><span class=${`swatch ${kinds.get(row.name)}`}></span>${row.name}</th>
      <td class="number">${percent(row.first)}</td><td class="number">${percent(row.chosen)}</td><td class="number">${percent(row.weight)}</td></tr>`)}</tbody>
  </table></div>`;
}
