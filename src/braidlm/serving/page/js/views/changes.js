/** What changes from one side to the other, token by token: the probability of what stands there, and of all else. */
import { post } from "../api.js";
import { useAnswer } from "../asking.js";
import { Bars, quoted } from "../parts/bars.js";
import { Downloads } from "../parts/downloads.js";
import { Problem } from "../parts/fields.js";
import { textPicture } from "../parts/picture.js";
import { Tokens } from "../parts/tokens.js";
import { classes, html, percent, useEffect, useState } from "../ui.js";

const STRONGEST = 3; // a change of so many bits has the full colour
const ROWS = 10;
const TOP = 8;

const bits = ({ before, after }) => (before > 0 && after > 0 ? Math.log2(after / before) : after === before ? 0 : after > before ? 99 : -99);
const isKnown = (token) => token.before !== null && token.before !== undefined && token.after !== null && token.after !== undefined;

const divergence = (token) => (token.divergence < 0.0005 ? "< 0.001" : token.divergence.toFixed(3));

function lookOf(token) {
  if (!isKnown(token)) return {};
  const change = bits(token);
  if (Math.abs(change) < 0.05) return {};
  return { name: change > 0 ? "better" : "worse", strength: Math.min(1, Math.abs(change) / STRONGEST) };
}

/** @param {any} props.children what chooses the text, before it */
export function Changes({ answer, left, right, children }) {
  const [picked, pick] = useState(null);
  useEffect(() => pick(null), [answer]);
  const { tokens } = answer;
  const known = tokens.map((token, index) => ({ ...token, index })).filter(isKnown);
  const most = [...known].sort((a, b) => b.divergence - a.divergence).slice(0, ROWS);
  const picture = () =>
    textPicture(`${left.title} → ${right.title}`, [{ name: "more probable", kind: "c1" }, { name: "less probable", kind: "c2 dashed" }], [
      { label: "", tokens: tokens.map((token) => ({ text: token.text, kind: { better: "c1", worse: "c2 dashed" }[lookOf(token).name] ?? "", strength: lookOf(token).strength ?? 0 })) },
    ]);
  const table = () => [["position", "token", "text", "before", "after", "rank before", "rank after", "divergence"], ...tokens.map((t, i) => [i, t.id, t.text, t.before, t.after, t.rank_before, t.rank_after, t.divergence])];
  return html`<section class="changes" aria-label="What changes">
    <h2>What changes</h2>
    ${children}
    <p class="verdict">${verdict(answer)}</p>
    <ul class="names"><li><span class="swatch better"></span>more probable on the right</li><li><span class="swatch worse"></span>less probable</li></ul>
    <${Tokens} label="The text, with what changes" tokens=${tokens} picked=${picked} look=${(index) => lookOf(tokens[index])} pick=${(index) => pick(index)}
      say=${(index) => (isKnown(tokens[index]) ? `${percent(tokens[index].before)} to ${percent(tokens[index].after)}` : "the first token")} tip=${(index) => html`<${Tip} token=${tokens[index]} />`} />
    <p class="soft">Click a token for what both sides find most probable there.</p>
    <div aria-live="polite">${picked !== null && tokens[picked] && html`<${Nexts} key=${picked} tokens=${tokens} at=${picked} left=${left} right=${right} />`}</div>
    ${most.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of the largest changes"><table>
      <caption>The tokens that change most. Divergence is Jensen-Shannon's of the two next-token distributions, from 0 (the same) to 1.</caption>
      <thead><tr><th scope="col">token</th><th scope="col" class="number">left</th><th scope="col" class="number">right</th><th scope="col" class="number">rank</th><th scope="col" class="number">divergence</th></tr></thead>
      <tbody>${most.map((t) => html`<tr key=${t.index}><th scope="row"><button type="button" class="link" onClick=${() => pick(t.index)}>${quoted(t.text)}</button></th><td class="number">${percent(t.before)}</td>
        <td class=${classes("number", lookOf(t).name)}>${percent(t.after)}</td><td class="number">${t.rank_before ?? "–"} → ${t.rank_after ?? "–"}</td><td class="number">${divergence(t)}</td></tr>`)}</tbody></table></div>`}
    <${Downloads} name=${`${left.title} to ${right.title}`} picture=${picture} table=${table} data=${() => ({ left: left.title, right: right.title, ...answer })} />
  </section>`;
}

function verdict({ bits_before: before, bits_after: after }) {
  if (!Number.isFinite(before) || !Number.isFinite(after)) return "";
  const [left, right] = [before.toFixed(3), after.toFixed(3)];
  if (left === right) return `Both sides find this text equally probable: ${left} bits per byte.`;
  return `On the right this text is ${after > before ? "less" : "more"} probable: ${right} bits per byte, against ${left} on the left.`;
}

function Tip({ token }) {
  if (!isKnown(token)) return html`<b>${quoted(token.text)}</b> begins the text: nothing predicts it`;
  return html`<p><b>${quoted(token.text)}</b> ${percent(token.before)} → ${percent(token.after)}</p><p class="soft">divergence ${divergence(token)}</p>`;
}

/** The most probable tokens at one place on both sides. */
function Nexts({ tokens, at, left, right }) {
  if (at === 0) return null;
  // The tokens up to the first with a text are made anew from it: what a tokenizer puts before a text has none.
  const first = tokens.findIndex((token, index) => token.text !== "" || index === at - 1);
  const begin = tokens[first].text;
  const ids = tokens.slice(first + 1, at).map((token) => token.id);
  return html`<div class="panel pair" role="group" aria-label="Most probable at this place"><h3 class="wide">Where <q>${quoted(tokens[at].text)}</q> stands</h3>${[left, right].map((side, index) => html`<div key=${index}><h4 class="small-title">${side.title}</h4>
    <${Next} body=${{ model: side.model.name, prompt: begin, tokens: ids, top: TOP, switches: side.switches }} actual=${tokens[at].id} /></div>`)}</div>`;
}

function Next({ body, actual }) {
  const { answer, error } = useAnswer((signal) => post("/braid/next", body, signal), [body]);
  const rows = (answer?.tokens ?? []).map((token) => ({ name: quoted(token.text), value: token.probability, kind: token.id === actual ? "taken" : "" }));
  return html`<${Problem} error=${error} /><${Bars} rows=${rows} />`;
}
