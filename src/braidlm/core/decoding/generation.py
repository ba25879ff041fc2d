"""Text from a model, Braid's or transformers': prompts in, pieces of text out as they are generated."""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, Sampling, TokenDecoder, decode_tokens
from braidlm.core.decoding.early_exits import SpeculativeDecoder, decode_speculatively
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import check_openable, parse_row, read_text
from braidlm.core.recipes import recipe_root
from braidlm.core.tokenizer import Tokenizer, pause_tokens
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode
from braidlm.model.language_model import LanguageModel
from braidlm.model.span import positions_from_mask

DEFAULT_PROMPTS = "papaformer"
"""The 20 prompts of PaPaformer's Table 6, half of them stories and half maths."""
EXAMPLE = '{"prompt": "Once upon a time", "domain": "stories"}'


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    domain: str | None = None
    """Its subject: the name of the path that should know it, or the path's number counted from 1."""
    name: str = ""
    """Its name in tables; by default its text."""

    @property
    def label(self) -> str:
        return self.name or self.text


def read_prompts(source: str | Path) -> list[Prompt]:
    """The prompts of a file (`.jsonl`: objects with `prompt`, `domain`, `name`; else a prompt a line), or a set's."""
    path = _find(source)
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    is_json = path.suffix in (".jsonl", ".ndjson")
    prompts = [_from_json(line, f"{path}, line {number}") if is_json else Prompt(line) for number, line in lines]
    if not prompts:
        raise BraidError("there is no prompt in this file", str(path), f"Write one a line; in JSONL: {EXAMPLE}")
    return prompts


def shipped() -> Iterator[str]:
    """The names of the sets that come with Braid."""
    return (path.stem for path in sorted((recipe_root() / "prompts").glob("*.jsonl")))


def _find(source: str | Path) -> Path:
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):
        return path
    if str(source) in shipped():
        return recipe_root() / "prompts" / f"{source}.jsonl"
    check_openable(path)
    near = [item.name for item in path.parent.iterdir()] if os.path.isdir(path.parent) else []
    hint = did_you_mean(path.name, [*near, *shipped()])
    todo = f"Give a file with a prompt a line, or the name of a set that comes with Braid: {', '.join(shipped())}."
    raise BraidError(f"there is no such file of prompts.{hint if 'Did you' in hint else ''}", str(source), todo)


def _from_json(line: str, where: str) -> Prompt:
    todo = f"A line is an object such as {EXAMPLE}."
    row = parse_row(line, where, todo)
    if "prompt" not in row:
        hint = did_you_mean("prompt", row)
        raise BraidError(f"there is no 'prompt'.{hint.replace('There are', 'It has')}", where, todo)
    for key in ("prompt", "domain", "name"):
        value = row.get(key)
        if key == "domain" and isinstance(value, int) and not isinstance(value, bool):
            row[key] = str(value)
        elif not isinstance(value, str | None):
            kind = "text or a path's number" if key == "domain" else "text"
            raise BraidError(f"'{key}' is to be {kind}, not {json.dumps(value)[:40]}", where)
    return Prompt(row["prompt"] or "", row.get("domain") or None, row.get("name") or "")


class TransformersDecoder(TokenDecoder):
    """Decodes texts of at most `length` tokens with a model of transformers, which keeps keys and values itself."""

    def __init__(self, model: "transformers.PreTrainedModel", length: int):
        limit = getattr(model.config, "max_position_embeddings", None)
        self.model: Any = model.eval()
        self.length = length if limit is None else min(length, limit)
        self.device = model.device
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.past: Any = None
        self.mask = torch.ones(1, 0, dtype=torch.long, device=self.device)

    @property
    def filled(self) -> int:
        return self.mask.shape[1]

    @torch.inference_mode()
    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        self.check_prompts(ids)
        self.past = None
        self.mask = torch.ones_like(ids) if mask is None else mask
        return self._forward(ids)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat((self.mask, torch.ones_like(tokens[:, None])), dim=1)
        return self._forward(tokens[:, None])

    def _forward(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {}
        if not bool(self.mask.all()):
            inputs["attention_mask"] = self.mask
            if self.takes_positions:
                inputs["position_ids"] = positions_from_mask(self.mask, ids.shape[1])
        output = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, return_dict=True, **inputs)
        self.past = output.past_key_values
        return output.logits[:, -1]  # type: ignore[no-any-return]


def decoder_for(model: "transformers.PreTrainedModel", batch: int, length: int) -> TokenDecoder:
    """The plain decoder of a model, Braid's or transformers', for `batch` texts of at most `length` tokens."""
    if isinstance(model, LanguageModel):
        return Decoder(model, batch, length)
    return TransformersDecoder(model, length)


INCOMPLETE = "\ufffd"
"""What decoding gives for bytes that are not, or not yet, a character."""


