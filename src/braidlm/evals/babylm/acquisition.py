"""Age of acquisition: does a run learn words in the order in which children do?

For 504 words of children's vocabulary there are contexts. Of every checkpoint of a run the surprisal of each word in
each of its contexts is measured; a sigmoid over the logarithm of the words of training says when a word was learned;
that is compared with the age at which half of the children know it (Pearson's correlation, times 100). A checkpoint
alone has no such score: its own result is the mean surprisal, and the run's is in `Evaluation.over_runs`.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.evals.babylm.checkpoint_names import words_of_name
from braidlm.evals.files.json_rows import TextFile, sha256_of_files, text_of
from braidlm.evals.reports.results import ModelResults, TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.scorer import Advance
from braidlm.evals.scoring.texts import requests_for
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.correlations import pearson, pearson_error
from braidlm.evals.statistics.sigmoids import check_fitting, child_age, model_age

CONTEXTS, CHILDREN = "cdi_childes.json", "cdi_human.csv"
LEAST_CONTEXTS = 20
"""Words with fewer contexts are left out."""
AGES = tuple(range(16, 31))
"""Months, the columns of the children's table."""
FEWEST_WORDS = 3
"""Of fewer there is no correlation; the pipeline calls it 0."""


@dataclass
class Acquisition:
    """Words with their contexts, and what children know of them at each age."""

    contexts: dict[str, list[str]]
    children: dict[str, np.ndarray]
    sha256: str
    _laid: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return sum(map(len, self.contexts.values()))

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """One checkpoint: the surprisal of every word in each of its contexts, in nats, and their mean."""
        key = (model.tokenizer.fingerprint, model.scorer.context, model.scorer.share)
        if key not in self._laid:
            texts = [(f"{text.strip()} ", word) for word, some in self.contexts.items() for text in some]
            requests = requests_for(model.tokenizer, texts)
            self._laid = {key: (model.scorer.lay(requests), too_long(requests, model.scorer.context))}
        forest, long = self._laid[key]
        surprisals = -model.scorer.score_forest(forest, advance).sums
        means = np.array([some.mean() for some in self._by_word(surprisals)])
        return TaskResult(
            task=task,
            metric="mean surprisal of a word, nats",
            score=float(surprisals.mean()),
            count=self.count,
            standard_error=float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else None,
            higher_is_better=False,
            notes={"words": len(self.contexts), **long},
            items={"surprisal": surprisals.tolist()},
        )

    def over_run(self, task: str, checkpoints: Sequence[ModelResults]) -> TaskResult:
        """A whole run, from what `evaluate` found of each of its checkpoints."""
        steps = sorted((trained_words(model), index) for index, model in enumerate(checkpoints))
        amounts = np.array([words for words, _ in steps], dtype=np.float64)
        found = [self._by_word(checkpoints[index].tasks[task].items["surprisal"]) for _, index in steps]
        ages = {}
        for word, *mine in zip(self.contexts, *found, strict=True):
            child = child_age(np.array(AGES), self.children[word]) if word in self.children else None
            if child is None:
                continue
            model = model_age(np.repeat(amounts, len(mine[0])), np.concatenate(mine))
            if model is not None:
                ages[word] = (model, child)
        enough = len(ages) >= FEWEST_WORDS
        correlation = pearson(*np.array(list(ages.values())).T) if enough else 0.0
        error = pearson_error(correlation, len(ages)) if enough else None
        return TaskResult(
            task=task,
            metric="Pearson's correlation with children's ages, x 100",
            score=100 * correlation,
            count=len(ages),
            standard_error=None if error is None else 100 * error,
            chance=0.0,
            notes={"checkpoints": len(checkpoints), "words with contexts": len(self.contexts)},
            items={
                "word": list(ages),
                "log10 of words of training": [model for model, _ in ages.values()],
                "month": [child for _, child in ages.values()],
            },
        )

    def records(self, task: str, checkpoints: Sequence[ModelResults]) -> list[dict[str, Any]]:
        """Surprisals as the BabyLM pipeline writes them, a record for each checkpoint, word and context."""
        found = []
        for model in sorted(checkpoints, key=trained_words):
            values = iter(model.tasks[task].items["surprisal"])
            for word, contexts in self.contexts.items():
                for index, context in enumerate(contexts):
                    facts = {"step": Path(model.folder).name, "word_count": trained_words(model)}
                    facts |= {"target_word": word, "context_id": index, "context": context}
                    found.append({**facts, "surprisal": next(values)})
        return found

    def _by_word(self, values: Sequence[float] | np.ndarray) -> list[np.ndarray]:
        """The values of each word's contexts."""
        return np.split(np.asarray(values), np.cumsum([len(some) for some in self.contexts.values()])[:-1])


def trained_words(model: ModelResults) -> int:
    """The words that a checkpoint was trained on, round where its name says it (`chck_10M`), as in the pipeline."""
    found = words_of_name(Path(model.folder).name) or model.words
    assert found, "checkpoints are asked for their words before anything is scored"
    return found


def read_acquisition(place: Path | str) -> Acquisition:
    """A folder with the contexts and the children's table."""
    check_fitting()
    folder = Path(place)
    paths = [folder / CONTEXTS, folder / CHILDREN]
    for path in paths:
        if not path.is_file():
            raise BraidError(f"there is no {path.name} here", str(folder))
    files = [TextFile(path.name, str(path), path.read_bytes()) for path in paths]
    contexts = _contexts(paths[0])
    children = _children(files[1])
    if not set(contexts) & set(children):
        raise BraidError(f"{CONTEXTS} and {CHILDREN} have no word in common", str(folder))
    return Acquisition(contexts, children, sha256_of_files(files))


def _contexts(path: Path) -> dict[str, list[str]]:
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise BraidError("this is to be an object of words", str(path))
    found = {}
    for word, some in facts.items():
        if not isinstance(some, list) or not all(isinstance(one, dict) and "context" in one for one in some):
            example = json.dumps({"airplane": [{"context": "Look, there is an"}]})
            raise BraidError(f"the contexts of '{word}' cannot be read", str(path), f"The file looks like {example}.")
        if len(word) > 1 and len(some) >= LEAST_CONTEXTS:
            found[word] = [str(one["context"]) for one in some]
    if not found:
        raise BraidError(f"no word has {LEAST_CONTEXTS} contexts", str(path))
    return found


def _children(file: TextFile) -> dict[str, np.ndarray]:
    reader = csv.DictReader(io.StringIO(text_of(file)))
    for name in ("word", *map(str, AGES)):
        if name not in (reader.fieldnames or ()):
            raise BraidError(f"there is no column '{name}'", file.where)
    found: dict[str, np.ndarray] = {}
    for row in reader:
        try:
            shares = np.array([float(row[str(age)] or "nan") for age in AGES])
        except ValueError as error:
            raise BraidError(f"a share is not a number ({error})", f"{file.where}, line {reader.line_num}") from None
        found.setdefault(row["word"], shares)
    return found
