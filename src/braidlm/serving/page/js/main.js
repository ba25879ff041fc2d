/** The frame of the page: where one is, which model it is about, and the theme. */
import { get, onMissingKey, setKey } from "./api.js";
import { addressOf, update, useAddress } from "./address.js";
import { Copied, ModelChoice, Problem } from "./parts/fields.js";
import { Mark } from "./parts/mark.js";
import { count, html, render, useEffect, useState } from "./ui.js";
import { Lineage } from "./views/lineage.js";
import { Routes } from "./views/routes.js";
import { Runs } from "./views/runs.js";
import { SwitchOff, TwoModels } from "./views/beside.js";
import { Write } from "./views/write.js";

/** The views: key, name, what one sees, component, and whether they are about a model. */
const VIEWS = [
  ["write", "Write", "The model goes on with a text, and any token can be changed.", Write, true],
  ["routes", "Who goes where", "Which part of the model serves each token, layer by layer.", Routes, true],
  ["switch", "Switch a part off", "One prompt, with all parts of the model and without some.", SwitchOff, true],
  ["two", "Two models", "One prompt, two models beside each other.", TwoModels, true],
  ["runs", "Runs and reports", "What lies in the served folders; runs go on being shown while they train.", Runs, false],
  ["lineage", "Lineage", "The data, recipes, edits and models that a model came from.", Lineage, true],
];

const AGAIN = 2000; // milliseconds

function Page() {
  const state = useAddress();
  const [models, setModels] = useState(null);
  const [error, setError] = useState(null);
  const [locked, setLocked] = useState(false);
  const load = () =>
    get("/braid/models").then(
      (told) => {
        setModels(told.models);
        setError(null);
        setLocked(false);
      },
      (raised) => setError(raised.message),
    );
  useEffect(() => {
    onMissingKey(() => setLocked(true));
    load();
  }, []);
  const model = models?.find((one) => one.name === state.model) ?? models?.[0];
  const asked = VIEWS.find(([key]) => key === state.view);
  const begin = models && (!model || model.problem) ? "runs" : "write";
  const [view, title, lead, View, ofModel] = (models && !model && asked?.[4] ? null : asked) ?? VIEWS.find(([key]) => key === begin);
  // A run before its first checkpoint will be a model.
  useEffect(() => {
    if (!models?.some((one) => one.problem)) return undefined;
    const timer = setTimeout(load, AGAIN);
    return () => clearTimeout(timer);
  }, [models]);
  useEffect(() => {
    if (models && !asked) update({ view }); // and there it stays
  }, [models]);
  useEffect(() => {
    document.title = `${title} · Braid`;
  }, [title]);
  const content = () => {
    if (!ofModel) return html`<${View} state=${state} models=${models} />`;
    if (model.problem && view !== "two") {
      return html`<${Problem} error=${model.problem} />${model.run && html`<p><a href=${addressOf({ view: "runs", run: model.run })}>Its run</a></p>`}`;
    }
    return html`<${View} key=${`${view} ${view === "two" ? "" : model.name}`} model=${model} models=${models} state=${state} />`;
  };
  return html`<a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <header class="head">
      <a class="home" href=${addressOf({ view: "write" })} aria-label="Braid, write"><${Mark} /></a>
      <nav aria-label="Views">${VIEWS.map(
        ([key, name]) => html`<a key=${key} href=${addressOf({ view: key })} aria-current=${key === view ? "page" : undefined}>${name}</a>`,
      )}</nav>
      <${Theme} />
    </header>
    <main id="content" tabindex="-1">
      <div class="title">
        <div><h1>${title}</h1><p class="lead">${lead}</p></div>
        ${model && ofModel && html`<div class="about">
          ${view !== "two" && html`<${ModelChoice} label="Model" models=${models} value=${model.name}
            change=${(name) => update({ model: name, off: [], layer: 0, written: "", node: "" }, true)} />`}
          ${view !== "two" && html`<p class="facts-line">${model.problem ? "" : factsOf(model)}</p>`}
        </div>`}
      </div>
      ${locked ? html`<${Locked} unlocked=${load} />` : html`<${Problem} error=${error} />`}
      ${models && !locked && content()}
      ${!models && !error && !locked && html`<p class="soft" role="status">Asking the server …</p>`}
    </main>
    <footer class="foot">
      <span>This page asks its own server, and nobody else.</span>
      <${Copied} todo=${() => navigator.clipboard.writeText(location.href)}>Copy the address of this view</${Copied}>
      <a href="/docs">The API</a>
    </footer>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("content").focus();
}

function factsOf(model) {
  const paths = model.paths.filter((name) => !model.members.includes(name));
  const parts = [
    model.parameters && `${count(model.parameters)} parameters`,
    paths.length && `paths ${paths.join(", ")}`,
    model.members.length && `members ${model.members.join(", ")}`,
    model.modules.length && `experts in ${model.modules.length} ${model.modules.length === 1 ? "place" : "places"}`,
    model.gates.length && `${model.gates.length} ${model.gates.length === 1 ? "gate" : "gates"}`,
    (model.limit ?? model.context) && `${count(model.limit ?? model.context)} tokens of context`,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Light, dark, or as the system has it. */
function Theme() {
  const [theme, set] = useState(document.documentElement.dataset.theme ?? "");
  const next = { "": "dark", dark: "light", light: "" };
  const names = { "": "as the system", dark: "dark", light: "light" };
  const signs = { "": "◐", dark: "●", light: "○" };
  const turn = () => {
    const chosen = next[theme];
    if (chosen) document.documentElement.dataset.theme = chosen;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem("theme", chosen);
    } catch {
      // it then holds until the page is left
    }
    set(chosen);
  };
  return html`<button type="button" class="theme" onClick=${turn} title=${`Theme: ${names[theme]}`} aria-label=${`Theme: ${names[theme]}. Change to ${names[next[theme]]}.`}>${signs[theme]}</button>`;
}

/** The server wants a key. */
function Locked({ unlocked }) {
  const [key, set] = useState("");
  const send = (event) => {
    event.preventDefault();
    setKey(key);
    unlocked();
  };
  return html`<form class="panel narrow" onSubmit=${send}>
    <label class="field wide"><span class="label">This server wants its API key</span>
      <input type="password" value=${key} autocomplete="off" onInput=${(event) => set(event.target.value)} />
      <small>Whoever started <code>braid serve</code> has it. The key stays in this tab.</small></label>
    <div class="buttons"><button type="submit" class="main" disabled=${!key}>Open</button></div>
  </form>`;
}

render(html`<${Page} />`, document.getElementById("page"));
