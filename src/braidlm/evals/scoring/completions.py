"""Completions of prompts: generated in batches, each until its stop condition, and independent of the batch.

Braid's models run through Braid's decoder, other models of transformers with their own cache. Where tokens are sampled,
every prompt has its own random numbers, seeded by the seed and the prompt's index: another batch size or another device
samples the same tokens (but for rounding in the last bit of float32).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.generation import TextStream, without_pauses
from braidlm.core.decoding.prompts import pause_tokens
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.forward import TREE_MODEL_TYPES
from braidlm.evals.scoring.requests import begin_id, strip_final_specials
from braidlm.evals.scoring.scorer import ProgressCallback, full_float32
from braidlm.model.modeling_braid import BraidForCausalLM

MAX_TOKENS = {"cpu": 8_192, "cuda": 65_536}
"""Tokens of a batch."""
MAX_ROWS = {"cpu": 32, "cuda": 256}
CACHE_MULTIPLE = 128
"""Caches have lengths that are multiples of this, so that few are allocated."""

StopCondition = Callable[[str], bool]
"""Whether a completion needs no more tokens, by its text so far."""


@dataclass(frozen=True)
class Completion:
    """The text generated after a prompt."""

    text: str
    stopped: str
    """Why: `finished` by the stop condition, at the `end` of text, or at the `limit` of tokens."""


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens of a model's context are for the prompt and for new tokens."""

    prompt: int | None
    """None for no limit."""
    new: int


