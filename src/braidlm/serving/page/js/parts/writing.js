/** Continuing a text: the ids of what stands there, and the tokens that come. */
import { post, stream } from "../api.js";

/** The tokens of a text. @returns {Promise<{id: number, text: string}[]>} */
export async function tokensOf(model, text, signal) {
  return (await post("/braid/tokens", { model, text }, signal)).tokens;
}

/**
 * Continue token ids, and show all new tokens whenever there are more.
 * @param {{model: string, ids: number[], max_tokens: number, sampling: object, switches: object}} what
 * @param {(tokens: {id: number, text: string, probability: number}[]) => void} show
 * @returns {Promise<string | null>} why it ended: "stop" or "length"
 */
export async function continueText({ model, ids, max_tokens, sampling, switches }, show, signal) {
  const body = { model, prompt: ids, max_tokens, ...sampling, logprobs: 0, return_token_ids: true, braid: switches };
  const [made, logprobs, offsets, letters] = [[], [], [], []];
  let ended = null;
  for await (const event of stream("/v1/completions", body, signal)) {
    for (const choice of event.choices ?? []) {
      ended = choice.finish_reason ?? ended;
      made.push(...(choice.token_ids ?? []));
      letters.push(...choice.text);
      offsets.push(...(choice.logprobs?.text_offset ?? []));
      logprobs.push(...(choice.logprobs?.token_logprobs ?? []));
      show(tokensBetween(made, letters, offsets, logprobs));
    }
  }
  return ended;
}

/** Tokens with the text between their offsets. Offsets count characters, and come once the character of a token is complete. */
function tokensBetween(ids, letters, offsets, logprobs) {
  const textOf = (index) => letters.slice(offsets[index] - offsets[0], offsets[index + 1] === undefined ? undefined : offsets[index + 1] - offsets[0]).join("");
  return ids.map((id, index) => (index < offsets.length ? { id, text: textOf(index), probability: Math.exp(logprobs[index]) } : { id, text: "", probability: NaN }));
}

export const joined = (tokens) => tokens.map((token) => token.text).join("");

/** A seed that two sides share, so that they differ by the models alone. */
export const newSeed = () => Math.floor(Math.random() * 2 ** 31);
