"""Items of several options, of which the first is right: is it the most probable one?

The metric of the BabyLM pipeline for EWoK, entity tracking and COMPS: of each option the sum of the log-probabilities
of the tokens that reach into its continuation, given its context; right if none is larger than that of the first. Equal
sums count as right there, so they do here, and are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.formats.set_accuracy import set_accuracy
from braidlm.evals.reports.results import TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.parting import fitted_alike, parted
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.settling import settled
from braidlm.evals.scoring.texts import requests_for
from braidlm.evals.scoring.windows import too_long


@dataclass(frozen=True)
class Item:
    """Options as (context, continuation), the right one first, and the set that the item belongs to."""

    options: tuple[tuple[str, str], ...]
    of: str
    answers: tuple[str, ...]
    """What a file of predictions calls the options."""


@dataclass
class RankedOptions:
    """All items of a task, read and checked."""

    items: list[Item]
    sha256: str
    metric: str = "accuracy, % (mean over sets)"
    splits: dict[str, str] = field(default_factory=dict)
    """For each set the split it belongs to, where there are some."""
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.items)

    def sums(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: Advance | None = None
    ) -> tuple[np.ndarray, list[range]]:
        """Of every option by how many nats it is probable, all with the same left out, and where each item's are."""
        requests, forest, groups, _ = self._lay(scorer, tokenizer)
        return settled(scorer, requests, scorer.score_forest(forest, advance).sums, groups), groups

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets (and splits)."""
        sums, groups = self.sums(model.scorer, model.tokenizer, advance)
        chosen = [int(np.argmax(sums[group.start : group.stop])) for group in groups]  # the first of equal ones
        ties = sum(int(np.count_nonzero(sums[group.start : group.stop] == sums[group.start]) > 1) for group in groups)
        result = set_accuracy(
            task,
            self.metric,
            [item.of for item in self.items],
            [option == 0 for option in chosen],
            [1 / len(item.options) for item in self.items],
            self.splits,
        )
        result.notes.update(ties=ties, **self._lay(model.scorer, model.tokenizer)[-1])
        result.items["chosen"] = chosen
        return result

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The answers as the BabyLM pipeline writes them: by set, in the order of the data."""
        answers = [item.answers[chosen] for item, chosen in zip(self.items, result.items["chosen"], strict=True)]
        return listed(answers, [item.of for item in self.items])

    def _lay(
        self, scorer: Scorer, tokenizer: BraidTokenizer
    ) -> tuple[list[Request], Forest, list[range], dict[str, int]]:
        """Requests in rows, and what was too long; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share)
        if key not in self._laid:
            groups = ranges([len(item.options) for item in self.items])
            options = [option for item in self.items for option in item.options]
            whole = parted(requests_for(tokenizer, options), groups)
            requests = fitted_alike(whole, groups, scorer.context)
            self._laid = {key: (requests, scorer.lay(requests), groups, too_long(whole, scorer.context, groups))}
        return self._laid[key]


def ranges(sizes: Sequence[int]) -> list[range]:
    """Where groups of these sizes stand, one after another."""
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def listed(answers: Sequence[Any], sets: Sequence[str]) -> dict[str, Any]:
    """Answers by set, each with its id: what the BabyLM pipeline calls predictions."""
    found: dict[str, Any] = {}
    for answer, name in zip(answers, sets, strict=True):
        some = found.setdefault(name, {"predictions": []})["predictions"]
        facts = answer if isinstance(answer, dict) else {"pred": answer}
        some.append({"id": f"{name}_{len(some)}", **facts})
    return found
