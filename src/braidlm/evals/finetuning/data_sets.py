"""The labelled data sets (`data_sets.yaml`): their texts, labels and files, and their metrics in percent.

Texts are composed as in the BabyLM pipeline of 2025 (`evaluation_pipeline/finetune/dataset.py`), and files are checked
line by line. Each metric has a standard error, and the score of a constant answer as its baseline.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_yaml
from braidlm.evals.babylm.conventions import babylm_locations
from braidlm.evals.rows import Row, files_of, json_rows, table_rows
from braidlm.evals.statistics import pearson, percentage_error, spearman
from braidlm.model.config.strict import decode

BABYLM_FOLDERS = (*babylm_locations("full_eval/glue_filtered")[:-1], "glue-2024/glue_filtered", "glue_filtered")
CORRELATION = "Pearson and Spearman"
"""The metric that is the mean of both, as in GLUE for STS-B."""
MAX_LABEL = 5.0
"""The largest label that is a number; the smallest is 0."""


@dataclass(frozen=True)
class Files:
    """The two files of one layout, inside a folder."""

    train: str
    valid: str
    columns: tuple[str, ...] | None = None
    """The names of the columns where the first line does not have them; a column with an empty name is not read."""


TSV = Files("train.tsv", "dev.tsv")


@dataclass(frozen=True)
class DataSet:
    task: str
    """Its name in the challenge after that of its collection, `glue_` or `superglue_`."""
    description: str
    size: str
    texts: tuple[str, ...]
    """The templates of one text or of two: names in braces are fields of a row."""
    labels: tuple[str, ...] | None
    """The names of the classes, from class 0; None where the label is a number."""
    metric: str = "accuracy"
    other_files: tuple[Files, ...] = (TSV,)
    """The files of other layouts than the BabyLM challenge's."""
    other_folders: tuple[str, ...] = ()
    other_fields: dict[str, str] = field(default_factory=dict)
    """Names that a field has in other layouts."""

    @property
    def name(self) -> str:
        return self.task.partition("_")[2]

    @property
    def classes(self) -> int | None:
        return None if self.labels is None else len(self.labels)

    @property
    def text_fields(self) -> list[str]:
        """The fields that a row must have beside its label."""
        return [name for _, name, _, _ in Formatter().parse("".join(self.texts)) if name is not None]

    @property
    def files(self) -> tuple[Files, ...]:
        """Every layout that can be read."""
        return (Files(f"{self.name}.train.jsonl", f"{self.name}.valid.jsonl"), *self.other_files)

    @property
    def locations(self) -> tuple[str, ...]:
        """The usual locations of the training file inside a data folder; the other file is beside it."""
        own = [f"{folder}/{files.train}" for folder in self.other_folders for files in self.other_files]
        return (*(f"{folder}/{self.files[0].train}" for folder in BABYLM_FOLDERS), *own)


@dataclass(frozen=True)
class Examples:
    """One file's examples, in its order."""

    texts: list[tuple[str, str | None]]
    labels: np.ndarray
    """Classes (int64) or numbers (float64)."""

    def __len__(self) -> int:
        return len(self.texts)


DATA_SETS = decode(tuple[DataSet, ...], read_yaml(Path(__file__).with_name("data_sets.yaml"), expect=list))
RESAMPLES = 500
"""Bootstrap samples of a confusion matrix, for a metric's standard error."""


def accuracy(table: np.ndarray) -> float:
    """The percentage of right answers; `table` is the confusion matrix [true class, answered class]."""
    return 100 * float(np.trace(table)) / float(table.sum())


