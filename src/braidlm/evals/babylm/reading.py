"""Reading times: does a model's surprisal predict where people read slowly?

As the BabyLM pipeline of 2025 defines it, on the data of de Varda, Marelli and Amenta (2023): for every word of 205
sentences its surprisal given its context, added to a regression of reading times.

- Eye tracking: four measures; the baseline is frequency, length, position and their pairwise products; the mean of the
  gains.
- Self-paced reading: one measure; the baseline also has length and surprisal of the word before (spill-over).

A word is encoded **without the space before it**, as the pipeline does: "Check whether tokenizer adds a whitespace",
its source says. With a tokenizer that does not, it scores "Arthur placedthe", and gains shrink. That is the score here
too, since it is the one that others report; the gains of words with their space are given beside it (`also`). For each
further token of a word the text of the context with all tokens before it is encoded again, and so is the token's text,
whose first token is predicted: where tokens merge differently in context, the numbers are the pipeline's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import TaskItems
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.rows import Row, files_of, sha256_of_files, table_rows
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import BATCH, Request, consecutive_ranges, strip_final_specials, too_long
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics import Table, jackknife_error

EYE_TRACKING = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
SELF_PACED = "self_paced_reading_time"
BASE = ("Subtlex_log10", "length", "context_length")
NUMBERS = (*BASE, "prev_length", *EYE_TRACKING, SELF_PACED)
WORDS = ("item", "word", "prev_item", "prev_word", "sent_id")
MISSING = frozenset({"", "None", "nan", "NaN", "NA", "N/A", "null"})
"""What pandas, which the pipeline uses, reads as missing; a sentence that begins with "None" is in the data."""


@dataclass(frozen=True)
class Word:
    """A word after its context, and the one before it, if that has a context too."""

    context: str
    word: str
    before: tuple[str, str] | None


def word_requests(tokenizer: BraidTokenizer, words: Sequence[tuple[str, str]]) -> tuple[list[Request], np.ndarray]:
    """A request for every token of words given as (context, word), and [requests] the index of the token's word."""
    texts, targets, owners = [], [], []
    encoded = tokenizer.encode_batch([word for _, word in words])
    for index, ((text, word), tokens) in enumerate(zip(words, encoded, strict=True)):
        if not tokens:
            raise BraidError(f"the tokenizer has no token for the word '{word}'")
        for at, token in enumerate(tokens):
            decoded = tokenizer.decode([token])
            texts.append(text)
            # A token without a text, part of a character, is itself.
            targets.append(token if at == 0 else (tokenizer.encode(decoded) or [token])[0])
            owners.append(index)
            text += decoded
    contexts: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        encodings = tokenizer.backend.encode_batch(texts[start : start + BATCH])
        contexts += [strip_final_specials(encoding, keep=1) for encoding in encodings]
    requests = [Request([*ids, target], max(1, len(ids))) for ids, target in zip(contexts, targets, strict=True)]
    return requests, np.array(owners)


