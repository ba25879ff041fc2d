"""What a model writes after prompts: many at once, each until it is finished, and the same whatever runs beside it.

Braid's models run through its decoder, others of transformers through their own cache. Where tokens are drawn, every
prompt has random numbers of its own, from the seed and its place in the list: a batch of another size, or another
device, draws the same (but for roundings of the last bit of float32).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.generation import TextStream
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.readers import SHARING
from braidlm.evals.scoring.scorer import Advance, full_products
from braidlm.evals.scoring.texts import begin_id
from braidlm.model.modeling_braid import BraidForCausalLM

TOKENS = {"cpu": 8_192, "cuda": 65_536}
"""Tokens of the texts that run together."""
ROWS = {"cpu": 32, "cuda": 256}
STEP = 128
"""Caches are made in multiples of this, so that few are made."""

Finished = Callable[[str], bool]
"""Whether a completion needs no more tokens, by its text so far."""


@dataclass(frozen=True)
class Completion:
    """What came after a prompt."""

    text: str
    stopped: str
    """`finished` as asked, at the `end` of text, or at the `limit` of tokens."""


@dataclass(frozen=True)
class Room:
    """How much a model can read and write at once."""

    prompt: int | None
    """The most tokens of a prompt; None for no limit."""
    new: int


def room(model: Contestant, max_tokens: int) -> Room:
    """Space for `max_tokens` new tokens, or for half the model's context if that is less."""
    context = model.scorer.context
    if context is None:
        return Room(None, max_tokens)
    new = max(1, min(max_tokens, context // 2))
    return Room(context - new, new)


def prompt_ids(tokenizer: BraidTokenizer, prompt: str) -> list[int]:
    """A prompt's tokens, begun as the tokenizer begins a text; an empty one is a beginning."""
    encoding = tokenizer.backend.encode(prompt)
    ids, stop = encoding.ids, len(encoding.ids)
    while stop and encoding.special_tokens_mask[stop - 1]:
        stop -= 1
    return ids[:stop] or [begin_id(tokenizer)]


def complete(
    model: Contestant,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    finished: Sequence[Finished],
    sampling: Sampling | None = None,
    advance: Advance | None = None,
    rows: int | None = None,
) -> list[Completion]:
    """A completion for each prompt of token ids, at most `rows` at once; greedy, unless `sampling` says otherwise."""
    sampling = sampling or Sampling(temperature=0)
    writer = _Writer(model, max_tokens)
    found: list[Completion | None] = [None] * len(prompts)
    done = 0
    with torch.inference_mode(), full_products():
        for places in _batches(model, [len(ids) for ids in prompts], max_tokens, rows):
            draws = _Draws(sampling, places, max_tokens, model.device)
            streams = [TextStream(model.tokenizer, prompts[place]) for place in places]
            texts = [""] * len(places)
            running = set(range(len(places)))
            for tokens in writer.tokens([list(prompts[place]) for place in places], draws):
                for row in sorted(running):
                    token = tokens[row]
                    if token is None or token == model.tokenizer.eos_id:
                        found[places[row]] = Completion(texts[row] + streams[row].finish(), "end")
                        running.discard(row)
                    elif piece := streams[row].add(token):
                        texts[row] += piece
                        if finished[places[row]](texts[row]):
                            found[places[row]] = Completion(texts[row], "finished")
                            running.discard(row)
                if not running:
                    break
            for row in running:
                found[places[row]] = Completion(texts[row] + streams[row].finish(), "limit")
            done += len(places)
            if advance is not None:
                advance(done * max_tokens, len(prompts) * max_tokens)
    return [completion for completion in found if completion is not None]


class _Draws(Sampling):
    """Sampling in which every row draws from random numbers of its own."""

    def __init__(self, sampling: Sampling, places: Sequence[int], steps: int, device: torch.device):
        super().__init__(sampling.temperature, sampling.top_k, sampling.top_p, None)
        seed = sampling.seed or 0
        self.step = 0
        self.numbers: Tensor | None = None
        if sampling.temperature > 0:
            drawn = np.stack([np.random.default_rng([seed, place]).random(steps) for place in places])
            self.numbers = torch.from_numpy(drawn).to(device)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[rows] token ids: the first at which the probabilities added up pass the row's number."""
        if self.numbers is None:
            return logits.argmax(-1)
        below = self.probabilities(logits).double().cumsum(-1)
        wanted = self.numbers[:, self.step : self.step + 1] * below[:, -1:]
        self.step += 1
        return torch.searchsorted(below, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _batches(model: Contestant, lengths: list[int], max_tokens: int, rows: int | None) -> Iterator[list[int]]:
    """Which prompts run together: of like length, and of equal length where a model cannot fill up."""
    kind = model.device.type
    alike = not isinstance(model.model, BraidForCausalLM) and model.model.config.model_type not in SHARING
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = _rounded(lengths[place] + max_tokens)
        most = rows or min(ROWS.get(kind, ROWS["cpu"]), TOKENS.get(kind, TOKENS["cpu"]) // length)
        if batch and (len(batch) >= max(1, most) or (alike and lengths[place] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


class _Writer:
    """A model that writes; a decoder is kept for the next batch of its size, since on CUDA its graph takes time."""

    def __init__(self, model: Contestant, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        self.decoder: Decoder | None = None
        self.size = (0, 0)

    def tokens(self, prompts: list[list[int]], draws: _Draws) -> Iterator[Sequence[int | None]]:
        """At each step every row's next token."""
        model, tokenizer = self.model.model, self.model.tokenizer
        if not isinstance(model, BraidForCausalLM):
            yield from _transformers_tokens(model, prompts, self.max_tokens, draws)
            return
        size = (len(prompts), _rounded(max(map(len, prompts)) + self.max_tokens))
        if self.decoder is None or size != self.size:
            self.decoder = None  # its memory is free before the next one takes its own
            self.decoder, self.size = Decoder(model, *size), size
        end, fill = tokenizer.eos_id, tokenizer.pad_id or 0
        for tokens, _ in decode_tokens(self.decoder, prompts, self.max_tokens, draws, end, fill):
            yield tokens


def _transformers_tokens(
    model: Any, prompts: list[list[int]], max_tokens: int, draws: _Draws
) -> Iterator[Sequence[int | None]]:
    """Plain decoding with the model's own cache, filled up on the left where lengths differ."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    padded = not bool(mask.all())
    past = None
    for step in range(max_tokens):
        given: dict[str, Any] = {"past_key_values": past, "use_cache": True, "return_dict": True}
        if padded:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given |= {"attention_mask": mask, "position_ids": positions}
        out = model(input_ids=ids, **given)
        chosen = draws.choose(out.logits[:, -1])
        yield chosen.tolist()
        if step + 1 < max_tokens:
            past, ids = out.past_key_values, chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
