/** A text token by token: coloured, read by pointer or arrow keys, each token with what is known of it beside it. */
import { classes, html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";

/**
 * @param {object} props
 * @param {{text: string}[]} props.tokens
 * @param {(index: number) => {name?: string, strength?: number, faint?: boolean}} [props.look] classes and strength (0 to 1) of its colour
 * @param {(index: number) => any} [props.tip] what stands beside the token that is pointed at
 * @param {(index: number) => string} [props.say] what a screen reader says after the text
 * @param {(index: number) => void} [props.pick] what a click or Enter does
 * @param {number | null} [props.picked]
 * @param {string} props.label
 * @param {string} [props.before] text before the tokens, which cannot be picked
 * @param {boolean} [props.writing] whether more is to come
 */
export function Tokens({ tokens, look, tip, say, pick, picked = null, label, before = "", writing = false }) {
  const box = useRef(null);
  const [focus, setFocus] = useState(0);
  const [shown, show] = useState(null);
  const at = Math.min(focus, tokens.length - 1);
  useEffect(() => {
    if (shown !== null && shown >= tokens.length) show(null);
  }, [tokens.length]);
  const move = (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (event.key === "Escape") show(null);
    if (pick && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      pick(at);
    }
    if (to === undefined || to < 0 || to >= tokens.length) return;
    event.preventDefault();
    setFocus(to);
    box.current.querySelector(`[data-at="${to}"]`).focus();
  };
  const point = (event) => {
    const found = event.target.closest?.("[data-at]");
    show(found ? Number(found.dataset.at) : null);
  };
  const described = tip && shown !== null && tokens[shown];
  return html`<div class=${classes("tokens", { pickable: pick })} ref=${box}>
    <div class="text" role="group" aria-label=${label} onKeyDown=${move} onPointerOver=${point} onPointerLeave=${() => show(null)}
      onFocusIn=${point} onFocusOut=${() => show(null)}>
      ${before && html`<span class="before">${before}</span>`}${tokens.map((token, index) => {
        const { name = "", strength = 1, faint = false } = look?.(index) ?? {};
        const [, gap, rest] = /^( *)([^]*)$/.exec(visible(token.text));
        return html`${rest && gap}<span key=${index} data-at=${index} role=${pick ? "button" : "note"} tabindex=${index === at ? 0 : -1}
          aria-label=${`${spoken(token.text)}${say ? `, ${say(index)}` : ""}`} aria-pressed=${pick ? String(index === picked) : undefined}
          class=${classes("token", name, { coloured: name, faint, picked: index === picked })} style=${{ "--strength": `${Math.round(100 * strength)}%` }}
          onClick=${() => {
            setFocus(index);
            if (!pick) return;
            show(null);
            pick(index);
          }}>${rest || gap}</span>`;
      })}${writing && html`<span class="caret" aria-hidden="true"></span>`}
    </div>
    ${described && html`<${Beside} box=${box} at=${shown}>${tip(shown)}</${Beside}>`}
  </div>`;
}

/** What stands below a token, moved so that it stays inside the text's width. */
function Beside({ box, at, children }) {
  const own = useRef(null);
  useLayoutEffect(() => {
    const token = box.current.querySelector(`[data-at="${at}"]`)?.getClientRects();
    if (!token?.length || !own.current) return;
    const outer = box.current.getBoundingClientRect();
    const last = token[token.length - 1];
    const left = Math.max(0, Math.min(last.left - outer.left, outer.width - own.current.offsetWidth));
    own.current.style.left = `${left}px`;
    own.current.style.top = `${last.bottom - outer.top + 6}px`;
  });
  return html`<div class="at-token" role="tooltip" ref=${own}>${children}</div>`;
}

/** Line breaks are seen, and a token that completes no character, or a character that has no form, has a mark. */
function visible(text) {
  return text === "" ? "◦" : text.replaceAll("\n", "↵\n").replace(/[\0-\x08\x0b-\x1f\x7f-\x9f]/g, "◦");
}

function spoken(text) {
  if (text.trim() === "") return text.includes("\n") ? "line break" : text === "" ? "part of a character" : "space";
  return text.trim();
}
