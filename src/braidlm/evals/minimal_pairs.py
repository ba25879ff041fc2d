"""Minimal pairs: of two sentences that differ in one point, is the grammatical one more probable?

The metric of the BabyLM pipeline: the sum of the log-probabilities of all tokens (`texts.py` says of which) is larger
for the good sentence; the accuracy of each set in percent; the mean over the sets. Equal sums count as right there, so
they do here, and are counted: it happens when a tokenizer writes both sentences with the same tokens.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import sha256_of
from braidlm.data.braid_tokenizer import BraidTokenizer
from braidlm.evals.contestant import Contestant
from braidlm.evals.forest import Forest, Request
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scorer import Advance, Scorer
from braidlm.evals.settling import settled
from braidlm.evals.texts import Begin, sentence_requests

GOOD, BAD = "sentence_good", "sentence_bad"
EXAMPLE = f'{{"{GOOD}": "Cats sleep.", "{BAD}": "Cats sleeps.", "UID": "agreement"}}'


@dataclass(frozen=True)
class Pair:
    """Two sentences, and the set that they belong to."""

    good: str
    bad: str
    of: str


@dataclass
class MinimalPairs:
    """All pairs of a task, read and checked."""

    pairs: list[Pair]
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.pairs)

    def differences(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: Advance | None = None, begin: Begin = "tokenizer"
    ) -> np.ndarray:
        """[pairs] by how many nats the good sentence is more probable."""
        requests, forest = self._lay(scorer, tokenizer, begin)
        sums = scorer.score_forest(forest, advance).sums
        sums = settled(scorer, requests, sums, [(at, at + 1) for at in range(0, len(requests), 2)])
        return sums[0::2] - sums[1::2]

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets."""
        return accuracy(task, self.pairs, self.differences(model.scorer, model.tokenizer, advance))

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer, begin: Begin) -> tuple[list[Request], Forest]:
        """Requests in rows; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share, begin)
        if key not in self._laid:
            sentences = [sentence for pair in self.pairs for sentence in (pair.good, pair.bad)]
            requests = where_they_part(sentence_requests(tokenizer, sentences, begin))
            self._laid = {key: (requests, scorer.lay(requests))}
        return self._laid[key]


def where_they_part(requests: Sequence[Request]) -> list[Request]:
    """Good and bad sentences in turn, scored from the first token in which the two of a pair differ.

    What they have in common adds the same to both sums, so that the head need not be applied there.
    """
    found = []
    for good, bad in zip(requests[0::2], requests[1::2], strict=True):
        alike = 0
        for one, other in zip(good.ids, bad.ids, strict=False):
            if one != other:
                break
            alike += 1
        found += [Request(each.ids, min(max(each.first, alike), len(each.ids))) for each in (good, bad)]
    return found


def accuracy(task: str, pairs: Sequence[Pair], differences: np.ndarray) -> TaskResult:
    """What differences mean."""
    right: dict[str, list[bool]] = {}
    for pair, difference in zip(pairs, differences, strict=True):
        right.setdefault(pair.of, []).append(bool(difference >= 0))
    parts = {name: Part(100 * sum(hits) / len(hits), len(hits)) for name, hits in sorted(right.items())}
    # The mean over sets has the variance of its parts, each divided by the square of their number.
    variance = sum((p.score / 100) * (1 - p.score / 100) / p.count for p in parts.values()) / len(parts) ** 2
    return TaskResult(
        task=task,
        metric="accuracy, % (mean over sets)",
        score=sum(part.score for part in parts.values()) / len(parts),
        count=len(pairs),
        standard_error=100 * math.sqrt(variance),
        chance=50.0,
        parts=parts,
        notes={"sets": len(parts), "ties": int(np.count_nonzero(differences == 0))},
    )


def read_pairs(folder: Path | str) -> MinimalPairs:
    """The pairs of every `.jsonl` file of a folder, or of one file."""
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
    if not files:
        raise BraidError("there are no .jsonl files here", str(folder), f"A line of such a file is {EXAMPLE}.")
    pairs = [pair for file in files for pair in _read_file(file)]
    if not pairs:
        raise BraidError("the files are empty", str(folder))
    digest = hashlib.sha256("".join(f"{file.name} {sha256_of(file)}\n" for file in files).encode())
    return MinimalPairs(pairs, digest.hexdigest())


def _read_file(path: Path) -> list[Pair]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", str(path)) from None
    return [_pair(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]


def _pair(line: str, path: Path, number: int) -> Pair:
    where, todo = f"{path}, line {number}", f"A line is {EXAMPLE}."
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BraidError(f"this line is not JSON ({error.msg} at character {error.colno})", where, todo) from None
    if not isinstance(row, dict):
        raise BraidError(f"this line is not an object but {json.dumps(row)[:40]}", where, todo)
    for key in (GOOD, BAD):
        if key not in row:
            raise BraidError(
                f"there is no '{key}'.{did_you_mean(key, row).replace('There are', 'It has')}", where, todo
            )
        if not isinstance(row[key], str) or not row[key].strip():
            raise BraidError(f"'{key}' is to be a sentence, not {json.dumps(row[key])[:40]}", where, todo)
    return Pair(row[GOOD], row[BAD], str(row.get("UID") or path.stem))
