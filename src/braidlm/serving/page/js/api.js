/** What the page asks the server. Errors have the sentence that the server says, whatever went wrong. */

const KEY = "braid-key";
let whenKeyIsMissing = () => {};

/** Call this when the server wants a key. */
export function onMissingKey(listener) {
  whenKeyIsMissing = listener;
}

/** Remember the key until the tab closes. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export class ServerError extends Error {
  /** @param {string} message @param {number} status 0 where nothing answered */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  if (answer.status === 401) whenKeyIsMissing();
  throw new ServerError(told?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

export const get = async (path, signal) => (await ask(path, null, signal)).json();
export const post = async (path, body, signal) => (await ask(path, body, signal)).json();

/** The events of a streamed answer, one JSON value each. */
export async function* stream(path, body, signal) {
  const answer = await ask(path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest = (rest + value).replaceAll("\r\n", "\n");
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const told = JSON.parse(data);
      if (told.error) throw new ServerError(told.error.message ?? "The server broke off.", 500);
      yield told;
    }
  }
}
