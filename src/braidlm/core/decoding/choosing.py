"""The next token of every row of a batch, each by its own settings and its own random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Sampling

Setting = tuple[float, int | None, float | None, tuple[int, ...]]
BLOCK = 256
"""How many random numbers are drawn at once."""
TOKENS_AT_ONCE = 64
"""So many tokens of a prompt have the log-probabilities of a whole vocabulary in memory together."""


class Chooser:
    """How one text's tokens are chosen: by its settings, and by random numbers that no other text draws from."""

    def __init__(self, sampling: Sampling, top: int | None = None):
        """`top` is how many of the most probable tokens' log-probabilities are told; None for none at all."""
        self.sampling, self.top = sampling, top
        greedy = sampling.temperature == 0
        cuts = (sampling.temperature, sampling.top_k, sampling.top_p)
        self.setting: Setting = (0.0, None, None, sampling.never) if greedy else (*cuts, sampling.never)
        """Texts of one setting are chosen for together."""
        self.generator: torch.Generator | None = None
        self._numbers: list[float] = []
        if not greedy:
            self.generator = torch.Generator()
            if sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(sampling.seed)

    def draw(self) -> float:
        """The next number from 0 to 1."""
        if self.generator is None:
            return 0.0
        if not self._numbers:
            self._numbers = torch.rand(BLOCK, generator=self.generator).tolist()[::-1]
        return self._numbers.pop()


@dataclass
class LogProbabilities:
    """The log-probabilities of some tokens, each of a row or a place, as the model gives them (temperature 1)."""

    at: list[int]
    """The rows that asked for them."""
    chosen: Tensor
    """[row] the log-probabilities of the chosen tokens."""
    best: Tensor
    """[row, rank] the most probable tokens."""
    of_best: Tensor

    def to_lists(self) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """By row: the log-probability of the chosen token, and the best tokens with theirs."""
        best, of_best = self.best.tolist(), self.of_best.tolist()
        pairs = [list(zip(*both, strict=True)) for both in zip(best, of_best, strict=True)]
        return dict(zip(self.at, zip(self.chosen.tolist(), pairs, strict=True), strict=True))


def choose_tokens(logits: Tensor, choosers: Sequence[Chooser]) -> tuple[Tensor, LogProbabilities | None]:
    """The next token [row] for logits [row, vocabulary], -1 where they are no numbers, and what choosers want told."""
    numbers = torch.tensor([chooser.draw() for chooser in choosers]).to(logits.device, non_blocking=True)
    groups: dict[Setting, list[int]] = {}
    for row, chooser in enumerate(choosers):
        groups.setdefault(chooser.setting, []).append(row)
    if len(groups) == 1:
        tokens = _choose(logits, choosers[0].sampling, numbers)
    else:
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for rows in groups.values():
            at = torch.tensor(rows).to(logits.device, non_blocking=True)
            tokens[at] = _choose(logits[at], choosers[rows[0]].sampling, numbers[at])
    asked = [row for row, chooser in enumerate(choosers) if chooser.top is not None]
    if not asked:
        return tokens, None
    at = torch.tensor(asked).to(logits.device, non_blocking=True)
    best = max(choosers[row].top or 0 for row in asked)
    return tokens, log_probabilities(logits[at], tokens[at], best, asked)


def _choose(logits: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """[row]: the token at which the cumulated probabilities pass the row's number; -1 where there are none."""
    if sampling.temperature == 0:
        best, tokens = sampling.allowed(logits).max(-1)  # a NaN is the largest
        return tokens.masked_fill(best.isnan(), -1)
    probabilities = sampling.probabilities(logits)
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    wanted = torch.minimum(numbers[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True).clamp_max(logits.shape[-1] - 1)
    if logits.is_cuda:  # which sums in parts, so that sums may rise, by rounding, where nothing is added
        possible = probabilities.gather(-1, tokens) > 0
        tokens = torch.where(possible, tokens, probabilities.argmax(-1, keepdim=True))
    return tokens.masked_fill(total.isnan(), -1)[:, 0]


def log_probabilities(logits: Tensor, tokens: Tensor, best: int, at: list[int]) -> LogProbabilities:
    """The log-probabilities of tokens [row] and of the `best` most probable ones, from logits [row, vocabulary]."""
    parts = []
    for some, chosen in zip(logits.split(TOKENS_AT_ONCE), tokens.split(TOKENS_AT_ONCE), strict=True):
        found = some.to(torch.promote_types(some.dtype, torch.float32)).log_softmax(-1)
        top = found.topk(min(best, found.shape[-1]))
        parts.append((found.gather(-1, chosen.clamp_min(0)[:, None])[:, 0], top.indices, top.values))
    return LogProbabilities(at, *(torch.cat(part) for part in zip(*parts, strict=True)))
