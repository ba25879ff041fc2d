"""Items of several options: is the right one the most probable?

`RankedOptions` has the metric of the BabyLM pipeline for BLiMP (minimal pairs: two sentences that differ in one point,
the grammatical one first), EWoK, entity tracking and COMPS. The first option is right. Each has the sum of the
log-probabilities of the tokens that reach into its continuation, given its context (`requests.py` says which tokens);
the item is right if no sum is larger than the first's; the score is the accuracy of each set in percent, the mean over
the sets. Equal sums count as right, as in the pipeline, and are counted: they occur where options have the same tokens.

`MultipleChoice` has that of lm-evaluation-harness, and of Super Tiny Language Models. An option's sum is compared as it
is (raw), per token, and per byte; each task has one of these as its score and gives the others beside it (`acc` is raw;
`acc_norm` divides by characters, which for English are bytes). Of equal options the first is taken, as there.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.rows import read_rows
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import (
    Begin,
    Request,
    consecutive_ranges,
    from_divergence,
    requests_for,
    too_long,
    truncate_alike,
)
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer, is_greedy, resolve_near_ties
from braidlm.evals.statistics import INFLUENCE, mean_influences, percentage_error, set_influences

if TYPE_CHECKING:
    from braidlm.data.corpora.stories import PronounPair

T = TypeVar("T")
METRIC = "accuracy, % (mean over sets)"
GOOD, BAD = "sentence_good", "sentence_bad"
KINDS = {"field": "field", "linguistics_term": "phenomenon"}
"""Attributes of BLiMP's sets: their names in its files, and ours."""
Measure = Literal["raw", "per token", "per byte"]
MEASURES: tuple[Measure, ...] = ("raw", "per token", "per byte")
PAIR_EXAMPLE = f'{{"{GOOD}": "Cats sleep.", "{BAD}": "Cats sleeps.", "UID": "agreement"}}'