@dataclass
class ReadingTimes(TaskItems[Word]):
    table: Table
    sentences: np.ndarray
    """[words] the sentence of each."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """The mean of the gains for eye tracking and for self-paced reading; each is a part."""
        surprisal, before = self.surprisals(model, advance)
        requests, owners, _ = self._prepare(model.scorer, model.tokenizer, "")
        table = {**self.table, "surprisal": surprisal, "before": before}
        gains = {name: gain(table, name, BASE, "surprisal") for name in EYE_TRACKING}
        eyes, paced = float(np.mean(list(gains.values()))), self_paced(table)
        gains = {"eye_tracking": eyes, "self_paced": paced, **gains}
        known = [None if math.isnan(value) else value for value in before.tolist()]
        also = {}
        if model.tokenizer.encode("the") != model.tokenizer.encode(" the"):
            with_space, before_with_space = self.surprisals(model, advance, space=" ")
            spaced = {**self.table, "surprisal": with_space, "before": before_with_space}
            also["eye tracking, words with their space"] = eye_tracking(spaced)
            also["self-paced, words with their space"] = self_paced(spaced)
        error = jackknife_error(table, self.sentences, lambda part: (eye_tracking(part) + self_paced(part)) / 2)
        return TaskResult(
            task=task,
            metric="gain in explained variance, % (mean of eye tracking and self-paced)",
            score=(eyes + paced) / 2,
            count=self.count,
            standard_error=error,
            chance=0.0,
            parts={name: Part(value, self.count) for name, value in gains.items()},
            also=also,
            notes=too_long(requests, model.scorer.context, consecutive_ranges(np.bincount(owners).tolist())),
            items={"surprisal": surprisal.tolist(), "before": known},
        )

    def surprisals(
        self, model: EvaluatedModel, advance: ProgressCallback | None = None, space: str = ""
    ) -> tuple[np.ndarray, np.ndarray]:
        """[words] the surprisal of each word in nats, and of the word before it; NaN where there is no such word."""
        _, owners, trees = self._prepare(model.scorer, model.tokenizer, space)
        surprisals = np.bincount(owners, weights=-model.scorer.score_trees(trees, advance).sums)
        before = np.full(self.count, np.nan)
        before[[word.before is not None for word in self.items]] = surprisals[self.count :]
        return surprisals[: self.count], before

    @cached_per_tokenizer
    def _prepare(
        self, scorer: Scorer, tokenizer: BraidTokenizer, space: str
    ) -> tuple[list[Request], np.ndarray, PrefixTrees]:
        """The requests of all words and of the words before them."""
        words = [(word.context, word.word) for word in self.items]
        words += [word.before for word in self.items if word.before is not None]
        requests, owners = word_requests(tokenizer, [(context, space + word) for context, word in words])
        return requests, owners, scorer.build_trees(requests)

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """Surprisals as the BabyLM pipeline writes them."""
        known = [math.nan if before is None else before for before in result.items["before"]]
        values = enumerate(zip(result.items["surprisal"], known, strict=True))
        return {"reading": {"predictions": [{"id": n, "pred": v, "prev_pred": before} for n, (v, before) in values]}}


def eye_tracking(table: Table) -> float:
    """The mean gain over the four measures, in percent."""
    return float(np.mean([gain(table, name, BASE, "surprisal") for name in EYE_TRACKING]))


def self_paced(table: Table) -> float:
    """The gain over a baseline that includes the word before, in percent."""
    return gain(table, SELF_PACED, (*BASE, "prev_length", "before"), "surprisal")


def read_reading_times(path: Path | str) -> ReadingTimes:
    """The table of words: a CSV file, or a folder with one."""
    files = files_of(path, "*.csv")
    if len(files) != 1:
        raise BraidError(f"there are {len(files)} .csv files here, and reading times are one", str(path))
    rows = list(table_rows(files[0], needed=(*WORDS, *NUMBERS)))
    if not rows:
        raise BraidError("the file is empty", files[0].where)
    table = {name: np.array([_number(row, name) for row in rows]) for name in NUMBERS}
    sentences = np.array([row.fields["sent_id"] for row in rows])
    words = []
    for row in rows:
        word, item, before, before_word = (row.fields[name] for name in ("word", "item", "prev_item", "prev_word"))
        if not word.strip():
            raise row.error("'word' is empty")
        context = "None" if item in MISSING else item
        words.append(Word(context, word, None if before in MISSING else (before, before_word)))
    return ReadingTimes(words, sha256_of_files(files), table, sentences)


def _number(row: Row, name: str) -> float:
    try:
        return math.nan if row.fields[name] in MISSING else float(row.fields[name])
    except ValueError:
        raise row.error(f"'{name}' is to be a number, not '{row.fields[name]}'") from None


def r_squared(columns: Sequence[np.ndarray], target: np.ndarray) -> float:
    """R2 of a regression with an intercept."""
    x = np.column_stack(columns)
    x = x - x.mean(0)
    spread = x.std(0)
    x = x / np.where(spread > 0, spread, 1.0)  # the same R2, and better conditioned
    y = target - target.mean()
    weights = np.linalg.lstsq(x.T @ x, x.T @ y, rcond=None)[0]
    residual = y - x @ weights
    return 1 - float(residual @ residual) / float(y @ y)


def gain(table: Table, target: str, base: Sequence[str], predictor: str) -> float:
    """The percentage of the variance unexplained by the baseline that the predictor explains.

    Rows with a missing number are left out of each regression that needs the number.
    """
    values = []
    for extra in ([], [predictor]):
        complete = ~np.isnan(np.column_stack([table[name] for name in (target, *base, *extra)])).any(1)
        rows = {name: column[complete] for name, column in table.items()}
        products = (rows[a] * rows[b] for a, b in combinations(base, 2))
        columns = [*(rows[name] for name in base), *products, *(rows[name] for name in extra)]
        values.append(r_squared(columns, rows[target]))
    baseline, extended = values
    return 100 * (extended - baseline) / (1 - baseline)
