"""One scorer for every task: the log-probability of tokens given those before them, for any causal language model.

How a score is kept the same, whatever runs beside it: rows depend on the requests alone (`forest.py`), nothing that
fills a row up is ever attended to, products are computed in full float32 (no TF32), and sums are made in float64 in the
order of the tokens. What is left is the rounding of float32 products, whose order of adding depends on their size:
about 1e-6 for each token. Sequences that are equal are computed once and get one number. Where a decision hangs on less
than that rounding can change, `exact` settles it (`settling.py`).

Every task's file imports this one, and `braid list tasks` imports those: torch comes with the first model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.windows import windows_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from braidlm.evals.scoring.readers import Reader

Advance = Callable[[int, int], None]
"""Called with what is done and what there is to do, in places."""
PLACES = {"cpu": 2048, "cuda": 65_536}
"""Places of one pass: enough to fill the device, little enough for its caches."""
LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits that are held at once."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities (natural) of the tokens that were asked for."""

    tokens: np.ndarray
    """Of every scored token, requests one after another; float64."""
    bounds: np.ndarray
    """[requests + 1] where each request's begin."""
    leads: np.ndarray | None = None
    """By how many nats each of these tokens is more probable than every other token there, where that was asked for."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of(self, index: int) -> np.ndarray:
        """Those of one request, token by token."""
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]

    @property
    def sums(self) -> np.ndarray:
        """[requests] the log-probability of each whole continuation."""
        # Each by itself, so that equal continuations have equal sums whatever stands before them.
        found = np.zeros(len(self))
        some = np.diff(self.bounds) > 0
        if some.any():
            found[some] = np.add.reduceat(self.tokens, self.bounds[:-1][some])
        return found


class Scorer:
    """Scores with one model, in memory, as it is; the model is put into evaluation mode.

    `places` are the tokens of one pass, `share` whether common prefixes are computed once, `dtype` what matrix products
    are computed in (float32, unless given; weights stay as they are). None of them changes what is scored.
    """

    def __init__(self, model: Any, places: int | None = None, share: bool = True, dtype: torch.dtype | None = None):
        import torch

        from braidlm.evals.scoring.readers import reader_of

        self.model = model.eval()
        self.reader: Reader = reader_of(model)
        self.share = share and self.reader.shares
        self.dtype = torch.float32 if dtype is None else dtype
        self.device: torch.device = next(model.parameters()).device
        kind = self.device.type
        self.places = places or PLACES.get(kind, PLACES["cpu"])
        self.logits_at_once = LOGITS.get(kind, LOGITS["cpu"])

    @property
    def settles(self) -> bool:
        """Whether scores are those of float32, so that what hangs on their rounding is to be settled."""
        import torch

        return self.dtype == torch.float32

    @property
    def context(self) -> int | None:
        """The most tokens that can be read at once, if the model says."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def score(self, requests: Sequence[Request], advance: Advance | None = None, leads: bool = False) -> Scores:
        """Every request's tokens from `first` on; what is too long for the model is cut or parted (`windows.py`)."""
        return self.score_forest(self.lay(requests), advance, leads)

    def lay(self, requests: Sequence[Request]) -> Forest:
        """Requests laid into rows: worth keeping where several models of one tokenizer read the same."""
        context = self.context
        if context is None or all(len(request.ids) <= context + 1 for request in requests):
            return Forest(requests, self.share)
        windows = [windows_of(request, context) for request in requests]
        return Forest([each for some in windows for each in some], self.share, parts=[len(some) for some in windows])

    def score_forest(self, forest: Forest, advance: Advance | None = None, leads: bool = False) -> Scores:
        """Run all rows."""
        import torch

        from braidlm.evals.scoring.readers import batch_of

        found = np.zeros((2 if leads else 1, forest.bounds[-1]))
        done = 0
        with torch.inference_mode(), full_products(), _autocast(self.device, self.dtype):
            for rows in forest.passes(self.places):
                batch, which = batch_of(rows, self.device)
                targets = torch.from_numpy(np.concatenate([row.targets for row in rows])).to(self.device)
                values = self._values(self.reader.read(batch), torch.from_numpy(which).to(self.device), targets, leads)
                found[:, np.concatenate([row.where for row in rows])] = values.double().cpu().numpy()
                done += sum(map(len, rows))
                if advance is not None:
                    advance(done, forest.places)
        _check_finite(found)
        return Scores(found[0], forest.bounds, found[1] if leads else None)

    def exact(self, requests: Sequence[Request], leads: bool = False) -> Scores:
        """The same in float64 and one by one: slow, and free of rounding that any decision could hang on."""
        import torch

        with torch.inference_mode(False):
            twin = Scorer(copy.deepcopy(self.model).double(), places=1, share=False, dtype=torch.float64)
        return twin.score(requests, leads=leads)

    def _values(self, read: Tensor, which: Tensor, targets: Tensor, leads: bool) -> Tensor:
        """[1 or 2, scores] log-probabilities and leads; `which` of the places in `read` predicts each, in any order."""
        import torch

        order = torch.argsort(which, stable=True)
        which, targets = which[order], targets[order]
        dtype = torch.float64 if read.dtype == torch.float64 else torch.float32
        values = torch.empty(2 if leads else 1, len(which), dtype=dtype, device=read.device)
        size = max(1, self.logits_at_once // self.model.config.vocab_size)
        begin = 0
        for start in range(0, len(read), size):
            logits = self.reader.logits(read[start : start + size])
            logits = logits if logits.dtype == torch.float64 else logits.float()
            stop = int(torch.searchsorted(which, start + size)) if start + size < len(read) else len(which)
            rows = which[begin:stop] - start
            chosen = logits[rows, targets[begin:stop]]
            values[0, begin:stop] = chosen - logits.logsumexp(-1)[rows]
            if leads:
                values[1, begin:stop] = chosen - _best_other(logits, rows, targets[begin:stop])
            begin = stop
        return torch.empty_like(values).index_copy_(1, order, values)


def _best_other(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """[scores] the largest logit of a token that is not the target."""
    import torch

    best = logits.topk(2, -1)
    return torch.where(best.indices[rows, 0] == targets, best.values[rows, 1], best.values[rows, 0])


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """float32 products are float32: a GPU's TF32 keeps three digits, and near pairs would fall either way."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    import torch

    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def _check_finite(found: np.ndarray) -> None:
    if not np.isfinite(found).all():
        raise BraidError(
            f"{np.count_nonzero(~np.isfinite(found)):,} of {found.size:,} scores are not numbers",
            "evaluation",
            "The model's weights hold NaN or infinity: use an earlier checkpoint.",
        )