@dataclass
class TaskItems(Generic[T]):
    """The items of a task, read and checked."""

    items: list[T]
    sha256: str

    @property
    def count(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Item:
    """Options to choose from."""

    options: tuple[tuple[str, str], ...]
    """The context of each option, and the continuation that is scored."""
    of: str = ""
    """The set, subject or language that it belongs to."""
    texts: tuple[str, ...] = ()
    """The options as a file of predictions has them."""
    kinds: tuple[str, ...] = ()
    """The values of the attributes of `KINDS` that its file has."""
    answer: int = 0
    """The index of the right option."""


def pair(good: str, bad: str, of: str, kinds: tuple[str, ...] = ()) -> Item:
    """A minimal pair: two whole sentences."""
    return Item((("", good), ("", bad)), of, (good, bad), kinds)


def endings(context: str, choices: Sequence[str], answer: int, of: str = "") -> Item:
    """Options that are continuations of one context, after a space."""
    return Item(tuple((context, f" {choice}") for choice in choices), of, answer=answer)


def beginnings(contexts: Sequence[str], ending: str, answer: int) -> Item:
    """Options that are contexts of one ending: partial evaluation."""
    return Item(tuple((context, f" {ending}") for context in contexts), answer=answer)


@dataclass
class RankedOptions(TaskItems[Item]):
    """All items of a task, read and checked, the right option of each first."""

    metric: str = METRIC
    splits: dict[str, str] = field(default_factory=dict)
    """For each set the split it belongs to, if there are splits."""
    share_context: bool = True
    """Whether all options of an item lose as much of a context that is too long for the model as the longest does."""

    def sums(
        self,
        scorer: Scorer,
        tokenizer: BraidTokenizer,
        advance: ProgressCallback | None = None,
        begin: Begin = "tokenizer",
    ) -> tuple[np.ndarray, list[range]]:
        """The log-probability of every option from where the options of an item diverge, and the range of each item."""
        requests, trees, groups, _ = self._prepare(scorer, tokenizer, begin)
        return resolve_near_ties(scorer, requests, scorer.score_trees(trees, advance).sums, groups), groups

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets (and splits)."""
        result = self.result(task, *self.sums(model.scorer, model.tokenizer, advance))
        result.notes.update(self._prepare(model.scorer, model.tokenizer, "tokenizer")[-1])
        return result

    def result(self, task: str, sums: np.ndarray, groups: Sequence[range]) -> TaskResult:
        """The result that follows from the log-probability of every option."""
        chosen = [int(np.argmax(sums[group.start : group.stop])) for group in groups]  # the first of equal ones
        right = [option == 0 for option in chosen]
        guesses = [1 / len(item.options) for item in self.items]
        result = set_accuracy(task, self.metric, [item.of for item in self.items], right, guesses, self.splits)
        result.notes["ties"] = sum(int(np.sum(sums[list(group)] == sums[group.start]) > 1) for group in groups)
        result.items["chosen"] = chosen
        if all(len(item.kinds) == len(KINDS) for item in self.items):
            values = zip(*(item.kinds for item in self.items), strict=True)
            result.by.update({kind: percentages(own, right) for kind, own in zip(KINDS.values(), values, strict=True)})
        return result

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The answers as the BabyLM pipeline writes them: by set, in the order of the data."""
        answers = [item.texts[chosen] for item, chosen in zip(self.items, result.items["chosen"], strict=True)]
        return predictions_by_set(answers, [item.of for item in self.items])

    @cached_per_tokenizer
    def _prepare(
        self, scorer: Scorer, tokenizer: BraidTokenizer, begin: Begin
    ) -> tuple[list[Request], PrefixTrees, list[range], dict[str, int]]:
        groups = consecutive_ranges([len(item.options) for item in self.items])
        options = [option for item in self.items for option in item.options]
        full = from_divergence(requests_for(tokenizer, options, begin), groups)
        requests = truncate_alike(full, groups, scorer.context) if self.share_context else full
        return requests, scorer.build_trees(requests), groups, too_long(full, scorer.context, groups)


@dataclass
class MultipleChoice(TaskItems[Item]):
    """All questions of a task, read and checked: the most probable option is the model's answer."""

    headline: Measure = "raw"
    begin: Begin = "tokenizer"
    fixed_options: bool = False
    """Whether all questions have the same options (yes and no, letters): always giving one is then the baseline."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent over all questions."""
        requests, trees = self._prepare(model.scorer, model.tokenizer, model.settings.pauses)
        scores = model.scorer.score_trees(trees, advance)
        bytes_ = np.array([len(text.removeprefix(" ").encode()) for q in self.items for _, text in q.options])
        lengths = {"per token": np.maximum(np.diff(scores.bounds), 1), "per byte": np.maximum(bytes_, 1)}
        groups = consecutive_ranges([len(question.options) for question in self.items])
        sums = resolve_near_ties(model.scorer, requests, scores.sums, groups, list(lengths.values()))
        values = {"raw": sums, **{name: sums / length for name, length in lengths.items()}}
        chosen = {name: [int(np.argmax(each[list(group)])) for group in groups] for name, each in values.items()}
        ties = sum(bool(len(g) > 1 and np.ptp(np.sort(sums[list(g)])[-2:]) == 0) for g in groups)
        notes = {"ties": ties, **too_long(requests, model.scorer.context, groups)}
        answers = np.array([question.answer for question in self.items])
        right = {name: np.array(options) == answers for name, options in chosen.items()}
        parts = percentages([question.of for question in self.items], right[self.headline])
        chance = 100 * sum(1 / len(question.options) for question in self.items) / self.count  # of random guesses
        if self.fixed_options:  # of always choosing the most frequent answer
            chance = 100 * float(np.bincount(answers).max()) / self.count
        parts = {} if list(parts) == [""] else parts
        also, items = {name: 100 * float(right[name].mean()) for name in MEASURES}, {"chosen": chosen[self.headline]}
        more = {"chance": chance, "parts": parts, "also": also, "notes": notes, "items": items}
        return accuracy(task, right[self.headline], metric(self.headline), **more)

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, pauses: int) -> tuple[list[Request], PrefixTrees]:
        texts = [spaces_moved(*option) for question in self.items for option in question.options]
        requests = requests_for(tokenizer, texts, self.begin, pauses)
        return requests, scorer.build_trees(requests)


def spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Trailing spaces of a context become part of the continuation, as tokenizers encode them (and as in
    lm-evaluation-harness)."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def metric(measure: Measure) -> str:
    """The name of the score."""
    return "accuracy, %" if measure == "raw" else f"accuracy, % ({measure})"


