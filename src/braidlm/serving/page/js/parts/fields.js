/** Fields of forms: a name, a control, and a word on what it does. */
import { html, useEffect, useId, useLayoutEffect, useRef, useState } from "../ui.js";

export function Field({ label, hint, children, wide }) {
  return html`<label class=${wide ? "field wide" : "field"}><span class="label">${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;
}

/** A number between two ends, as a slider with its value. */
export function Slider({ label, hint, value, least, most, step, change, say }) {
  const id = useId();
  return html`<div class="field">
    <span class="label"><label for=${id}>${label}</label><output for=${id}>${say ? say(value) : value}</output></span>
    <input id=${id} type="range" min=${least} max=${most} step=${step} value=${value} onInput=${(event) => change(Number(event.target.value))} />
    ${hint && html`<small>${hint}</small>`}
  </div>`;
}

/** One of several, side by side. */
export function Choice({ label, options, value, change }) {
  const name = useId();
  return html`<fieldset class="choice"><legend class="hidden">${label}</legend>${options.map(
    ([key, text]) => html`<label key=${key}><input type="radio" name=${name} checked=${key === value} onChange=${() => change(key)} /><span>${text}</span></label>`,
  )}</fieldset>`;
}

export function Check({ label, checked, change, kind }) {
  return html`<label class=${`check ${kind ?? ""}`}><input type="checkbox" checked=${checked} onChange=${(event) => change(event.target.checked)} /><span>${label}</span></label>`;
}

/** A text that grows with what is written; Ctrl or Command with Enter sends it. */
export function TextBox({ label, value, change, send, rows = 3, placeholder }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(box.current.scrollHeight + 2, 420)}px`;
  }, [value]);
  const key = (event) => {
    if (send && event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
  };
  return html`<label class="field wide"><span class="label">${label}</span>
    <textarea ref=${box} rows=${rows} value=${value} placeholder=${placeholder} spellcheck="false" onInput=${(event) => change(event.target.value)} onKeyDown=${key}></textarea></label>`;
}

export function ModelChoice({ label, models, value, change }) {
  if (models.length < 2) return html`<div class="field"><span class="label">${label}</span><span class="fixed">${value}</span></div>`;
  return html`<${Field} label=${label}><select value=${value} onChange=${(event) => change(event.target.value)}>
    ${models.map((model) => html`<option key=${model.name} value=${model.name} selected=${model.name === value}>${model.name}</option>`)}</select></${Field}>`;
}

/** A word that stands for a moment after something was done. */
export function Copied({ children, todo }) {
  const [done, set] = useState(false);
  useEffect(() => {
    if (!done) return undefined;
    const timer = setTimeout(() => set(false), 1600);
    return () => clearTimeout(timer);
  }, [done]);
  return html`<button type="button" class="quiet" onClick=${async () => {
    await todo();
    set(true);
  }}>${done ? "Copied" : children}</button>`;
}

export function Problem({ error }) {
  return html`<div role="alert">${error && html`<p class="problem">${error}</p>`}</div>`;
}