def f1(table: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1."""
    both = 2 * table[1, 1]
    whole = both + table[0, 1] + table[1, 0]
    return 100 * float(both) / float(whole) if whole else 0.0


def matthews(table: np.ndarray) -> float:
    """The correlation of true and answered classes; 0 for a constant answer."""
    table = table.astype(float)
    true, answered, whole = table.sum(1), table.sum(0), table.sum()
    spread = (whole**2 - (true**2).sum()) * (whole**2 - (answered**2).sum())
    return 100 * float(np.trace(table) * whole - true @ answered) / math.sqrt(spread) if spread > 0 else 0.0


OF_CLASSES: dict[str, Callable[[np.ndarray], float]] = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}


def confusion_matrix(answers: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """[true class, answered class] counts."""
    return np.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes)


def all_metrics(answers: np.ndarray, labels: np.ndarray, classes: int | None) -> dict[str, float]:
    """All metrics of answers: of classes, or of numbers where `classes` is None."""
    if classes is None:
        metrics = {"Pearson": 100 * pearson(answers, labels), "Spearman": 100 * spearman(answers, labels)}
        return {**metrics, CORRELATION: sum(metrics.values()) / 2}
    table = confusion_matrix(answers, labels, classes)
    return {name: metric(table) for name, metric in OF_CLASSES.items() if name != "F1" or classes == 2}


def constant_answer(metric: str, labels: np.ndarray, classes: int | None) -> float:
    """The score of the constant answer that is best for this metric: for accuracy the majority class."""
    if classes is None:
        return 0.0
    guesses = [np.full_like(labels, answer) for answer in range(classes)]
    return max(all_metrics(guess, labels, classes)[metric] for guess in guesses)


def standard_error(metric: str, answers: np.ndarray, labels: np.ndarray, classes: int | None) -> float | None:
    """Over samples of items; None for a single item."""
    if len(labels) < 2:
        return None
    if classes is None:
        rate = all_metrics(answers, labels, None)[metric] / 100
        return 100 * (1 - rate**2) / math.sqrt(len(labels) - 1)
    table = confusion_matrix(answers, labels, classes)
    if metric == "accuracy":
        return percentage_error(accuracy(table) / 100, len(labels))
    samples = np.random.default_rng(0).multinomial(len(labels), (table / table.sum()).ravel(), RESAMPLES)
    return float(np.std([OF_CLASSES[metric](each.reshape(table.shape)) for each in samples], ddof=1))


def layout_of(data_set: DataSet, path: Path) -> Files:
    """The layout whose files exist, by preference the one that has the given file."""
    folder = path.parent if path.is_file() else path
    complete, partial = [], []
    for files in data_set.files:
        missing = [name for name in (files.train, files.valid) if not (folder / name).is_file()]
        complete += [] if missing else [files]
        partial += [(files, missing[0])] if len(missing) == 1 else []
    if complete:
        return next((files for files in complete if path.is_file() and files.train == path.name), complete[0])
    if not partial:
        names = [f"{files.train} and {files.valid}" for files in data_set.files]
        raise BraidError(f"there is no data of {data_set.task} here", str(folder), f"It is {', or '.join(names)}.")
    files, absent = partial[0]
    present = files.train if absent == files.valid else files.valid
    what = f"{present} is here, and {absent} is not: {data_set.task} needs examples to learn from and examples to judge"
    todo = f"Put {absent} beside it, or give another folder with `--data {data_set.task}=FOLDER`."
    raise BraidError(what, str(folder), todo)


def read_examples(data_set: DataSet, path: Path, files: Files) -> Examples:
    """The examples of one file."""
    texts, labels = [], []
    (file,) = files_of(path)
    for row in json_rows(file) if path.suffix == ".jsonl" else table_rows(file, files.columns):
        row = replace(row, fields={data_set.other_fields.get(name, name): value for name, value in row.fields.items()})
        texts.append(_texts(data_set, row))
        labels.append(_label(data_set, row))
    if not texts:
        raise BraidError("there are no examples in this file", str(path))
    return Examples(texts, np.array(labels, dtype=np.float64 if data_set.labels is None else np.int64))


def _texts(data_set: DataSet, row: Row) -> tuple[str, str | None]:
    for name in data_set.text_fields:
        if not isinstance(row.value(name), str):
            raise row.error(f"'{name}' is to be a text, not {json.dumps(row.value(name))[:40]}")
    first, *second = (template.format_map(row.fields) for template in data_set.texts)
    if not "".join((first, *second)).strip():
        raise row.error("there is no text")
    return first, second[0] if second else None


def _label(data_set: DataSet, row: Row) -> float:
    value = row.value("label")
    shown = json.dumps(value)[:40]
    if data_set.labels is None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= MAX_LABEL:
            wanted = f"a number from 0 to {MAX_LABEL:g}, as those of {data_set.name} are"
            raise row.error(f"the label {shown} is not {wanted}")
        return number
    name = str(int(value)) if isinstance(value, bool) else str(value).strip()
    if isinstance(value, str) and name in data_set.labels:
        return data_set.labels.index(name)
    if name not in map(str, range(len(data_set.labels))):
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(data_set.labels))
        raise row.error(f"the label {shown} is none of those of {data_set.name}: {listed}")
    return int(name)
