"""Answers in the BabyLM 2025 pipeline's own files, so that its collation, and its leaderboard, accept them.

OUT/MODEL/main/zero_shot/causal/blimp/blimp_filtered/predictions.json        what the pipeline's `collate_preds` reads
OUT/MODEL/main/finetune/boolq/predictions.json
OUT/MODEL/chck_1M/zero_shot/causal/blimp/blimp_fast/predictions.json         of checkpoints the fast evaluation
OUT/MODEL/main/zero_shot/causal/AoA_word/surprisal.json
OUT/MODEL/all_full_preds_and_fast_scores_causal.json                         what it writes, and people submit

The pipeline's files of EWoK hold the chosen sentences, so plain text of EWoK: they are written only if you say so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.evals.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.suites import SUITES
from braidlm.evals.tasks import TASKS, OpenTask

FULL = {
    "blimp_filtered": ("blimp", "blimp/blimp_filtered"),
    "blimp_supplement": ("blimp_supplement", "blimp/supplement_filtered"),
    "ewok": ("ewok", "ewok/ewok_filtered"),
    "entity_tracking": ("entity_tracking", "entity_tracking/entity_tracking"),
    "wug_adj": ("wug_adj", "wug_adj/wug_adj_nominalization"),
    "wug_past": ("wug_past", "wug_past/wug_past_tense"),
    "comps": ("comps", "comps/comps"),
    "reading": ("reading", "reading"),
}
"""For each of our tasks the pipeline's name in the collated file, and its folder."""
FAST = {
    "blimp_fast": ("blimp", "blimp/blimp_fast"),
    "supplement_fast": ("blimp_supplement", "blimp/supplement_fast"),
    "ewok_fast": ("ewok", "ewok/ewok_fast"),
    "entity_tracking_fast": ("entity_tracking", "entity_tracking/entity_tracking_fast"),
    **{name: FULL[name] for name in ("wug_adj", "wug_past", "reading")},
}
GLUE = {name: name.partition("_")[2] for name in SUITES["glue_babylm"]}
AOA = "aoa"
MAIN, BACKEND = "main", "causal"
COLLATED = f"all_full_preds_and_fast_scores_{BACKEND}.json"
PLAIN_TEXT_STAYS_OUT = ("ewok", "ewok_fast")


@dataclass
class Written:
    """What was written, and what a submission still lacks."""

    files: list[Path] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    """By model: benchmarks that are not in its collated file."""


def write_babylm_results(
    found: Evaluation | Sequence[Evaluation], out: Path | str, *, ewok_text: bool = False
) -> Written:
    """Write the answers of evaluations: those of single models are `main`, those of a run's checkpoints its revisions.

    A finished model and its run are often evaluated apart; give both, and what has one name goes into one folder.
    """
    written = Written()
    collected: dict[str, dict[str, Any]] = {}
    for evaluation in [found] if isinstance(found, Evaluation) else found:
        opened = _Opened(evaluation)
        for model in evaluation.models:
            name = _file_name(model.run or model.name)
            collated = collected.setdefault(name, {"glue": {}, "fast_eval_results": {}})
            _write_model(opened, model, Path(out) / name, collated, written, ewok_text)
        for run, results in evaluation.over_runs.items():
            if AOA in results:
                record = _surprisals(opened.of(AOA), run, evaluation.runs[run])
                collected[_file_name(run)][AOA] = record
                path = Path(out) / _file_name(run) / MAIN / "zero_shot" / BACKEND / "AoA_word" / "surprisal.json"
                written.files.append(_write(path, record))
    for name, collated in collected.items():
        written.files.append(_write(Path(out) / name / COLLATED, collated))
        keys = [key for key, _ in FULL.values()]
        there = [*collated, *(f"glue {task}" for task in collated["glue"])]
        glue = [f"glue {task}" for task in GLUE.values()]
        written.missing[name] = [key for key in [*keys, AOA, *glue] if key not in there]
    return written


class _Opened:
    """The data of an evaluation's tasks, opened again where answers have to be written out."""

    def __init__(self, evaluation: Evaluation):
        self.facts = evaluation.tasks
        self._open: dict[str, OpenTask] = {}

    def of(self, task: str) -> Any:
        if task not in self._open:
            data = TASKS[task]().open(Path(self.facts[task]["data"]))
            if data.sha256 != self.facts[task]["sha256"]:
                raise BraidError(
                    "this data is not what was evaluated", str(self.facts[task]["data"]), "Evaluate again."
                )
            self._open[task] = data
        return self._open[task]


def _write_model(
    opened: _Opened, model: ModelResults, folder: Path, collated: dict[str, Any], written: Written, ewok_text: bool
) -> None:
    revision = MAIN if model.run is None else Path(model.folder).name
    kinds = FULL if model.run is None else FAST
    for task, result in model.tasks.items():
        if task in kinds and (ewok_text or task not in PLAIN_TEXT_STAYS_OUT):
            key, place = kinds[task]
            answers = _answers(opened, task, result)
            path = folder / revision / "zero_shot" / BACKEND / place / "predictions.json"
            written.files.append(_write(path, answers))
            if model.run is None:
                collated[key] = answers
        elif task in GLUE and model.run is None:
            labels = _items(result)[GLUE[task]]
            answers = {GLUE[task]: {"predictions": [_label(GLUE[task], at, x) for at, x in enumerate(labels)]}}
            written.files.append(_write(folder / revision / "finetune" / GLUE[task] / "predictions.json", answers))
            collated["glue"] |= answers
        if model.run is not None and task in FAST:
            scores = collated["fast_eval_results"].setdefault(FAST[task][0], [])
            scores.append(_shares(task, result))


def _answers(opened: _Opened, task: str, result: TaskResult) -> dict[str, Any]:
    _items(result)
    return opened.of(task).predictions(result)


def _items(result: TaskResult) -> dict[str, list[Any]]:
    if not result.items:
        raise BraidError(
            f"the answers of '{result.task}' were not kept",
            todo="Delete the folder `kept` of the evaluation and evaluate again.",
        )
    return result.items


def _label(task: str, index: int, label: Any) -> dict[str, Any]:
    return {"id": f"{task}_{index}", "pred": int(label)}


def _shares(task: str, result: TaskResult) -> dict[str, float]:
    """A checkpoint's scores as the pipeline collates them: shares, not percentages."""
    if task == "reading":
        return {"spr": result.parts["self_paced"].score / 100, "rt": result.parts["eye_tracking"].score / 100}
    if not result.parts:
        return {task: result.score / 100}
    return {name: part.score / 100 for name, part in result.parts.items()}


def _surprisals(data: Any, run: str, checkpoints: Sequence[ModelResults]) -> dict[str, Any]:
    count = len(checkpoints)
    about = {"model_name": run, "use_bos_only": False, "total_steps": count, "completed_steps": count}
    return {"metadata": about, "results": data.records(AOA, checkpoints)}


def _write(path: Path, facts: Mapping[str, Any]) -> Path:
    # Without a word before it a word has no surprisal of that: NaN, as the pipeline writes and reads it.
    write_text(path, json.dumps(facts))
    return path


def _file_name(name: str) -> str:
    return name.replace("/", "-")
