/** Write: a prompt that the model continues as one looks on; any token can be changed for another. */
import { post } from "../api.js";
import { addressOf, update } from "../address.js";
import { useAnswer, useWork } from "../asking.js";
import { Bars, quoted } from "../parts/bars.js";
import { Downloads } from "../parts/downloads.js";
import { Check, Choice, Problem, TextBox } from "../parts/fields.js";
import { Settings, samplingOf } from "../parts/settings.js";
import { Tokens } from "../parts/tokens.js";
import { continueText, joined, tokensOf } from "../parts/writing.js";
import { html, percent, useEffect, useRef, useState } from "../ui.js";
import { Chat } from "./chat.js";

const TOP = 12;
const ENDS = { stop: "The text ended.", length: "As many tokens as were asked for." };

export function Write({ model, state }) {
  if (!model.chat) return html`<${Text} model=${model} state=${state} />`;
  return html`<${Choice} label="Form" options=${[["text", "Text"], ["chat", "Chat"]]} value=${state.form} change=${(form) => update({ form })} />
    ${state.form === "chat" ? html`<${Chat} model=${model} state=${state} />` : html`<${Text} model=${model} state=${state} />`}`;
}

function Text({ model, state }) {
  const [tokens, setTokens] = useState([]);
  const [prompt, setPrompt] = useState(null);
  const [picked, pick] = useState(null);
  const [ended, setEnded] = useState(null);
  const [{ busy, error }, start, stop] = useWork();
  const panel = useRef(null);
  const limit = Math.max(1, (model.limit ?? model.context ?? 512) - 1);

  // What an address brings along was written before: it is cut into tokens again, so that it can be gone on with.
  useEffect(() => {
    if (state.written && !tokens.length) {
      start(async (signal) => {
        const all = await tokensOf(model.name, state.prompt + state.written, signal);
        let left = state.prompt.length;
        const at = all.findIndex((token) => (left -= token.text.length) < 0);
        setPrompt(all.slice(0, at));
        setTokens(all.slice(at));
      });
    }
  }, [model.name]);

  /** Go on after the prompt and the tokens that are kept. */
  const go = (kept) =>
    start(async (signal) => {
      pick(null);
      setEnded(null);
      setTokens(kept);
      let all = kept;
      const before = kept.length && prompt ? prompt : await tokensOf(model.name, state.prompt, signal);
      setPrompt(before);
      const show = (more) => {
        all = [...kept, ...more];
        setTokens(all);
      };
      const ids = [...before, ...kept].map((token) => token.id);
      try {
        const max_tokens = Math.min(state.max_tokens, limit);
        setEnded(await continueText({ model: model.name, ids, max_tokens, sampling: samplingOf(state), switches: {} }, show, signal));
      } finally {
        update({ written: joined(all) });
      }
    });
  const take = (index, token) => {
    go([...tokens.slice(0, index), { id: token.id, text: token.text, probability: token.probability }]);
  };
  const clear = () => {
    stop();
    setTokens([]);
    setPrompt(null);
    pick(null);
    setEnded(null);
    update({ written: "" });
  };
  const change = (text) => {
    if (tokens.length) clear();
    update({ prompt: text });
  };
  const all = state.prompt + joined(tokens);
  const isFull = model.limit && prompt && prompt.length + tokens.length >= model.limit;
  const look = (index) => (state.shade && Number.isFinite(tokens[index].probability) ? { name: "surprise", strength: 1 - tokens[index].probability } : {});
  const known = (index) => (Number.isFinite(tokens[index].probability) ? percent(tokens[index].probability) : "");
  return html`<div class="two-columns">
    <section class="sheet" aria-label="Text">
      <${TextBox} label="Prompt" value=${state.prompt} change=${change} send=${() => go([])} rows=${2} placeholder="How does it begin?" />
      <div class="buttons">
        ${busy
          ? html`<button type="button" class="main" key="stop" onClick=${stop}>Stop</button>`
          : html`<button type="button" class="main" key="go" onClick=${() => go(tokens)} disabled=${isFull || (!state.prompt && !tokens.length)}>${tokens.length ? "Go on" : "Continue"}</button>`}
        ${tokens.length > 0 && html`<button type="button" onClick=${() => go([])} disabled=${busy}>Another</button>`}
        ${tokens.length > 0 && html`<button type="button" class="quiet" onClick=${clear}>Clear</button>`}
        <${Check} label="Shade surprising tokens" checked=${state.shade} change=${(shade) => update({ shade })} />
      </div>
      <${Problem} error=${error} />
      ${(tokens.length > 0 || busy) && html`<${Tokens} label="The text, token by token" before=${state.prompt} tokens=${tokens} look=${look} picked=${picked} writing=${busy}
        say=${known} tip=${(index) => html`<b>${quoted(tokens[index].text)}</b> ${known(index)}`} pick=${(index) => {
          pick(index);
          panel.current?.scrollIntoView({ block: "nearest", behavior: "smooth" });
        }} />`}
      <p class="soft" role="status">${busy ? "Writing …" : tokens.length ? `${ended ? `${tokens.length} tokens. ${(isFull ? "The model reads no longer text." : ENDS[ended]) ?? ""} ` : ""}Click a token for what else could stand there.` : ""}</p>
      ${tokens.length > 0 && !busy && html`<p class="soft after"><a href=${addressOf({ view: "routes", prompt: all, written: "" })}>Who goes where in this text</a></p>
        <${Downloads} name=${`${model.name} text`} data=${() => ({ model: model.name, prompt: state.prompt, text: joined(tokens), ...samplingOf(state), tokens })}
          table=${() => [["token", "text", "probability"], ...tokens.map((token) => [token.id, token.text, token.probability])]} />`}
    </section>
    <aside>
      <div ref=${panel} aria-live="polite">${picked !== null && tokens[picked] && prompt &&
        html`<${Alternatives} model=${model} prompt=${state.prompt} before=${prompt} tokens=${tokens} at=${picked} take=${take} close=${() => pick(null)} />`}</div>
      <details class="panel" open=${innerWidth > 800}><summary>How tokens are chosen</summary><${Settings} state=${state} limit=${limit} /></details>
    </aside>
  </div>`;
}

