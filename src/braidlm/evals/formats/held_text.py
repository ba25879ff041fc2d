"""Bits per byte of text files: every token of every document predicted exactly once, in windows of the context.

The documents of a file are one stream, each ended by the end of text, which is predicted too; the first token is
predicted from that same token. This is what the validation of a run does, so the two agree on the same text, where the
run's `data.length` is the model's context. Text of unlike files is never in one window.
"""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.data.sources import Reading, documents, plan
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.data.tokenizing.words import parts_of
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.ngrams import bits_per_byte
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.texts import begin_id
from braidlm.evals.statistics.influence import KEY, of_ratio

USUAL_WINDOW = 1024
"""For models that have no longest text."""


@dataclass
class HeldText:
    """The documents of some files."""

    files: dict[str, list[str]]
    """Documents by the name of their file."""
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return sum(map(len, self.files.values()))

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Bits per byte over all files and of each."""
        forest, sizes = self._lay(model.scorer, model.tokenizer)
        tokens = model.scorer.score_forest(forest, advance).tokens
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        sums = np.add.reduceat(tokens, starts)
        lengths = np.array([len(text.encode()) for texts in self.files.values() for text in texts])
        parts, begin = {}, 0
        for name, texts in self.files.items():
            mine = slice(begin, begin + len(texts))
            parts[name] = Part(bits_per_byte(float(sums[mine].sum()), int(lengths[mine].sum())), len(texts))
            begin = mine.stop
        score = bits_per_byte(float(sums.sum()), int(lengths.sum()))
        return TaskResult(
            task=task,
            metric="bits per byte",
            score=score,
            count=self.count,
            standard_error=ratio_error(-sums / math.log(2), lengths, score),
            higher_is_better=False,
            parts=parts,
            notes={"tokens": int(sizes.sum()), "bytes": int(lengths.sum()), "window": window_of(model.scorer)},
            items={KEY: of_ratio(-sums / math.log(2), lengths)},
        )

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[Forest, np.ndarray]:
        """Windows, and the tokens of each document; kept, because the checkpoints of a run have one tokenizer."""
        window = window_of(scorer)
        key = (tokenizer.fingerprint, window)
        if key not in self._laid:
            before = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
            requests: list[Request] = []
            sizes: list[int] = []
            for texts in self.files.values():
                coded = [[*encoded(tokenizer, text), before] for text in texts]
                sizes += map(len, coded)
                stream = [before, *(token for ids in coded for token in ids)]
                requests += [Request(stream[at : at + window + 1]) for at in range(0, len(stream) - 1, window)]
            self._laid = {key: (Forest(requests, share=False), np.array(sizes))}
        return self._laid[key]


def read_text(place: Path | str) -> HeldText:
    """The documents of a file or of all files of a folder, by blank lines (or lines, in JSONL, and so on)."""
    place = Path(place)
    reading = Reading()
    shards = plan([place], reading).shards
    paths = list(dict.fromkeys(shard.place for shard in shards))
    root = place if place.is_dir() else place.parent
    files: dict[str, list[str]] = {str(Path(path).relative_to(root.absolute())): [] for path in paths}
    for shard in shards:
        name = str(Path(shard.place).relative_to(root.absolute()))
        files[name] += [text for text in documents(shard, reading) if text]
    files = {name: texts for name, texts in files.items() if texts}
    if not files:
        raise BraidError("there is no text in it", str(place))
    digest = hashlib.sha256("".join(f"{Path(path).name} {sha256_of(path)}\n" for path in paths).encode())
    return HeldText(files, digest.hexdigest())


def window_of(scorer: Scorer) -> int:
    """The tokens that are read at once."""
    return scorer.context or USUAL_WINDOW


def encoded(tokenizer: BraidTokenizer, text: str) -> list[int]:
    """The tokens of a text of any length."""
    return [token for part in parts_of(text) for token in tokenizer.encode(part)]


def ratio_error(bits: np.ndarray, lengths: np.ndarray, score: float) -> float | None:
    """Of a ratio of sums over documents, which are what is drawn at random; None for a single document."""
    count = len(bits)
    if count < 2:
        return None
    residual = bits - score * lengths
    return float(math.sqrt(count / (count - 1) * np.square(residual).sum()) / lengths.sum())
