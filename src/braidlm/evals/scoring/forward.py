"""Forward passes over rows of prefix trees; only this file distinguishes Braid's models from plain transformers'."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidlm.evals.scoring.prefix_trees import TreeRow
from braidlm.kernels.lower import lower_forward
from braidlm.model.heads.losses import log_probabilities_of
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import TextPass

TREE_MODEL_TYPES = ("gpt2", "llama")
"""Types of transformers' models that are known to accept a mask of two dimensions for each text, and positions; a test
compares each with the same model run sequence by sequence. All others are run that way."""


@dataclass(frozen=True)
class Batch:
    """Rows of one width, on the device."""

    tokens: Tensor
    positions: Tensor
    """[rows, time], as tokens are."""
    subtree_ends: Tensor | None
    """[rows, time]; None where every row is one sequence of the same length."""
    predictors: Tensor
    """[predictors] which of the rows x time nodes predict a token."""

    def mask(self, window: int | None = None) -> Tensor:
        """[rows, 1, time, time]: a node attends to itself and to its ancestors."""
        node = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        assert self.subtree_ends is not None
        seen = (node[None, None, :] <= node[None, :, None]) & (node[None, :, None] < self.subtree_ends[:, None, :])
        if window is not None:
            seen &= self.positions[:, None, :] > self.positions[:, :, None] - window
        return seen[:, None]


class BraidForward:
    """A Braid model: the head is applied only where a token is predicted."""

    supports_trees = True
    """Whether several sequences can run in one row."""

    def __init__(self, model: BraidForCausalLM, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.max_length: int | None = model.model.positions.limit
        """The most tokens that its positions allow; None where they allow any number."""
        self.scores = model.head.scores
        """(logits, rows, tokens): the log-probabilities from the predictors' logits."""

    def run(self, batch: Batch) -> TextPass:
        """The pass at the predictors: the head's inputs, or as `hidden` the logits themselves."""
        # Asked for each pass, since paths and modules may be switched off between two of them.
        lowered = lower_forward(self.model, self.dtype) if batch.subtree_ends is None else None
        if lowered is not None:
            done = lowered.run(batch.tokens)
        elif batch.subtree_ends is None:
            done = self.model.run(batch.tokens)
        else:
            masks = {window: batch.mask(window) for window in self.model.model.windows}
            done = self.model.run(batch.tokens, position_ids=batch.positions, masks=masks)
        time = batch.tokens.shape[1]
        return done.at((batch.predictors // time, batch.predictors % time))

    def logits(self, done: TextPass) -> Tensor:
        """The logits [predictors, vocabulary] of some of the predictors."""
        return self.model.head(done.hidden, **done.read)

    def log_probabilities(self, done: TextPass, rows: Tensor, tokens: Tensor) -> Tensor:
        """[token] of each of `tokens`, predicted by the predictor that `rows` says."""
        return self.model.head.log_probabilities(done.hidden, rows, tokens, **done.read)


class TransformersForward:
    """Any causal language model of transformers; types not in `TREE_MODEL_TYPES` run every sequence by itself."""

    def __init__(self, model: Any):
        self.model = model
        self.supports_trees = model.config.model_type in TREE_MODEL_TYPES
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)

    def run(self, batch: Batch) -> TextPass:
        inputs: dict[str, Tensor] = {}
        if batch.subtree_ends is not None:
            # An additive mask of this shape is accepted by every attention implementation of transformers.
            mask = batch.mask()
            bias = torch.zeros(mask.shape, device=batch.tokens.device, dtype=self.model.dtype)
            bias.masked_fill_(~mask, torch.finfo(self.model.dtype).min)
            inputs = {"attention_mask": bias, "position_ids": batch.positions}
        out = self.model(input_ids=batch.tokens, use_cache=False, return_dict=True, **inputs)
        return TextPass(out.logits.flatten(0, 1)[batch.predictors], ())

    def logits(self, done: TextPass) -> Tensor:
        return done.hidden

    def log_probabilities(self, done: TextPass, rows: Tensor, tokens: Tensor) -> Tensor:
        return log_probabilities_of(done.hidden, rows, tokens)

    scores = staticmethod(log_probabilities_of)


TreeForward = BraidForward | TransformersForward


def batch_of(rows: Sequence[TreeRow], device: torch.device) -> tuple[Batch, np.ndarray]:
    """Rows of one width, padded to it, and for each of their scores the index of its predictor.

    Padding stands behind all nodes, attends only to itself and is attended to by nothing.
    """
    time = rows[0].width
    tokens = np.zeros((len(rows), time), dtype=np.int64)
    positions = np.zeros_like(tokens)
    subtree_ends = np.tile(np.arange(1, time + 1), (len(rows), 1))
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row.tokens
        positions[index, : len(row)] = row.positions
        subtree_ends[index, : len(row)] = row.subtree_ends
    flat = np.concatenate([row.predictors + index * time for index, row in enumerate(rows)])
    predictors, of_scores = np.unique(flat, return_inverse=True)
    batch = Batch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        subtree_ends=None if rows[0].is_chain else torch.from_numpy(subtree_ends).to(device),
        predictors=torch.from_numpy(predictors).to(device),
    )
    return batch, of_scores


def values_at(
    forward: TreeForward, done: TextPass, predictors: Tensor, targets: Tensor, margins: bool, size: int
) -> Tensor:
    """[1 or 2, scores] log-probabilities and, on request, margins: how far each logit is above the best other token's.

    `predictors` are indices into `done`, in any order; the logits of `size` of them are in memory at once.
    """
    hidden = done.hidden
    order = torch.argsort(predictors, stable=True)
    predictors, targets = predictors[order], targets[order]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    values = torch.empty(2 if margins else 1, len(predictors), dtype=dtype, device=hidden.device)
    begin = 0
    for start in range(0, len(hidden), size):
        stop = len(predictors) if start + size >= len(hidden) else int(torch.searchsorted(predictors, start + size))
        part = done.at(slice(start, start + size))
        rows, tokens = predictors[begin:stop] - start, targets[begin:stop]
        if margins:
            logits = forward.logits(part)
            values[0, begin:stop] = forward.scores(logits, rows, tokens)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            best = logits.topk(2, -1)
            other = torch.where(best.indices[rows, 0] == tokens, best.values[rows, 1], best.values[rows, 0])
            values[1, begin:stop] = logits[rows, tokens] - other
        else:
            values[0, begin:stop] = forward.log_probabilities(part, rows, tokens)
        begin = stop
    return torch.empty_like(values).index_copy_(1, order, values)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Turn TF32 off: with its ten bits of mantissa near ties would be decided by chance."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
