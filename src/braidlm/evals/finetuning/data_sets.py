"""The labelled data sets: their texts, labels, metrics and files.

Texts are composed as in the BabyLM pipeline of 2025 (`evaluation_pipeline/finetune/dataset.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter

from braidlm.evals.babylm.conventions import babylm_locations
from braidlm.evals.finetuning.metrics import CORRELATION

BABYLM_FOLDERS = (*babylm_locations("full_eval/glue_filtered")[:-1], "glue-2024/glue_filtered", "glue_filtered")
NO_YES = ("no", "yes")
ENTAILMENT = ("entailment", "not_entailment")
LABEL_RANGE = (0.0, 5.0)
"""The range of labels that are numbers."""


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
    """One data set."""

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
    """Of other layouts than the BabyLM challenge's."""
    other_folders: tuple[str, ...] = ()
    other_fields: Mapping[str, str] = field(default_factory=dict)
    """Names that a field has in other layouts."""

    @property
    def licence(self) -> str:
        """Neither collection has its own; both refer to those of the original data sets."""
        site = "gluebenchmark.com" if self.task.startswith("glue_") else "super.gluebenchmark.com"
        return f"that of the original data set (see {site}/faq)"

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


DATA_SETS = (
    DataSet(
        "glue_cola",
        "CoLA: is a sentence acceptable English?",
        "8,551 sentences to learn from, 522 (filtered) or 527 to judge",
        texts=("{sentence}",),
        labels=("unacceptable", "acceptable"),
        metric="Matthews",
        other_files=(
            Files("in_domain_train.tsv", "in_domain_dev.tsv", ("", "label", "", "sentence")),
            Files("train.tsv", "dev.tsv", ("", "label", "", "sentence")),
        ),
        other_folders=("glue-extra/cola", "cola_public/raw", "CoLA", "glue/CoLA"),
    ),
    DataSet(
        "glue_sst2",
        "SST-2: is a sentence of a film review positive?",
        "6,920 sentences (67,349 with phrases) to learn from, 872 to judge",
        texts=("{sentence}",),
        labels=("negative", "positive"),
        other_files=(Files("train.tsv", "dev.tsv", ("sentence", "label")),),
        other_folders=("glue-extra/sst2", "SST-2", "glue/SST-2"),
    ),
    DataSet(
        "glue_mrpc",
        "MRPC: do two sentences from the news say the same?",
        "3,668 pairs to learn from, 204 (filtered) to judge",
        texts=("{sentence1}", "{sentence2}"),
        labels=("different", "equivalent"),
        metric="F1",
        other_folders=("MRPC", "glue/MRPC"),
        other_fields={"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    ),
    DataSet(
        "glue_stsb",
        "STS-B: how alike in meaning are two sentences, from 0 to 5?",
        "5,749 pairs to learn from, 1,500 to judge",
        texts=("{sentence1}", "{sentence2}"),
        labels=None,
        metric=CORRELATION,
        other_files=(Files("stsb-en-train.csv", "stsb-en-dev.csv", ("sentence1", "sentence2", "label")), TSV),
        other_folders=("glue-extra/stsb", "STS-B", "glue/STS-B"),
        other_fields={"score": "label"},
    ),
    DataSet(
        "glue_qqp",
        "QQP: do two questions ask the same?",
        "10,000 pairs (BabyLM's choice) to learn from, 20,215 (filtered) to judge",
        texts=("{question1}", "{question2}"),
        labels=("different", "duplicate"),
        metric="F1",
        other_folders=("QQP", "glue/QQP"),
        other_fields={"is_duplicate": "label"},
    ),
    DataSet(
        "glue_mnli",
        "MNLI: does one sentence follow from another, or contradict it?",
        "10,000 pairs (BabyLM's choice) to learn from, 4,908 (filtered) to judge",
        texts=("{premise}", "{hypothesis}"),
        labels=("entailment", "neutral", "contradiction"),
        other_files=(Files("train.tsv", "dev_matched.tsv"),),
        other_folders=("MNLI", "glue/MNLI"),
        other_fields={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
    ),
    DataSet(
        "glue_qnli",
        "QNLI: does a sentence answer a question?",
        "104,743 pairs to learn from, 2,732 (filtered) or 5,463 to judge",
        texts=("{question}", "{sentence}"),
        labels=ENTAILMENT,
        other_folders=("glue-extra/qnli", "QNLI", "glue/QNLI"),
    ),
    DataSet(
        "glue_rte",
        "RTE: does one sentence follow from another?",
        "2,490 pairs to learn from, 139 (filtered) to judge",
        texts=("{sentence1}", "{sentence2}"),
        labels=ENTAILMENT,
        other_folders=("RTE", "glue/RTE"),
    ),
    DataSet(
        "superglue_boolq",
        "BoolQ: what does a passage answer to a yes/no question?",
        "9,427 questions to learn from, 1,635 (filtered) to judge",
        texts=("{question}", "{passage}"),
        labels=NO_YES,
        other_files=(Files("train.jsonl", "val.jsonl"),),
        other_folders=("BoolQ", "superglue/BoolQ"),
    ),
    DataSet(
        "superglue_wsc",
        "WSC: whom does a pronoun mean?",
        "554 questions to learn from, 52 (filtered) to judge",
        texts=('Does "{span2_text}" refer to "{span1_text}" in this passage?', "{text}"),
        labels=NO_YES,
        other_files=(),
    ),
    DataSet(
        "superglue_multirc",
        "MultiRC: is an answer to a question about a paragraph right?",
        "27,243 answers to learn from, 2,424 (filtered) to judge",
        texts=("Question: {question} Answer: {answer}", "{paragraph}"),
        labels=NO_YES,
        other_files=(),
    ),
)
