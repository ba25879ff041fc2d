/** The parts of a model that can be switched off, by their names. In the address a part is `path:maths`, `gate:layer 2`. */
import { html } from "../ui.js";
import { Check } from "./fields.js";


/** All parts of a model in groups: `[{kind, title, of, parts: [{key, name}]}]`, `of` is the layer of experts. */
export function partsOf(model) {
  const named = (kind, names) => (names ?? []).map((name) => ({ key: `${kind}:${name}`, name }));
  const groups = [
    { kind: "path", title: "Paths", parts: named("path", model.paths?.filter((name) => !model.members?.includes(name))) },
    ...(model.modules ?? []).map(({ layer, label, names }) => ({
      kind: "module",
      title: `Experts of ${label ?? layer}`,
      of: label ?? layer,
      parts: names.map((name) => ({ key: `module:${layer}:${name}`, name })),
    })),
    { kind: "gate", title: "Gates", parts: named("gate", model.gates) },
    { kind: "member", title: "Members", parts: named("member", model.members) },
  ];
  return groups.filter((group) => group.parts.length);
}

/** Of parts that an address names, those that the model has. */
export function partsIn(model, off) {
  const known = new Set(partsOf(model).flatMap((group) => group.parts.map((part) => part.key)));
  return off.filter((key) => known.has(key));
}

/** The switches of a request, for the parts that are off. */
export function switchesOf(model, off) {
  const of = (kind) => off.filter((key) => key.startsWith(`${kind}:`)).map((key) => key.slice(kind.length + 1));
  const active = (names, gone) => (gone.length ? (names ?? []).filter((name) => !gone.includes(name)) : null);
  const made = {};
  const paths = active(model.paths, of("path"));
  const members = active(model.members, of("member"));
  if (paths) made.paths = paths;
  if (members) made.members = members;
  if (of("module").length) made.without = of("module");
  if (of("gate").length) made.gates_off = of("gate");
  return made;
}

/** Parts as a title says them: `maths`, `expert_2 of layer 3 feed`. */
export function namesOf(model, off) {
  const said = ({ kind, of }, { name }) => ({ module: `${name} of ${of}`, gate: `the gate of ${name}` })[kind] ?? name;
  return partsOf(model).flatMap((group) => group.parts.filter((part) => off.includes(part.key)).map((part) => said(group, part))).join(", ");
}

/** Checkboxes of all parts: what is ticked is active. The last active one of paths or members cannot be switched off. */
export function Switches({ model, off, change, label }) {
  const groups = partsOf(model);
  if (!groups.length) return html`<p class="soft">${model.name} has no paths, experts, gates or members to switch off.</p>`;
  const toggle = (key, active) => change(active ? off.filter((one) => one !== key) : [...off, key]);
  return html`<div class="switches" role="group" aria-label=${label}>${groups.map((group) => {
    const left = group.parts.filter((part) => !off.includes(part.key));
    return html`<fieldset key=${group.title}><legend>${group.title}</legend>${group.parts.map((part) => {
      const active = !off.includes(part.key);
      const last = active && left.length === 1 && group.kind !== "gate";
      return html`<${Check} key=${part.key} label=${part.name} checked=${active} kind=${active ? "" : "off"}
        change=${(now) => (last && !now ? change([...off]) : toggle(part.key, now))} />`;
    })}</fieldset>`;
  })}</div>`;
}

