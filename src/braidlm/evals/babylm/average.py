"""The macro average of a model over the BabyLM 2025 tasks, with and without age of acquisition.

Two ways are in use, and differ by several points:

- `challenge`: the mean over the benchmarks, as the pipeline's README defines it: "means across a row of the table",
  where GLUE is one benchmark, and eye tracking and self-paced reading are two.
- `by_column`: the mean over the columns of Table 1 of the MoEP paper, where BLiMP and its supplement are one, the two
  made-up word tasks are one, the two reading tasks are one, and every GLUE task is one. The rows of the
  challenge's baselines there come out to 0.05 without AoA; the paper's own rows, and its averages with AoA, do not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from braidlm.evals.reports.results import Evaluation, TaskResult
from braidlm.evals.suites import SUITES

ONE_OF = {
    "blimp": ("blimp_filtered", "blimp_fast"),
    "supplement": ("blimp_supplement", "supplement_fast"),
    "ewok": ("ewok", "ewok_fast"),
    "entity": ("entity_tracking", "entity_tracking_fast"),
    "wug_adj": ("wug_adj",),
    "wug_past": ("wug_past",),
    "comps": ("comps",),
}
"""The task of each benchmark; of full and fast the first that is there."""
READING = ("eye_tracking", "self_paced")
COLUMNS = {
    "BLiMP": ("blimp", "supplement"),
    "EWoK": ("ewok",),
    "Entity": ("entity",),
    "WUG": ("wug_adj", "wug_past"),
    "COMPS": ("comps",),
    "Reading": READING,
}
AOA = "aoa"


@dataclass(frozen=True)
class BabylmAverage:
    """One model's averages, in percent; None where nothing of it was evaluated."""

    challenge: float | None
    challenge_with_aoa: float | None
    by_column: float | None
    by_column_with_aoa: float | None
    scores: dict[str, float] = field(default_factory=dict)
    """Of each benchmark, GLUE's tasks by their own names."""
    missing: list[str] = field(default_factory=list)
    """Benchmarks that are not in the averages: one over fewer is not comparable."""


def babylm_average(results: Mapping[str, TaskResult], aoa: TaskResult | None = None) -> BabylmAverage:
    """From a model's results by task, and its run's age of acquisition, if that was measured."""
    scores = dict(_scores(results))
    glue = {name: _accuracy(results[name]) for name in SUITES["glue_babylm"] if name in results}
    row = [*scores.values(), *([sum(glue.values()) / len(glue)] if glue else [])]
    columns = [_mean([scores[name] for name in names if name in scores]) for names in COLUMNS.values()]
    table = [*(column for column in columns if column is not None), *glue.values()]
    extra = [] if aoa is None else [aoa.score]
    known = [*ONE_OF, *READING, *SUITES["glue_babylm"], AOA]
    found = {**scores, **glue, **({} if aoa is None else {AOA: aoa.score})}
    return BabylmAverage(
        challenge=_mean(row),
        challenge_with_aoa=_mean([*row, *extra]) if extra else None,
        by_column=_mean(table),
        by_column_with_aoa=_mean([*table, *extra]) if extra else None,
        scores=found,
        missing=[name for name in known if name not in found],
    )


def babylm_averages(found: Evaluation) -> dict[str, BabylmAverage]:
    """Of every model that was evaluated on BabyLM tasks, by its name."""
    ours = {name for names in ONE_OF.values() for name in names} | {"reading", *SUITES["glue_babylm"]}
    averages = {}
    for model in found.models:
        if len(ours & set(model.tasks)) > 1:
            runs = found.over_runs.get(model.run or "", {})
            averages[model.name] = babylm_average(model.tasks, runs.get(AOA))
    return averages


def facts_of(averages: Mapping[str, BabylmAverage]) -> dict[str, Any]:
    """Plain data, rounded for people."""
    return {
        name: {
            key: round(value, 2) if isinstance(value, float) else value
            for key, value in vars(one).items()
            if key != "scores"
        }
        | {"scores": {key: round(value, 2) for key, value in one.scores.items()}}
        for name, one in averages.items()
    }


def _scores(results: Mapping[str, TaskResult]) -> Iterator[tuple[str, float]]:
    for benchmark, tasks in ONE_OF.items():
        there = [task for task in tasks if task in results]
        if there:
            yield benchmark, results[there[0]].score
    if "reading" in results:
        yield from ((name, results["reading"].parts[name].score) for name in READING)


def _accuracy(result: TaskResult) -> float:
    """The challenge of 2025 counts accuracy for every GLUE task; other measures of ours stand in front of some."""
    return result.also.get("accuracy", result.score)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
