"""Age of acquisition: does a run learn words in the order in which children do?

Words of children's vocabulary have contexts: 504 words and 8,005 contexts in the challenge's data (19 words have none).
For every checkpoint of a run the surprisal of each word in each of its contexts is measured; a sigmoid over the
logarithm of the words of training gives the time at which a word was learned, which is correlated (Pearson, times 100)
with the age at which half of the children know it. A checkpoint alone has no such score: its own result is the mean
surprisal, and the run's is in `Evaluation.over_runs`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.babylm.curves import child_age, model_age
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import ModelResults, TaskResult
from braidlm.evals.rows import files_of, sha256_of_files, table_rows
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import requests_for, too_long
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics import check_scipy, pearson, pearson_error
from braidlm.opening.names import words_in_name

CONTEXTS, CHILDREN = "cdi_childes.json", "cdi_human.csv"
AGES = tuple(range(16, 31))
"""Months, the columns of the children's table."""
MIN_WORDS = 3
"""Fewer words have no correlation; the pipeline gives 0."""


@dataclass
class Acquisition:
    """Words with their contexts, and the share of children who know each at each age."""

    contexts: dict[str, list[str]]
    children: dict[str, np.ndarray]
    sha256: str

    @property
    def count(self) -> int:
        return sum(map(len, self.contexts.values()))

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """One checkpoint: the surprisal of every word in each of its contexts, in nats, and their mean."""
        trees, long = self._prepare(model.scorer, model.tokenizer)
        surprisals = -model.scorer.score_trees(trees, advance).sums
        means = np.array([values.mean() for values in self._by_word(surprisals)])
        error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
        score, metric = float(surprisals.mean()), "mean surprisal of a word, nats"
        result = TaskResult(task, metric, score, self.count, error, higher_is_better=False)
        result.notes.update({"words": len(self.contexts), **long})
        result.items["surprisal"] = surprisals.tolist()
        return result

    def score_run(self, task: str, checkpoints: Sequence[ModelResults]) -> TaskResult:
        """A whole run, from the results of `evaluate` for each of its checkpoints."""
        ordered = sorted(checkpoints, key=trained_words)
        amounts = np.array([trained_words(model) for model in ordered], dtype=np.float64)
        by_word = [self._by_word(model.tasks[task].items["surprisal"]) for model in ordered]
        ages = {}
        for word, *surprisals in zip(self.contexts, *by_word, strict=True):
            child = child_age(np.array(AGES), self.children[word]) if word in self.children else None
            points = np.repeat(amounts, len(surprisals[0])), np.concatenate(surprisals)
            if child is not None and (model := model_age(*points)) is not None:
                ages[word] = (model, child)
        enough = len(ages) >= MIN_WORDS
        correlation = pearson(*np.array(list(ages.values())).T) if enough else 0.0
        error = pearson_error(correlation, len(ages)) if enough else None
        error = None if error is None else 100 * error
        metric = "Pearson's correlation with children's ages, x 100"
        result = TaskResult(task, metric, 100 * correlation, len(ages), error, chance=0.0)
        result.notes.update({"checkpoints": len(checkpoints), "words with contexts": len(self.contexts)})
        models, children = ([pair[at] for pair in ages.values()] for at in (0, 1))
        result.items.update({"word": list(ages), "log10 of words of training": models, "month": children})
        return result

    def records(self, task: str, checkpoints: Sequence[ModelResults]) -> list[dict[str, Any]]:
        """Surprisals as the BabyLM pipeline writes them, a record for each checkpoint, word and context."""
        texts = [(word, *each) for word, contexts in self.contexts.items() for each in enumerate(contexts)]
        records = []
        for model in sorted(checkpoints, key=trained_words):
            step = {"step": Path(model.folder).name, "word_count": trained_words(model)}
            for (word, index, context), surprisal in zip(texts, model.tasks[task].items["surprisal"], strict=True):
                facts = {"target_word": word, "context_id": index, "context": context}
                records.append({**step, **facts, "surprisal": surprisal})
        return records

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[PrefixTrees, dict[str, int]]:
        texts = [(f"{text.strip()} ", word) for word, contexts in self.contexts.items() for text in contexts]
        requests = requests_for(tokenizer, texts)
        return scorer.build_trees(requests), too_long(requests, scorer.context)

    def _by_word(self, values: Sequence[float] | np.ndarray) -> list[np.ndarray]:
        return np.split(np.asarray(values), np.cumsum([len(contexts) for contexts in self.contexts.values()])[:-1])


def trained_words(model: ModelResults) -> int:
    """The words that a checkpoint was trained on, by its name (`chck_10M`) where that has them, as in the pipeline."""
    words = words_in_name(Path(model.folder).name) or model.words
    assert words, "`check_runs` refuses checkpoints without them"
    return words


def read_acquisition(path: Path | str) -> Acquisition:
    """A folder with the contexts and the children's table."""
    check_scipy()
    folder = Path(path)
    for name in (CONTEXTS, CHILDREN):
        if not (folder / name).is_file():
            raise BraidError(f"there is no {name} here", str(folder))
    (texts,), (table,) = (files_of(folder / name) for name in (CONTEXTS, CHILDREN))
    contexts = {}
    for word, given in read_json(folder / CONTEXTS).items():
        if not isinstance(given, list) or not all(isinstance(each, dict) and "context" in each for each in given):
            todo = f"The file looks like {json.dumps({'airplane': [{'context': 'Look, there is an'}]})}."
            raise BraidError(f"the contexts of '{word}' cannot be read", str(folder / CONTEXTS), todo)
        if len(word) > 1 and given:
            contexts[word] = [str(each["context"]) for each in given]
    if not contexts:
        raise BraidError("no word has a context", str(folder / CONTEXTS))
    children: dict[str, np.ndarray] = {}
    for row in table_rows(table, needed=("word", *map(str, AGES))):
        try:
            values = np.array([float(row.fields[str(age)] or "nan") for age in AGES])
        except ValueError as error:
            raise row.error(f"a share is not a number ({error})") from None
        children.setdefault(row.fields["word"], values)
    if not set(contexts) & set(children):
        raise BraidError(f"{CONTEXTS} and {CHILDREN} have no word in common", str(folder))
    return Acquisition(contexts, children, sha256_of_files([texts, table]))
