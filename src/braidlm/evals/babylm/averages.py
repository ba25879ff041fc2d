"""Macro averages over the BabyLM 2025 tasks, with and without age of acquisition.

Two definitions are in use, and differ by several points:

- `challenge`: the mean over the benchmarks, as the pipeline's README defines it: "means across a row of the table",
  where GLUE is one benchmark, and eye tracking and self-paced reading are two.
- `by_column`: the mean over the columns of Table 1 of the MoEP paper, where BLiMP and its supplement are one, the two
  made-up word tasks are one, the two reading tasks are one, and every GLUE task is one. The rows of the
  challenge's baselines there come out to 0.05 without AoA; the paper's own rows, and its averages with AoA, do not.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from braidlm.evals.babylm.conventions import AOA, GLUE
from braidlm.evals.results import Evaluation, TaskResult

ONE_OF = {
    "blimp": ("blimp_filtered", "blimp_fast"),
    "supplement": ("blimp_supplement", "supplement_fast"),
    "ewok": ("ewok", "ewok_fast"),
    "entity": ("entity_tracking", "entity_tracking_fast"),
    "wug_adj": ("wug_adj",),
    "wug_past": ("wug_past",),
    "comps": ("comps",),
}
"""The task of each benchmark; of full and fast the first that was evaluated."""
READING = ("eye_tracking", "self_paced")
COLUMNS = {
    "BLiMP": ("blimp", "supplement"),
    "EWoK": ("ewok",),
    "Entity": ("entity",),
    "WUG": ("wug_adj", "wug_past"),
    "COMPS": ("comps",),
    "Reading": READING,
}
GLUE_COLUMNS = dict(zip(GLUE, ("BoolQ", "MNLI", "MRPC", "MultiRC", "QQP", "RTE", "WSC"), strict=True))
"""The column of each task with fine-tuning."""
PUBLISHED = (*COLUMNS, *GLUE_COLUMNS.values())
ROWS = {
    "GPT-2 28M (MoEP)": (59.70, 57.85, 13.15, 36.00, 51.20, 6.40, 67.50, 49.10, 69.60, 66.70, 71.55, 62.60, 63.45),
    "MoEP": (59.15, 50.20, 35.65, 33.00, 50.70, 6.70, 66.20, 48.10, 70.10, 64.50, 70.75, 62.60, 67.30),
    "MoEP-SwiGLU": (60.35, 49.50, 17.10, 36.50, 51.35, 6.60, 66.30, 48.30, 70.60, 67.25, 69.40, 54.70, 61.55),
    "GPT-2 (BabyLM)": (61.75, 49.90, 13.90, 30.55, 51.70, 6.50, 52.10, 33.10, 67.60, 57.50, 63.60, 56.10, 61.50),
    "GPT-BERT causal": (67.45, 49.50, 34.60, 36.05, 52.80, 6.70, 68.10, 46.90, 74.50, 68.30, 76.70, 56.10, 65.40),
    "GPT-BERT focus-causal": (62.35, 49.50, 31.10, 32.70, 52.90, 6.50, 67.60, 51.80, 78.90, 67.40, 77.40, 57.60, 61.50),
    "GPT-BERT mixed-causal": (65.60, 50.20, 25.40, 48.50, 25.00, 6.40, 66.70, 53.30, 77.50, 67.00, 76.60, 55.40, 63.50),
}
"""Table 1 of the MoEP paper: the scores of models of the strict-small track, to stand beside others.

