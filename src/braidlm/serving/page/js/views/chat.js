/** Chat, where the model's tokenizer says how a conversation is written. */
import { stream } from "../api.js";
import { update } from "../address.js";
import { useWork } from "../asking.js";
import { Downloads } from "../parts/downloads.js";
import { Problem, TextBox } from "../parts/fields.js";
import { Settings, samplingOf } from "../parts/settings.js";
import { html, useEffect, useState } from "../ui.js";

const WHO = { user: "You", assistant: "The model", system: "To begin with" };

/** Messages of an address, which may be anybody's. */
function readMessages(text) {
  try {
    const found = JSON.parse(text || "[]");
    return found.filter((one) => one.role in WHO && typeof one.content === "string").map(({ role, content }) => ({ role, content }));
  } catch {
    return [];
  }
}

export function Chat({ model, state }) {
  const [messages, setMessages] = useState(() => readMessages(state.messages));
  const [{ busy, error }, start, stop] = useWork();
  const [draft, setDraft] = useState("");
  useEffect(() => {
    if (!busy) update({ messages: messages.length ? JSON.stringify(messages) : "" });
  }, [messages, busy]);
  const send = () => {
    if (!draft.trim() || busy) return;
    const asked = [...messages, { role: "user", content: draft }];
    setDraft("");
    answer(asked);
  };
  const answer = (asked) =>
    start(async (signal) => {
      let said = "";
      setMessages([...asked, { role: "assistant", content: "" }]);
      const body = { model: model.name, messages: asked, max_tokens: state.max_tokens, ...samplingOf(state) };
      for await (const event of stream("/v1/chat/completions", body, signal)) {
        said += event.choices?.[0]?.delta?.content ?? "";
        setMessages([...asked, { role: "assistant", content: said }]);
      }
    });
  return html`<div class="two-columns">
    <section class="sheet" aria-label="Conversation">
      <ol class="messages" aria-live="polite">${messages.map(
        ({ role, content }, index) => html`<li key=${index} class=${role}><span class="who">${WHO[role]}</span><p>${content || "…"}</p></li>`,
      )}</ol>
      <${Problem} error=${error} />
      <${TextBox} label="Your words" value=${draft} change=${setDraft} send=${send} rows=${2} />
      <div class="buttons">
        ${busy
          ? html`<button type="button" class="main" key="stop" onClick=${stop}>Stop</button>`
          : html`<button type="button" class="main" key="send" onClick=${send} disabled=${!draft.trim()}>Send</button>`}
        ${messages.length > 1 && html`<button type="button" disabled=${busy} onClick=${() => answer(messages.slice(0, messages.at(-1).role === "assistant" ? -1 : undefined))}>Answer again</button>`}
        ${messages.length > 0 && html`<button type="button" class="quiet" disabled=${busy} onClick=${() => setMessages([])}>Begin anew</button>`}
      </div>
      ${messages.length > 0 && !busy && html`<${Downloads} name=${`${model.name} chat`} data=${() => ({ model: model.name, messages, ...samplingOf(state) })} />`}
    </section>
    <aside><details class="panel" open=${innerWidth > 800}><summary>How tokens are chosen</summary><${Settings} state=${state} limit=${model.limit ?? model.context ?? 512} /></details></aside>
  </div>`;
}