@dataclass
class Piece:
    """New text of one prompt's continuation; `text` is empty while a character is incomplete."""

    prompt: int
    """Which prompt."""
    text: str
    stopped: str | None = None
    """On the last piece: at the `end` of text, at `max_tokens`, or at the model's `limit`."""
    tokens: int = 0
    """How many tokens the continuation has so far."""


@dataclass
class NextToken:
    """A token that may come next."""

    id: int
    text: str
    probability: float


class TextStream:
    """Turns tokens into text one by one: each character exactly once, and only when it is complete.

    The tokens before the new ones are decoded with them, because the text of a token may depend on its predecessors.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.begin, self.shown = 0, len(self.ids)
        """Tokens from `begin` are decoded again, those from `shown` on are not shown yet."""

    def add(self, *tokens: int) -> str:
        """The text that these tokens complete."""
        self.ids.extend(tokens)
        return self.finish(complete=True)

    def finish(self, complete: bool = False) -> str:
        """The rest: bytes that never became a character, but none of them if it is to be `complete`."""
        before, text = (
            self.tokenizer.decode(self.ids[self.begin : end], skip_special_tokens=True)
            for end in (self.shown, len(self.ids))
        )
        if complete and text.endswith(INCOMPLETE):
            return ""
        self.begin, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a token that completes no character adds nothing."""
    stream = TextStream(tokenizer, [])
    if texts := [stream.add(token) for token in ids]:
        texts[-1] += stream.finish()
    return texts


def continue_text(
    model: "transformers.PreTrainedModel",
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int = 100,
    sampling: Sampling | None = None,
    pauses: int = 0,
    make_decoder: Callable[[Any, int, int], TokenDecoder] = decoder_for,
) -> Iterator[Piece]:
    """Continue all prompts together; yields pieces as their characters are complete, and a last one for each prompt.

    `pauses` as in `encode_prompts`. `make_decoder` gets the model, the number of prompts and the most tokens of a text.
    """
    decode(Length, max_tokens, "max_tokens")
    encoded = encode_prompts(tokenizer, prompts, pauses)
    sampling = without_pauses(sampling or Sampling(), tokenizer)
    decoder = make_decoder(model, len(encoded), max(map(len, encoded)) + max_tokens)
    streams = [TextStream(tokenizer, ids) for ids in encoded]
    counts = [0] * len(encoded)
    running = set(range(len(encoded)))
    eos = tokenizer.eos_id
    loop: Any = decode_speculatively if isinstance(decoder, SpeculativeDecoder) else decode_tokens
    for tokens, _ in loop(decoder, encoded, max_tokens, sampling, eos, tokenizer.pad_id or 0):
        for index, token in enumerate(tokens):
            if token is None:
                continue
            counts[index] += 1
            if token == eos:
                running.discard(index)
                yield Piece(index, streams[index].finish(), "end", counts[index])
            else:
                yield Piece(index, streams[index].add(token), None, counts[index])
    for index in sorted(running):
        stopped = "max_tokens" if counts[index] == max_tokens else "limit"
        yield Piece(index, streams[index].finish(), stopped, counts[index])


def next_tokens(
    model: "transformers.PreTrainedModel", tokenizer: Tokenizer, prompts: Sequence[str], count: int, pauses: int = 0
) -> list[list[NextToken]]:
    """The `count` most probable tokens after each prompt, with the model's own probabilities (temperature 1)."""
    return [next_after(model, tokenizer, ids, count) for ids in encode_prompts(tokenizer, prompts, pauses)]


def next_after(
    model: "transformers.PreTrainedModel", tokenizer: Tokenizer, ids: Sequence[int], count: int
) -> list[NextToken]:
    """The `count` most probable tokens after the tokens `ids`."""
    logits = decoder_for(model, 1, len(ids) + 1).prefill(torch.tensor([list(ids)], device=model.device))
    best = logits[0].float().softmax(-1).topk(min(count, logits.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [NextToken(token, tokenizer.decode([token]), p) for token, p in pairs]


def without_pauses(sampling: Sampling, tokenizer: Tokenizer) -> Sampling:
    """Sampling that never chooses a pause, which no model was trained to predict."""
    return sampling if tokenizer.pause_id is None else replace(sampling, never=(*sampling.never, tokenizer.pause_id))


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], pauses: int = 0) -> list[list[int]]:
    """Token ids, each followed by that many pause tokens; an empty prompt is the beginning of a text."""
    if not prompts:
        raise BraidError("there is no prompt", todo='Give one; "" lets the model begin by itself.')
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # invalid bytes of arguments
            raise BraidError(f"the prompt {prompt!a} is not valid UTF-8")
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    beginning = tokenizer.beginning
    encoded = [[*beginning, *tokenizer.encode(prompt)] or ([] if start is None else [start]) for prompt in prompts]
    if not all(encoded):
        raise BraidError("an empty prompt needs a tokenizer with a token that begins or ends a text")
    return [[*ids, *pause_tokens(tokenizer, pauses)] for ids in encoded]
