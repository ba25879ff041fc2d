/** Side by side: a model with and without some of its parts, or two models, on one prompt. */
import { post } from "../api.js";
import { update } from "../address.js";
import { useAnswer, useWork } from "../asking.js";
import { Choice, ModelChoice, Problem, TextBox } from "../parts/fields.js";
import { Settings, samplingOf } from "../parts/settings.js";
import { Switches, namesOf, partsIn, partsOf, switchesOf } from "../parts/switches.js";
import { Tokens } from "../parts/tokens.js";
import { continueText, joined, newSeed, tokensOf } from "../parts/writing.js";
import { html, percent, useEffect, useState } from "../ui.js";
import { quoted } from "../parts/bars.js";
import { Downloads } from "../parts/downloads.js";
import { Changes } from "./changes.js";

/** One model, as it is and without what is switched off. */
export function SwitchOff({ model, state }) {
  const off = partsIn(model, state.off);
  const left = { title: "With all parts", model, switches: {} };
  const right = { title: off.length ? `Without ${namesOf(model, off)}` : "Nothing is off yet", model, switches: switchesOf(model, off) };
  const panel = html`<section class="panel" aria-label="Parts"><h2 class="small-title">Parts that are active</h2>
    <${Switches} label="Parts" model=${model} off=${off} change=${(now) => update({ off: now })} />
    ${off.length > 0 && html`<div class="buttons"><button type="button" onClick=${() => update({ off: [] })}>All on</button></div>`}</section>`;
  return html`<${Beside} state=${state} left=${left} right=${right} same=${!off.length} hint="Switch a part off, and see what the model says without it.">${panel}</${Beside}>`;
}

/** Two models, each with its parts. */
export function TwoModels({ model, models, state }) {
  const other = models.find((one) => one.name === state.other) ?? models.find((one) => one.name !== model.name) ?? model;
  const [offLeft, offRight] = [partsIn(model, state.off), partsIn(other, state.off_other)];
  const choose = (which, name) => update({ [which]: name, [which === "model" ? "off" : "off_other"]: [] }, true);
  const side = (one, off) => ({ title: off.length ? `${one.name} without ${namesOf(one, off)}` : one.name, model: one, switches: switchesOf(one, off) });
  const panel = html`<section class="panel pair" aria-label="Models">
    ${[["model", "Left", model, offLeft, "off"], ["other", "Right", other, offRight, "off_other"]].map(
      ([which, label, one, off, key]) => html`<div key=${which}><${ModelChoice} label=${`${label} model`} models=${models} value=${one.name} change=${(name) => choose(which, name)} />
        ${partsOf(one).length > 0 && html`<details open=${off.length > 0}><summary>Its parts</summary><${Switches} label=${`Parts of ${one.name}, ${label.toLowerCase()}`} model=${one} off=${off} change=${(now) => update({ [key]: now })} /></details>`}</div>`,
    )}</section>`;
  const [left, right] = [side(model, offLeft), side(other, offRight)];
  const same = model === other && JSON.stringify(left.switches) === JSON.stringify(right.switches);
  return html`<${Beside} state=${state} left=${left} right=${right} same=${same} hint="Choose two different models, or switch off different parts.">${panel}</${Beside}>`;
}

