"""Bits per byte of held-out text: every token of every document is predicted exactly once, in windows of the context.

The documents of a file are one stream, each ended by the EOS token, which is predicted too; the first token is
predicted from an EOS token. The validation of a run does the same, so the two agree on the same text, where the run's
`data.length` is the model's context. A window never spans two files.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.data.sources.plan import ReadOptions, plan_shards, read_documents
from braidlm.data.tokenizing.cutting import Cutter
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, begin_id
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics.influence import INFLUENCE, ratio_influences
from braidlm.evals.statistics.standard_errors import ratio_error

DEFAULT_WINDOW = 1024
"""For models without a maximum context."""


@dataclass
class HeldOutText:
    """The documents of some files."""

    files: dict[str, list[str]]
    """Documents by the name of their file."""
    sha256: str

    @property
    def count(self) -> int:
        return sum(map(len, self.files.values()))

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Bits per byte over all files and of each."""
        trees, sizes = self._prepare(model.scorer, model.tokenizer)
        tokens = model.scorer.score_trees(trees, advance).tokens
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        sums = np.add.reduceat(tokens, starts)
        lengths = np.array([len(text.encode()) for texts in self.files.values() for text in texts])
        parts, begin = {}, 0
        for name, texts in self.files.items():
            of_file = slice(begin, begin + len(texts))
            parts[name] = Part(bits_per_byte(float(sums[of_file].sum()), int(lengths[of_file].sum())), len(texts))
            begin = of_file.stop
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
            items={INFLUENCE: ratio_influences(-sums / math.log(2), lengths)},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[PrefixTrees, np.ndarray]:
        window = window_of(scorer)
        eos = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
        requests: list[Request] = []
        sizes: list[int] = []
        for texts in self.files.values():
            documents_ids = [[*encode_long(tokenizer, text), eos] for text in texts]
            sizes += map(len, documents_ids)
            stream = [eos, *(token for ids in documents_ids for token in ids)]
            requests += [Request(stream[at : at + window + 1]) for at in range(0, len(stream) - 1, window)]
        return PrefixTrees(requests, share=False), np.array(sizes)


def read_text(path: Path | str) -> HeldOutText:
    """The documents of a file or of all files of a folder, by blank lines (or lines, in JSONL, and so on)."""
    path = Path(path)
    reading = ReadOptions()
    shards = plan_shards([path], reading).shards
    paths = list(dict.fromkeys(shard.source for shard in shards))
    root = path if path.is_dir() else path.parent
    files: dict[str, list[str]] = {str(Path(file).relative_to(root.absolute())): [] for file in paths}
    for shard in shards:
        name = str(Path(shard.source).relative_to(root.absolute()))
        files[name] += [text for text in read_documents(shard, reading) if text]
    files = {name: texts for name, texts in files.items() if texts}
    if not files:
        raise BraidError("there is no text in it", str(path))
    digest = hashlib.sha256("".join(f"{Path(file).name} {sha256_of(file)}\n" for file in paths).encode())
    return HeldOutText(files, digest.hexdigest())


def window_of(scorer: Scorer) -> int:
    """The number of tokens in a window."""
    return scorer.context or DEFAULT_WINDOW


def encode_long(tokenizer: BraidTokenizer, text: str) -> list[int]:
    """The tokens of a text of any length."""
    return Cutter(tokenizer).encode(text)


def bits_per_byte(log_probabilities_sum: float, bytes: int) -> float:
    """Bits a model needs per byte of text: comparable across tokenizers, unlike perplexity."""
    if bytes <= 0:
        raise BraidError("bits per byte need a text of at least one byte", "evaluation data")
    return -log_probabilities_sum / math.log(2) / bytes
