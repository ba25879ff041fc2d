"""Completions of prompts: generated in batches, each until its stop condition, and independent of the batch.

Where tokens are sampled, every prompt has its own random numbers, seeded by the seed and the prompt's index: another
batch size or another device samples the same tokens (but for rounding in the last bit of float32).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Sampling, TokenDecoder, decode_tokens
from braidlm.core.decoding.generation import TextStream, decoder_for, without_pauses
from braidlm.core.tokenizer import pause_tokens
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.forward import TREE_MODEL_TYPES, full_float32
from braidlm.evals.scoring.requests import begin_id, strip_final_specials
from braidlm.evals.scoring.scorer import ProgressCallback
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
    text: str
    stopped: str
    """Why: `finished` by the stop condition, at the `end` of text, or at the `limit` of tokens."""


class TokenBudget(NamedTuple):
    """How many tokens of a model's context are for the prompt (None for no limit) and for new tokens."""

    prompt: int | None
    new: int

    def fit(self, ids: list[int]) -> list[int]:
        """The end of a prompt, as much as there is room for."""
        return ids if self.prompt is None else ids[-self.prompt :]


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
    eos, pad = model.tokenizer.eos_id, model.tokenizer.pad_id or 0
    decoder: TokenDecoder | None = None
    size, done = (0, 0), 0
    completions: list[Completion | None] = [None] * len(prompts)
    with torch.inference_mode(), full_float32():
        for batch in _batches(model, [len(ids) for ids in prompts], max_tokens, max_rows):
            ids = [list(prompts[index]) for index in batch]
            needed = (len(batch), _rounded(max(map(len, ids)) + max_tokens))
            if decoder is None or needed != size:  # one of the same size is kept, as its CUDA graph takes time
                decoder = None  # frees its memory before the next one is allocated
                decoder, size = decoder_for(model.model, *needed), needed
            row_sampling = _RowSampling(sampling, batch, max_tokens, model.device)
            streams = [TextStream(model.tokenizer, prompt) for prompt in ids]
            texts = [""] * len(batch)
            running = set(range(len(batch)))
            for tokens, _ in decode_tokens(decoder, ids, max_tokens, row_sampling, eos, pad):
                for row in sorted(running):
                    token = tokens[row]
                    if token is None or token == eos:
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
        self.step = 0
        self.uniform: Tensor | None = None
        """[rows, steps]."""
        if sampling.temperature > 0:
            rngs = (np.random.default_rng([sampling.seed or 0, index]) for index in indices)
            self.uniform = torch.from_numpy(np.stack([rng.random(steps) for rng in rngs])).to(device)

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
