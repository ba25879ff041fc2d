"""One scorer for every task: the log-probability of tokens given those before them, for any causal language model.

A score does not depend on what runs beside it: rows depend on the requests alone (`prefix_trees.py`), padding is never
attended to, matrix products are computed in full float32 (no TF32), and sums are computed in float64 in the order of
the tokens. What remains is the rounding of float32 products, whose order of additions depends on their size: about 1e-6
for each token. Equal sequences are computed once and have one score. Where a decision depends on less than this
rounding error, as few do (some pairs in ten thousand), it is made in float64, so that every machine decides alike.

Every task's file imports this one, and `braid list tasks` imports those: torch is imported with the first model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, windows_of

if TYPE_CHECKING:
    import torch

    from braidlm.data.tokenizing.tokenizer import BraidTokenizer
    from braidlm.evals.scoring.forward import TreeForward


T = TypeVar("T")
ProgressCallback = Callable[[int, int], None]
"""Called with the tokens that are done and all tokens."""
TOKENS_PER_PASS = {"cpu": 2048, "cuda": 65_536}
"""Enough to fill the device, few enough for its caches."""
LOGITS_PER_PASS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits that are in memory at once."""


@dataclass(frozen=True)
class Scores:
    """Natural log-probabilities of the requested tokens."""

    tokens: np.ndarray
    """The log-probability of every scored token, request by request; float64."""
    bounds: np.ndarray
    """[requests + 1] where each request's begin."""
    margins: np.ndarray | None = None
    """By how many nats each token is more probable than the best other token there, if requested."""

    def of(self, index: int) -> np.ndarray:
        """The log-probabilities of one request, token by token."""
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]

    @property
    def sums(self) -> np.ndarray:
        """[requests] the log-probability of each whole continuation."""
        # Each is summed by itself, so that equal continuations have equal sums whatever precedes them.
        return _by_request(np.add, self.tokens, self.bounds, 0.0)


def _by_request(reduce: np.ufunc, values: np.ndarray, bounds: np.ndarray, nothing: float) -> np.ndarray:
    """[requests] the values of each request, reduced; `nothing` for a request without any."""
    reduced = np.full(len(bounds) - 1, nothing)
    scored = np.diff(bounds) > 0
    if scored.any():
        reduced[scored] = reduce.reduceat(values, bounds[:-1][scored])
    return reduced


def cached_per_tokenizer(prepare: Callable[..., T]) -> Callable[..., T]:
    """Cache a method `prepare(self, scorer, tokenizer, *options)`: the checkpoints of a run share a tokenizer."""
    name = f"_cached{prepare.__name__}"

    @functools.wraps(prepare)
    def cached(self: Any, scorer: Scorer, tokenizer: BraidTokenizer, *options: Any) -> T:
        key = (tokenizer.fingerprint, scorer.context, scorer.share)
        old_key, old_values = getattr(self, name, (key, {}))
        values: dict[tuple, T] = old_values if key == old_key else {}
        if options not in values:
            values[options] = prepare(self, scorer, tokenizer, *options)
        setattr(self, name, (key, values))
        return values[options]

    return cached


