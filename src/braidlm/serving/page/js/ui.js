/** Components without a build step: Preact, its hooks, and templates in place of JSX. Texts in them are never HTML. */
import { h, render, Fragment } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { render, Fragment };
export const html = htm.bind(h);

/** Class names of those that hold: `classes("token", { chosen: true })`. */
export function classes(...names) {
  return names.flatMap((n) => (typeof n === "object" && n ? Object.keys(n).filter((k) => n[k]) : n || [])).join(" ");
}

/** A share as a reader says it: 42%, 0.3%, under 0.1%. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = 100 * share;
  if (value >= 99.95) return "100%";
  if (value >= 10) return `${value.toFixed(0)}%`;
  return value >= 0.1 || value === 0 ? `${value.toFixed(value === 0 ? 0 : 1)}%` : "< 0.1%";
}

/** A number with what digits a reader needs. */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(size >= 100 ? 4 : 3);
}

/** A large count in few characters: 132k, 1.2M. */
export function count(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)}B`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  return value >= 1e4 ? `${Math.round(value / 1e3)}k` : value.toLocaleString("en");
}
