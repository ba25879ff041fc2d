"""Macro averages for tables: those of the BabyLM challenge, where what all of its evaluations have was evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from braidlm.evals.babylm.average import ONE_OF, READING
from braidlm.evals.reports.results import Evaluation
from braidlm.evals.suites import SUITES

SHARED = {*ONE_OF, *READING} - {"comps"}
"""Benchmarks that both the fast and the full evaluation have: an average without one of them is nobody's."""
GLUE = set(SUITES["glue_babylm"])
KINDS = {
    "challenge": ("BabyLM average", "the mean over the benchmarks, GLUE being one"),
    "challenge_with_aoa": ("BabyLM average with AoA", "the same with age of acquisition"),
    "by_column": ("BabyLM average by column", "the mean over the columns of the MoEP paper's Table 1"),
    "by_column_with_aoa": ("BabyLM average by column with AoA", "the same with age of acquisition"),
}


@dataclass(frozen=True)
class Average:
    """One kind of average, of all models that have it."""

    label: str
    note: str
    scores: dict[str, float]
    """By model."""


def averages(found: Evaluation) -> list[Average]:
    """Those that a table shows; what a model was not evaluated on is said, since it is not comparable with others."""
    whole = {name: facts for name, facts in found.averages.items() if set(facts["scores"]) >= SHARED}
    shown = []
    for kind, (label, note) in KINDS.items():
        scores = {name: facts[kind] for name, facts in whole.items() if facts[kind] is not None}
        if scores:
            shown.append(Average(label, note + _without(whole, kind), scores))
    return shown


def _without(averages: Mapping[str, Mapping[str, Any]], kind: str) -> str:
    missing = {name for facts in averages.values() for name in facts["missing"]}
    missing -= set() if kind.endswith("with_aoa") else {"aoa"}
    if missing >= GLUE:
        missing = {*(missing - GLUE), "GLUE"}
    return f"; without {', '.join(sorted(missing))}" if missing else ""
