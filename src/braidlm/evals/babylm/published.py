"""Table 1 of the MoEP paper: the scores that models of the strict-small track have there, to stand beside others.

They were trained on the challenge's own corpus. BLiMP is the mean of BLiMP and its supplement, WUG that of both tasks
of made-up words, Reading that of eye tracking and self-paced reading; the tasks with fine-tuning are accuracies. Age of
acquisition is left out: only some rows have it.
"""

from collections.abc import Iterable, Mapping

COLUMNS = (
    "BLiMP",
    "EWoK",
    "Entity",
    "WUG",
    "COMPS",
    "Reading",
    "BoolQ",
    "MNLI",
    "MRPC",
    "MultiRC",
    "QQP",
    "RTE",
    "WSC",
)
ROWS = {
    "GPT-2 28M (MoEP)": (59.70, 57.85, 13.15, 36.00, 51.20, 6.40, 67.50, 49.10, 69.60, 66.70, 71.55, 62.60, 63.45),
    "MoEP": (59.15, 50.20, 35.65, 33.00, 50.70, 6.70, 66.20, 48.10, 70.10, 64.50, 70.75, 62.60, 67.30),
    "MoEP-SwiGLU": (60.35, 49.50, 17.10, 36.50, 51.35, 6.60, 66.30, 48.30, 70.60, 67.25, 69.40, 54.70, 61.55),
    "GPT-2 (BabyLM)": (61.75, 49.90, 13.90, 30.55, 51.70, 6.50, 52.10, 33.10, 67.60, 57.50, 63.60, 56.10, 61.50),
    "GPT-BERT causal": (67.45, 49.50, 34.60, 36.05, 52.80, 6.70, 68.10, 46.90, 74.50, 68.30, 76.70, 56.10, 65.40),
    "GPT-BERT focus-causal": (62.35, 49.50, 31.10, 32.70, 52.90, 6.50, 67.60, 51.80, 78.90, 67.40, 77.40, 57.60, 61.50),
    "GPT-BERT mixed-causal": (65.60, 50.20, 25.40, 48.50, 25.00, 6.40, 66.70, 53.30, 77.50, 67.00, 76.60, 55.40, 63.50),
}
GLUE_COLUMNS = {
    "superglue_boolq": "BoolQ",
    "glue_mnli": "MNLI",
    "glue_mrpc": "MRPC",
    "superglue_multirc": "MultiRC",
    "glue_qqp": "QQP",
    "glue_rte": "RTE",
    "superglue_wsc": "WSC",
}
"""The column of each task with fine-tuning."""


def published_rows(columns: Iterable[str]) -> dict[str, dict[str, float]]:
    """The rows of the table, of these columns alone."""
    wanted = [column for column in COLUMNS if column in set(columns)]
    return {name: {one: dict(zip(COLUMNS, row, strict=True))[one] for one in wanted} for name, row in ROWS.items()}


def column_mean(row: Mapping[str, float]) -> float:
    """The macro average of a row: every column counts once."""
    return sum(row.values()) / len(row)
