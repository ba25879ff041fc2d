/** The state of the page is its address: what one sees can be shared. It stands after the #, which browsers send nowhere. */
import { useEffect, useState } from "./ui.js";

/** Every entry with what it is when the address does not say so; lists are repeated keys. */
const DEFAULTS = {
  view: "",
  model: "",
  other: "",
  prompt: "",
  written: "",
  form: "text",
  messages: "",
  temperature: 0.7,
  top_p: 1,
  top_k: 0,
  seed: "",
  both: false,
  measured: "left",
  max_tokens: 80,
  shade: false,
  layer: 0,
  rows: false,
  off: [],
  off_other: [],
  run: "",
  node: "",
};
const LONGEST = 30000;

let state = read();
const listeners = new Set();

function read() {
  const found = new URLSearchParams(location.hash.slice(1));
  const made = {};
  for (const [key, normal] of Object.entries(DEFAULTS)) {
    const values = found.getAll(key);
    if (Array.isArray(normal)) made[key] = values;
    else if (!values.length) made[key] = normal;
    else if (typeof normal === "number") made[key] = Number.isFinite(Number(values[0])) ? Number(values[0]) : normal;
    else made[key] = typeof normal === "boolean" ? values[0] === "1" : values[0];
  }
  return made;
}

/** The address of a state, or of the present one with changes. */
export function addressOf(changes = {}) {
  const written = new URLSearchParams();
  for (const [key, value] of Object.entries({ ...state, ...changes })) {
    if (Array.isArray(value)) value.forEach((one) => written.append(key, one));
    else if (value !== DEFAULTS[key]) written.set(key, value === true ? "1" : String(value));
  }
  return `#${written}`;
}

/** Change some entries; with `push` the browser's back button undoes it. */
export function update(changes, push = false) {
  state = { ...state, ...changes };
  const address = addressOf();
  if (address.length < LONGEST && address !== location.hash) {
    history[push ? "pushState" : "replaceState"](null, "", address);
  }
  listeners.forEach((listener) => listener(state));
}

addEventListener("hashchange", follow);
addEventListener("popstate", follow);

function follow() {
  if (addressOf() === location.hash) return;
  state = read();
  listeners.forEach((listener) => listener(state));
}

/** The state, and a rendering whenever it changes. */
export function useAddress() {
  const [seen, see] = useState(state);
  useEffect(() => {
    listeners.add(see);
    see(state);
    return () => listeners.delete(see);
  }, []);
  return seen;
}
