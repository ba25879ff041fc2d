"""How a model reads rows of prefix trees: the one place that knows Braid's models from those of plain transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from braidlm.evals.scoring.forest import Row
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import Span, rotations_for

SHARING = ("gpt2", "llama")
"""Types of transformers' models that are known to take a mask of two dimensions for each text, and positions; a test
compares each with the same model read sequence by sequence. All others are read that way."""


@dataclass(frozen=True)
class Batch:
    """Rows side by side, on the device."""

    tokens: Tensor
    """[rows, time]."""
    depths: Tensor
    """[rows, time]."""
    ends: Tensor | None
    """[rows, time]; None where every row is one sequence of the same length."""
    sources: Tensor
    """[places] which of the rows x time places predict something."""

    def mask(self, window: int | None = None) -> Tensor:
        """[rows, 1, time, time]: a place sees itself and what stands before it in its sequences."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        assert self.ends is not None
        seen = (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < self.ends[:, None, :])
        if window is not None:
            seen &= self.depths[:, None, :] > self.depths[:, :, None] - window
        return seen[:, None]


class Reader(Protocol):
    """A model that reads rows."""

    shares: bool
    """Whether it can read several sequences in one row."""

    def read(self, batch: Batch) -> Tensor:
        """What the head needs, or the logits themselves, at the places that predict: [places, width]."""

    def logits(self, read: Tensor) -> Tensor:
        """[places, vocabulary] of some of those."""


class BraidReader:
    """A Braid model: the head is applied only where something is predicted."""

    shares = True

    def __init__(self, model: BraidForCausalLM):
        self.model = model

    def read(self, batch: Batch) -> Tensor:
        body = self.model.model
        hidden = body.embedding(batch.tokens)
        if batch.ends is None:
            span = body.span(hidden)
        else:
            masks: dict[int | None, Tensor | None] = {window: batch.mask(window) for window in body.windows}
            rotations = rotations_for(body.head_dims, body.positions, batch.depths, _compute_dtype(hidden))
            span = Span(batch.depths, masks, causal=False, rotations=rotations)
        return body.stream(hidden, span)[0].flatten(0, 1)[batch.sources]

    def logits(self, read: Tensor) -> Tensor:
        return self.model.head(read)


class TransformersReader:
    """Any causal language model of transformers; those not in `SHARING` read every sequence by itself."""

    def __init__(self, model: Any):
        self.model = model
        self.shares = model.config.model_type in SHARING

    def read(self, batch: Batch) -> Tensor:
        given: dict[str, Tensor] = {}
        if batch.ends is not None:
            # Added to the scores, which every attention of transformers does with a mask of this shape.
            hidden = torch.zeros(batch.mask().shape, device=batch.tokens.device, dtype=self.model.dtype)
            hidden.masked_fill_(~batch.mask(), torch.finfo(self.model.dtype).min)
            given = {"attention_mask": hidden, "position_ids": batch.depths}
        out = self.model(input_ids=batch.tokens, use_cache=False, return_dict=True, **given)
        return out.logits.flatten(0, 1)[batch.sources]

    def logits(self, read: Tensor) -> Tensor:
        return read


def reader_of(model: Any) -> Reader:
    """The way to read this model."""
    return BraidReader(model) if isinstance(model, BraidForCausalLM) else TransformersReader(model)


def batch_of(rows: Sequence[Row], device: torch.device) -> tuple[Batch, np.ndarray]:
    """Rows of one width, filled up to it, and for each of their scores which of `sources` predicts it.

    What fills up stands behind everything, sees only itself and is seen by nothing.
    """
    time = rows[0].width
    tokens = np.zeros((len(rows), time), dtype=np.int64)
    depths = np.zeros_like(tokens)
    ends = np.tile(np.arange(1, time + 1), (len(rows), 1))
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row.tokens
        depths[index, : len(row)] = row.depths
        ends[index, : len(row)] = row.ends
    flat = np.concatenate([row.sources + index * time for index, row in enumerate(rows)])
    sources, which = np.unique(flat, return_inverse=True)
    plain = rows[0].is_chain
    made = Batch(
        tokens=torch.from_numpy(tokens).to(device),
        depths=torch.from_numpy(depths).to(device),
        ends=None if plain else torch.from_numpy(ends).to(device),
        sources=torch.from_numpy(sources).to(device),
    )
    return made, which


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