/** The most probable tokens at one place, and what to do with them. */
function Alternatives({ model, prompt, before, tokens, at, take, close }) {
  const ids = tokens.slice(0, at).map((token) => token.id);
  const { answer, error, busy } = useAnswer(
    (signal) => post("/braid/next", { model: model.name, prompt, tokens: ids, top: TOP }, signal),
    [model.name, prompt, ids],
  );
  const rows = (answer?.tokens ?? []).map((token) => ({ name: quoted(token.text), value: token.probability, kind: token.id === tokens[at].id ? "taken" : "" }));
  return html`<section class="panel" aria-label="The most probable tokens here">
    <div class="panel-head"><h2>Instead of <q>${quoted(tokens[at].text)}</q></h2><button type="button" class="quiet" onClick=${close} aria-label="Close">✕</button></div>
    <p class="soft">What the model finds most probable at this place. Take one, and the text goes on from there.</p>
    ${busy && !answer && html`<p class="soft">Asking …</p>`}<${Problem} error=${error} />
    <${Bars} rows=${rows} take=${(index) => take(at, answer.tokens[index])} takes=${(name) => `Take ${name}`} />
    ${answer && html`<${Downloads} name=${`${model.name} next tokens`} data=${() => ({ model: model.name, before: prompt + joined(tokens.slice(0, at)), ids: [...before, ...tokens.slice(0, at)].map((token) => token.id), tokens: answer.tokens })}
      table=${() => [["token", "text", "probability"], ...answer.tokens.map((token) => [token.id, token.text, token.probability])]} />`}
  </section>`;
}
