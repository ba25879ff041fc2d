/** Continuing a text: the ids of what stands there, and the tokens that come. */
import { post, stream } from "../api.js";

/** The tokens of a text. @returns {Promise<{id: number, text: string}[]>} */
export async function tokensOf(model, text, signal) {
  return (await post("/braid/tokens", { model, text }, signal)).tokens;
}

/**
 * Continue token ids, and give each new token as soon as it is there.
 * @param {{model: string, ids: number[], max_tokens: number, sampling: object, switches: object}} what
 * @param {(tokens: {id: number, text: string, probability: number}[]) => void} add
 * @returns {Promise<string | null>} why it ended: "stop" or "length"
 */
export async function continueText({ model, ids, max_tokens, sampling, switches }, add, signal) {
  const body = { model, prompt: ids, max_tokens, ...sampling, logprobs: 0, return_token_ids: true, braid: switches };
  let ended = null;
  for await (const event of stream("/v1/completions", body, signal)) {
    for (const choice of event.choices ?? []) {
      ended = choice.finish_reason ?? ended;
      const tokens = newTokens(choice);
      if (tokens.length) add(tokens);
    }
  }
  return ended;
}

/** The tokens of one event; each one's text is what stands between its offset and the next one's. */
function newTokens({ token_ids: ids = [], text = "", logprobs }) {
  const offsets = logprobs?.text_offset ?? [];
  const begin = offsets[0] ?? 0;
  return ids.map((id, index) => {
    const from = (offsets[index] ?? begin) - begin;
    const to = index + 1 < ids.length && index + 1 < offsets.length ? offsets[index + 1] - begin : text.length;
    return { id, text: text.slice(from, to), probability: Math.exp(logprobs?.token_logprobs?.[index] ?? NaN) };
  });
}

export const joined = (tokens) => tokens.map((token) => token.text).join("");

/** A seed that two sides share, so that they differ by the models alone. */
export const newSeed = () => Math.floor(Math.random() * 2 ** 31);