/** The prompt, both texts, and what changes from one side to the other. */
function Beside({ state, left, right, same, hint, children }) {
  const [texts, setTexts] = useState({ left: null, right: null });
  const [{ busy, error }, start, stop] = useWork();
  const sides = { left, right };
  const limit = Math.max(1, Math.min(...[left, right].map(({ model }) => model.limit ?? model.context ?? 512)) - 1);
  const write = (which) =>
    start(async (signal) => {
      // The seed stands in the address from now on: whoever opens it sees the same two texts.
      const seed = state.seed === "" ? newSeed() : Number(state.seed);
      update({ both: true, seed: String(seed) });
      const one = async (name) => {
        const { model, switches } = sides[name];
        const show = (made) => setTexts((old) => ({ ...old, [name]: made }));
        show([]);
        const ids = (await tokensOf(model.name, state.prompt, signal)).map((token) => token.id);
        await continueText({ model: model.name, ids, max_tokens: Math.min(state.max_tokens, limit), sampling: samplingOf({ ...state, seed: String(seed) }), switches }, show, signal);
      };
      await Promise.all(which.map(one));
    });
  const comparable = left.model.tokenizer === right.model.tokenizer;
  const setting = JSON.stringify([left.model.name, left.switches, right.model.name, right.switches]);
  const [about, setAbout] = useState(state.both ? null : setting);
  // What was written once is written again where a part or a model changes, so that both texts stay true.
  useEffect(() => {
    if (setting === about) return;
    setAbout(setting);
    if (state.both && state.prompt) write(["left", "right"]);
  }, [setting]);
  const changed = (prompt) => {
    stop();
    setTexts({ left: null, right: null });
    update({ prompt, written: "", both: false });
  };
  const written = texts.left && texts.right;
  const measured = busy ? null : state.prompt + (written ? joined(texts[state.measured] ?? []) : "");
  const { answer, error: unmeasured } = useAnswer(
    (signal) => post("/braid/changes", { model: left.model.name, text: measured, against: left.switches, switches: right.switches, ...(right.model === left.model ? {} : { other: right.model.name }) }, signal),
    [measured, setting, same || !comparable ? null : 1],
    250,
  );
  const parting = firstDifference(texts.left, texts.right);
  return html`<div class="with-panel">
    ${children}
    <section class="sheet" aria-label="Prompt">
      <${TextBox} label="Prompt" value=${state.prompt} change=${changed} send=${() => write(["left", "right"])} rows=${2} placeholder="How does it begin?" />
      <div class="buttons">
        ${busy ? html`<button type="button" class="main" key="stop" onClick=${stop}>Stop</button>` : html`<button type="button" class="main" key="go" disabled=${!state.prompt} onClick=${() => write(["left", "right"])}>Write both</button>`}
        <details class="inline"><summary>How tokens are chosen</summary><${Settings} state=${state} limit=${limit} /></details>
      </div>
      <${Problem} error=${error} />
    </section>
  </div>
  <div class="pair texts">${["left", "right"].map(
    (name) => html`<section key=${name} aria-label=${sides[name].title}><h2 class="small-title">${sides[name].title}</h2>
      ${texts[name] ? html`<${Tokens} label=${`Written: ${sides[name].title}`} before=${state.prompt} tokens=${texts[name]} writing=${busy} look=${(index) => (index === parting ? { name: "differs" } : {})}
        say=${(index) => percent(texts[name][index].probability)} tip=${(index) => html`<b>${quoted(texts[name][index].text)}</b> ${percent(texts[name][index].probability)}`} />`
        : html`<p class="soft">${name === "left" ? "Both sides write with the same seed, so what differs comes from the models alone." : same ? hint : ""}</p>`}</section>`,
  )}</div>
  <p class="soft" role="status">${busy ? "Writing …" : written ? (parting === null ? "Both texts are the same." : `The texts part at token ${parting + 1}.`) : ""}</p>
  ${written && !busy && html`<${Downloads} name=${`${left.title} and ${right.title}`} data=${() => ({ prompt: state.prompt, ...samplingOf(state), sides: ["left", "right"].map((name) => ({ title: sides[name].title, model: sides[name].model.name, switches: sides[name].switches, text: joined(texts[name]), tokens: texts[name] })) })} />`}
  ${!comparable && html`<p class="soft after">These models have different tokenizers: their texts can be read beside each other, and their probabilities cannot be compared.</p>`}
  <${Problem} error=${unmeasured} />
  ${answer && !same && html`<${Changes} answer=${answer} left=${left} right=${right}>${written && html`<${Choice} label="The text that is measured" value=${state.measured}
    options=${[["left", "Left text"], ["right", "Right text"], ["prompt", "Prompt alone"]]} change=${(one) => update({ measured: one })} />`}</${Changes}>`}`;
}

function firstDifference(left, right) {
  if (!left?.length || !right?.length) return null;
  for (let index = 0; index < Math.max(left.length, right.length); index += 1) {
    if (left[index]?.text !== right[index]?.text) return index;
  }
  return null;
}
