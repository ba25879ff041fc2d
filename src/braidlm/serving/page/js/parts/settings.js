/** How the next token is chosen. */
import { update } from "../address.js";
import { html } from "../ui.js";
import { Field, Slider } from "./fields.js";

export function Settings({ state, limit }) {
  return html`<div class="settings">
    <${Slider} label="Temperature" value=${state.temperature} least=${0} most=${2} step=${0.05} hint="0 takes the most probable token"
      say=${(value) => value.toFixed(2)} change=${(temperature) => update({ temperature })} />
    <${Slider} label="Top-p" value=${state.top_p} least=${0.05} most=${1} step=${0.05} hint="only the best tokens that make up this share"
      say=${(value) => value.toFixed(2)} change=${(top_p) => update({ top_p })} />
    <${Slider} label="Most new tokens" value=${Math.min(state.max_tokens, limit)} least=${1} most=${limit} step=${1} change=${(max_tokens) => update({ max_tokens })} />
    <${Field} label="Seed" hint="the same seed writes the same text">
      <input type="number" min="0" step="1" value=${state.seed} placeholder="another each time" onInput=${(event) => update({ seed: event.target.value })} />
    </${Field}>
  </div>`;
}

/** What a request says about sampling; without a seed in the address, `seed` is used. */
export function samplingOf(state, seed) {
  const chosen = state.seed === "" ? seed : Number(state.seed);
  return { temperature: state.temperature, top_p: state.top_p, ...(state.top_k ? { top_k: state.top_k } : {}), ...(chosen === undefined ? {} : { seed: chosen }) };
}