class Scorer:
    """Scores with one model in memory; the model is put into evaluation mode and not changed otherwise.

    `tokens_per_pass` limits one forward pass, `share` says whether common prefixes are computed once, `dtype` is the
    type of matrix products (float32 by default; weights stay as they are). None of them changes what is scored.
    """

    def __init__(
        self, model: Any, tokens_per_pass: int | None = None, share: bool = True, dtype: torch.dtype | None = None
    ):
        import torch

        from braidlm.evals.scoring.forward import BraidForward, TransformersForward
        from braidlm.model.modeling_braid import BraidForCausalLM

        self.model = model.eval()
        self.dtype = torch.float32 if dtype is None else dtype
        self.resolves_near_ties = self.dtype == torch.float32
        """Whether near ties are decided in float64: only for float32, whose rounding error they are about."""
        is_braid = isinstance(model, BraidForCausalLM)
        self.forward: TreeForward = BraidForward(model, self.dtype) if is_braid else TransformersForward(model)
        self.share = share and self.forward.supports_trees
        self.device: torch.device = next(model.parameters()).device
        kind = self.device.type
        self.tokens_per_pass = tokens_per_pass or TOKENS_PER_PASS.get(kind, TOKENS_PER_PASS["cpu"])
        self.logits_per_pass = LOGITS_PER_PASS.get(kind, LOGITS_PER_PASS["cpu"])

    @property
    def context(self) -> int | None:
        """The largest number of tokens that can be read at once, if the model has one."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def score(
        self, requests: Sequence[Request], advance: ProgressCallback | None = None, margins: bool = False
    ) -> Scores:
        """Every request's tokens from `first` on; requests that are too long are scored as `windows_of` says."""
        return self.score_trees(self.build_trees(requests), advance, margins)

    def build_trees(self, requests: Sequence[Request]) -> PrefixTrees:
        """The rows of these requests: worth keeping where several models share a tokenizer."""
        context = self.context
        if context is None or all(len(request.ids) <= context + 1 for request in requests):
            return PrefixTrees(requests, self.share)
        windows = [windows_of(request, context) for request in requests]
        return PrefixTrees(list(chain.from_iterable(windows)), self.share, parts=list(map(len, windows)))

    def score_trees(self, trees: PrefixTrees, advance: ProgressCallback | None = None, margins: bool = False) -> Scores:
        import torch

        from braidlm.evals.scoring.forward import batch_of, full_float32, values_at

        scores = np.zeros((2 if margins else 1, trees.bounds[-1]))
        done, size = 0, max(1, self.logits_per_pass // self.model.config.vocab_size)
        is_narrow = self.dtype not in (torch.float32, torch.float64)
        autocast = torch.autocast(self.device.type, self.dtype) if is_narrow else contextlib.nullcontext()
        with torch.inference_mode(), full_float32(), autocast:
            for rows in trees.passes(self.tokens_per_pass):
                batch, of_scores = batch_of(rows, self.device)
                targets = torch.from_numpy(np.concatenate([row.targets for row in rows])).to(self.device)
                predictors = torch.from_numpy(of_scores).to(self.device)
                values = values_at(self.forward, self.forward.run(batch), predictors, targets, margins, size)
                scores[:, np.concatenate([row.score_indices for row in rows])] = values.double().cpu().numpy()
                done += sum(map(len, rows))
                if advance is not None:
                    advance(done, trees.nodes)
        if not np.isfinite(scores).all():
            what = f"{np.count_nonzero(~np.isfinite(scores)):,} of {scores.size:,} scores are not numbers"
            raise BraidError(what, "evaluation", "The model's weights hold NaN or infinity: use an earlier checkpoint.")
        return Scores(scores[0], trees.bounds, scores[1] if margins else None)

    def score_float64(self, requests: Sequence[Request], margins: bool = False) -> Scores:
        """Scores in float64 and one by one: slow, and with a rounding error too small to change a decision."""
        import torch

        with torch.inference_mode(False):
            scorer = Scorer(copy.deepcopy(self.model).double(), 1, share=False, dtype=torch.float64)
        return scorer.score(requests, margins=margins)


NEAR_TIE = 1e-3
"""Nats: some hundred times the rounding error of a sentence's sum in float32."""


def resolve_near_ties(
    scorer: Scorer,
    requests: Sequence[Request],
    sums: np.ndarray,
    groups: Sequence[Sequence[int]],
    lengths: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The sums, recomputed in float64 for every group (of indices of requests) whose two best differ by a near tie.

    With `lengths` also those whose two best sums divided by length do, as far as the rounding error of a sum goes.
    Scores of a narrower type than float32 stay as they are.
    """
    near: list[int] = []
    sizes = np.array([len(group) for group in groups])
    for size in np.unique(sizes[sizes > 1]):
        of_size = np.flatnonzero(sizes == size)
        members = np.array([groups[index] for index in of_size.tolist()])
        is_near = _near(sums[members], NEAR_TIE)
        for length in lengths:
            is_near |= _near(sums[members] / length[members], NEAR_TIE / length[members].min(-1))
        near += of_size[is_near].tolist()
    return rescored(scorer, requests, sums, groups, sorted(near))


def rescored(
    scorer: Scorer, requests: Sequence[Request], sums: np.ndarray, groups: Sequence[Sequence[int]], near: Sequence[int]
) -> np.ndarray:
    """The sums, recomputed in float64 for the groups with these indices; only where scores are of float32."""
    indices = [index for group in near for index in groups[group]]
    if not indices or not scorer.resolves_near_ties:
        return sums
    sums = sums.copy()
    sums[indices] = scorer.score_float64([requests[index] for index in indices]).sums
    return sums


def is_greedy(scorer: Scorer, requests: Sequence[Request], scores: Scores) -> np.ndarray:
    """[requests] whether every scored token is the most probable one, so that greedy decoding would have generated it;
    decided in float64 where a margin is less than `NEAR_TIE`."""
    assert scores.margins is not None
    smallest = _by_request(np.minimum, scores.margins, scores.bounds, -np.inf)
    near = np.flatnonzero(np.abs(smallest) < NEAR_TIE) if scorer.resolves_near_ties else np.empty(0, dtype=np.int64)
    if len(near):
        exact = scorer.score_float64([requests[index] for index in near.tolist()], margins=True)
        assert exact.margins is not None
        smallest[near] = _by_request(np.minimum, exact.margins, exact.bounds, -np.inf)
    return smallest > 0


def _near(values: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """[groups] whether the best and the second are near; equal ones are one sequence, which float64 cannot separate."""
    ranked = np.sort(values, axis=-1)
    margins = ranked[:, -1] - ranked[:, -2]
    return (margins > 0) & (margins < threshold)