They were trained on the challenge's own corpus. The tasks with fine-tuning are accuracies. Age of acquisition is left
out: only some rows have it."""
SHARED = {*ONE_OF, *READING} - {"comps"}
"""Benchmarks of both the fast and the full evaluation: a table shows no average without one of them."""
KINDS = {
    "challenge": ("BabyLM average", "the mean over the benchmarks, GLUE being one"),
    "challenge_with_aoa": ("BabyLM average with AoA", "the same with age of acquisition"),
    "by_column": ("BabyLM average by column", "the mean over the columns of the MoEP paper's Table 1"),
    "by_column_with_aoa": ("BabyLM average by column with AoA", "the same with age of acquisition"),
}


def babylm_average(results: Mapping[str, TaskResult], aoa: TaskResult | None = None) -> dict[str, Any]:
    """The averages of a model's results by task, and of its run's age of acquisition, if that was measured.

    In percent, rounded to two decimals, by the names of `KINDS`; None where none of the tasks was evaluated. Beside
    them: `scores` of each benchmark (GLUE's tasks by their own names), `columns` of the MoEP paper's Table 1, and the
    benchmarks that are `missing`, without which averages are not comparable.
    """
    evaluated = {benchmark: [task for task in tasks if task in results] for benchmark, tasks in ONE_OF.items()}
    scores = {benchmark: results[tasks[0]].score for benchmark, tasks in evaluated.items() if tasks}
    if "reading" in results:
        scores |= {name: results["reading"].parts[name].score for name in READING}
    # The challenge of 2025 counts accuracy for every GLUE task; the score of some of our tasks is another metric.
    glue = {name: results[name].also.get("accuracy", results[name].score) for name in GLUE if name in results}
    row = [*scores.values(), *([sum(glue.values()) / len(glue)] if glue else [])]
    # Half of a column is not comparable with the whole.
    complete = {column: names for column, names in COLUMNS.items() if all(name in scores for name in names)}
    columns = {column: sum(scores[name] for name in names) / len(names) for column, names in complete.items()}
    columns |= {GLUE_COLUMNS[name]: score for name, score in glue.items()}
    table = list(columns.values())
    extra = {} if aoa is None else {AOA: aoa.score}
    all_scores = {**scores, **glue, **extra}
    return {
        "challenge": _mean(row),
        "challenge_with_aoa": _mean([*row, *extra.values()]) if extra else None,
        "by_column": _mean(table),
        "by_column_with_aoa": _mean([*table, *extra.values()]) if extra else None,
        "scores": {name: round(score, 2) for name, score in all_scores.items()},
        "columns": {name: round(score, 2) for name, score in columns.items()},
        "missing": [name for name in (*ONE_OF, *READING, *GLUE, AOA) if name not in all_scores],
    }


def babylm_averages(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """The averages of every model that was evaluated on several BabyLM tasks."""
    tasks = {name for names in ONE_OF.values() for name in names} | {"reading", *GLUE}
    models = [model for model in evaluation.models if len(tasks & set(model.tasks)) > 1]
    aoa = {run: results.get(AOA) for run, results in evaluation.over_runs.items()}
    return {model.name: babylm_average(model.tasks, aoa.get(model.run or "")) for model in models}


def averages(evaluation: Evaluation) -> list[tuple[str, str, dict[str, float]]]:
    """The averages that a table shows: label, note and the score of each model that has it; the note names missing
    benchmarks, without which they are not comparable."""
    complete = {name: facts for name, facts in evaluation.averages.items() if set(facts["scores"]) >= SHARED}
    shown = []
    for kind, (label, note) in KINDS.items():
        scores = {name: facts[kind] for name, facts in complete.items() if facts[kind] is not None}
        if scores:
            missing = {name for facts in complete.values() for name in facts["missing"]}
            missing -= set() if kind.endswith("with_aoa") else {AOA}
            if missing >= set(GLUE):
                missing = {*(missing - set(GLUE)), "GLUE"}
            without = f"; without {', '.join(sorted(missing))}" if missing else ""
            shown.append((label, note + without, scores))
    return shown


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def published_rows(columns: Iterable[str]) -> dict[str, dict[str, float]]:
    """The rows of the paper's table, of these columns alone."""
    wanted = [column for column in PUBLISHED if column in set(columns)]
    return {name: {one: dict(zip(PUBLISHED, row, strict=True))[one] for one in wanted} for name, row in ROWS.items()}