def token_budget(model: EvaluatedModel, max_tokens: int) -> TokenBudget:
    """Space for `max_tokens` new tokens, or for half the model's context if that is less."""
    context = model.scorer.context
    if context is None:
        return TokenBudget(None, max_tokens)
    new = max(1, min(max_tokens, context // 2))
    return TokenBudget(context - new, new)


def prompt_ids(tokenizer: BraidTokenizer, prompt: str, pauses: int = 0, after_end: bool = False) -> list[int]:
    """A prompt's tokens, begun as the tokenizer begins a text (an empty one is BOS or EOS), and pauses.

    With `after_end` an EOS precedes them, as it does documents in training, unless the tokenizer adds a token itself.
    """
    ids = strip_final_specials(tokenizer.backend.encode(prompt)) or [begin_id(tokenizer)]
    adds_nothing = tokenizer.backend.num_special_tokens_to_add(False) == 0
    end = [tokenizer.eos_id] if after_end and adds_nothing and tokenizer.eos_id is not None else []
    return [*end, *ids, *pause_tokens(tokenizer, pauses)]


def complete(
    model: EvaluatedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    is_finished: Sequence[StopCondition],
    sampling: Sampling | None = None,
    advance: ProgressCallback | None = None,
    max_rows: int | None = None,
) -> list[Completion]:
    """A completion for each prompt of token ids, at most `max_rows` at once; greedy, unless `sampling` is given."""
    sampling = without_pauses(sampling or Sampling(temperature=0), model.tokenizer)
    generator = _Generator(model, max_tokens)
    completions: list[Completion | None] = [None] * len(prompts)
    done = 0
    with torch.inference_mode(), full_float32():
        for batch in _batches(model, [len(ids) for ids in prompts], max_tokens, max_rows):
            row_sampling = _RowSampling(sampling, batch, max_tokens, model.device)
            streams = [TextStream(model.tokenizer, prompts[index]) for index in batch]
            texts = [""] * len(batch)
            running = set(range(len(batch)))
            for tokens in generator.tokens([list(prompts[index]) for index in batch], row_sampling):
                for row in sorted(running):
                    token = tokens[row]
                    if token is None or token == model.tokenizer.eos_id:
                        completions[batch[row]] = Completion(texts[row] + streams[row].finish(), "end")
                        running.discard(row)
                    elif piece := streams[row].add(token):
                        texts[row] += piece
                        if is_finished[batch[row]](texts[row]):
                            completions[batch[row]] = Completion(texts[row], "finished")
                            running.discard(row)
                if not running:
                    break
            for row in running:
                completions[batch[row]] = Completion(texts[row] + streams[row].finish(), "limit")
            done += len(batch)
            if advance is not None:
                advance(done * max_tokens, len(prompts) * max_tokens)
    return [completion for completion in completions if completion is not None]


class _RowSampling(Sampling):
    """Sampling with separate random numbers for each row."""

    def __init__(self, sampling: Sampling, indices: Sequence[int], steps: int, device: torch.device):
        super().__init__(sampling.temperature, sampling.top_k, sampling.top_p, None, sampling.never)
        seed = sampling.seed or 0
        self.step = 0
        self.uniform: Tensor | None = None
        """[rows, steps]."""
        if sampling.temperature > 0:
            uniform = np.stack([np.random.default_rng([seed, index]).random(steps) for index in indices])
            self.uniform = torch.from_numpy(uniform).to(device)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[rows] token ids by inverse transform sampling."""
        if self.uniform is None:
            return self.allowed(logits).argmax(-1)
        cumulative = self.probabilities(logits).double().cumsum(-1)
        threshold = self.uniform[:, self.step : self.step + 1] * cumulative[:, -1:]
        self.step += 1
        return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _batches(model: EvaluatedModel, lengths: list[int], max_tokens: int, max_rows: int | None) -> Iterator[list[int]]:
    """The indices of prompts that run together: of similar length, or equal where a model supports no padding."""
    kind = model.device.type
    unpadded = not isinstance(model.model, BraidForCausalLM) and model.model.config.model_type not in TREE_MODEL_TYPES
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = _rounded(lengths[index] + max_tokens)
        rows = max_rows or min(MAX_ROWS.get(kind, MAX_ROWS["cpu"]), MAX_TOKENS.get(kind, MAX_TOKENS["cpu"]) // length)
        if batch and (len(batch) >= max(1, rows) or (unpadded and lengths[index] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _rounded(length: int) -> int:
    return -(-length // CACHE_MULTIPLE) * CACHE_MULTIPLE


class _Generator:
    """Generates with one model; the decoder is kept for the next batch of its size, as its CUDA graph takes time."""

    def __init__(self, model: EvaluatedModel, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        self.decoder: Decoder | None = None
        self.size = (0, 0)

    def tokens(self, prompts: list[list[int]], sampling: _RowSampling) -> Iterator[Sequence[int | None]]:
        """At each step every row's next token."""
        model, tokenizer = self.model.model, self.model.tokenizer
        if not isinstance(model, BraidForCausalLM):
            yield from _transformers_tokens(model, prompts, self.max_tokens, sampling)
            return
        size = (len(prompts), _rounded(max(map(len, prompts)) + self.max_tokens))
        if self.decoder is None or size != self.size:
            self.decoder = None  # frees its memory before the next one is allocated
            self.decoder, self.size = Decoder(model, *size), size
        eos, pad = tokenizer.eos_id, tokenizer.pad_id or 0
        for tokens, _ in decode_tokens(self.decoder, prompts, self.max_tokens, sampling, eos, pad):
            yield tokens


def _transformers_tokens(
    model: Any, prompts: list[list[int]], max_tokens: int, sampling: _RowSampling
) -> Iterator[Sequence[int | None]]:
    """Plain decoding with the model's own cache, padded on the left where lengths differ."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    padded = not bool(mask.all())
    past = None
    for step in range(max_tokens):
        inputs: dict[str, Any] = {"past_key_values": past, "use_cache": True, "return_dict": True}
        if padded:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            inputs |= {"attention_mask": mask, "position_ids": positions}
        out = model(input_ids=ids, **inputs)
        chosen = sampling.choose(out.logits[:, -1])
        yield chosen.tolist()
        if step + 1 < max_tokens:
            past, ids = out.past_key_values, chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