@dataclass
class LastWords(TaskItems[tuple[str, str]]):
    """The passages of a task, as context and last word with its space: would a model generate the word?

    The metric of lm-evaluation-harness for LAMBADA: right if every token of the word, given all before it, is the most
    probable one; the perplexity is that of words, not of tokens.
    """

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, and the perplexity of the words."""
        requests, trees = self._prepare(model.scorer, model.tokenizer, model.settings.pauses)
        scores = model.scorer.score_trees(trees, advance, margins=True)
        right = is_greedy(model.scorer, requests, scores)
        also = {"perplexity of the word": math.exp(-float(np.mean(scores.sums)))}
        notes = too_long(requests, model.scorer.context)
        return accuracy(task, right, also=also, notes=notes, items={"right": right.tolist()})

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, pauses: int) -> tuple[list[Request], PrefixTrees]:
        requests = requests_for(tokenizer, [spaces_moved(*passage) for passage in self.items], pauses=pauses)
        return requests, scorer.build_trees(requests)


def read_pairs(path: Path | str) -> RankedOptions:
    """The minimal pairs of every `.jsonl` file of a folder, or of one file."""
    rows = read_rows(path, PAIR_EXAMPLE)
    pairs = []
    for row in rows:
        # One of BLiMP's sets writes its field as syntax/semantics, the others of that field as syntax_semantics.
        kinds = tuple(str(row.fields[key]).replace("/", "_") for key in KINDS if row.fields.get(key))
        pairs.append(pair(row.text(GOOD), row.text(BAD), str(row.fields.get("UID") or row.stem), kinds))
    return RankedOptions(pairs, rows.sha256, share_context=False)


def predictions_by_set(answers: Sequence[Any], sets: Sequence[str]) -> dict[str, Any]:
    """Answers by set, each with its id, as in the BabyLM pipeline's files of predictions."""
    by_set: dict[str, Any] = {}
    for answer, name in zip(answers, sets, strict=True):
        predictions = by_set.setdefault(name, {"predictions": []})["predictions"]
        fields = answer if isinstance(answer, dict) else {"pred": answer}
        predictions.append({"id": f"{name}_{len(predictions)}", **fields})
    return by_set


def set_accuracy(
    task: str,
    metric: str,
    sets: Sequence[str],
    right: Sequence[bool],
    chances: Sequence[float],
    splits: Mapping[str, str] | None = None,
) -> TaskResult:
    """The mean over sets of the percentage that is right; where sets belong to splits, first over those of a split.

    `sets` has the set of each item, `chances` the probability that a guess is right.
    """
    parts = percentages(sets, right)
    split_of = {name: (splits or {}).get(name, "") for name in parts}
    sizes = Counter(split_of.values())
    weights = {name: 1 / (len(sizes) * sizes[split]) for name, split in split_of.items()}
    chance = sum(weights[name] * guess / parts[name].count for name, guess in zip(sets, chances, strict=True))
    rates = {name: part.score / 100 for name, part in parts.items()}
    # The variance of a weighted mean: that of its parts, each times the square of its weight.
    variance = sum(weights[name] ** 2 * (rates[name] * (1 - rates[name]) / part.count) for name, part in parts.items())
    score = sum(weights[name] * part.score for name, part in parts.items())
    items = {INFLUENCE: set_influences(100.0 * np.array(right, dtype=np.float64), sets, weights)}
    fields: dict[str, Any] = {"parts": parts, "notes": {"sets": len(parts)}, "items": items}
    error = 100 * math.sqrt(variance)
    return TaskResult(task, metric, score, len(sets), error, chance=round(100 * chance, 6), **fields)


def accuracy(task: str, right: Sequence[bool] | np.ndarray, metric: str = "accuracy, %", **more: Any) -> TaskResult:
    """The percentage of all items that is right; `more` are further fields of the result."""
    rate = float(np.mean(right))
    items = {**more.pop("items", {}), INFLUENCE: mean_influences(100.0 * np.asarray(right))}
    return TaskResult(task, metric, 100 * rate, len(right), percentage_error(rate, len(right)), items=items, **more)


def percentages(groups: Iterable[str | None], right: Iterable[bool]) -> dict[str, Part]:
    """The accuracy of each group, in the order of their names; `groups` has the group of each item, if it has one."""
    hits: dict[str, list[bool]] = {}
    for name, hit in zip(groups, right, strict=True):
        if name is not None:
            hits.setdefault(name, []).append(bool(hit))
    return {name: Part(100 * sum(some) / len(some), len(some)) for name, some in sorted(hits.items())}


def pronoun_accuracy(model: Any, tokenizer: BraidTokenizer, pairs: "Sequence[PronounPair]") -> float:
    """The built-in stories' own test: in what share of pairs the agreeing pronoun is more probable than the other."""
    requests = []
    for each in pairs:
        prefix = [*tokenizer.beginning, *tokenizer.encode(each.prefix)]
        requests += [Request([*prefix, *tokenizer.encode(word)], len(prefix)) for word in (each.right, each.wrong)]
    sums = Scorer(model).score(requests).sums
    return float((sums[0::2] > sums[1::2]).mean())
