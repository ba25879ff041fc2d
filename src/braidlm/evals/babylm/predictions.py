"""Predictions in the BabyLM 2025 pipeline's own files, so that its collation and its leaderboard accept them.

OUT/MODEL/main/zero_shot/causal/blimp/blimp_filtered/predictions.json        what the pipeline's `collate_preds` reads
OUT/MODEL/main/finetune/boolq/predictions.json
OUT/MODEL/chck_1M/zero_shot/causal/blimp/blimp_fast/predictions.json         of checkpoints the fast evaluation
OUT/MODEL/main/zero_shot/causal/AoA_word/surprisal.json
OUT/MODEL/main/braid.json, chck_1M/braid.json                                the model's hash; fast scores
OUT/MODEL/all_full_preds_and_fast_scores_causal.json                         what it writes, and what is submitted

A finished model and the checkpoints of its run are often evaluated separately. Predictions of one evaluation are added
to those in the folder, if they are of the same model. The pipeline's files of EWoK hold the chosen sentences, so plain
text of EWoK: they are written only with `ewok_text`.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.reading import read_json
from braidlm.evals.babylm.collation import COLLATED, MAIN, OURS, collate, missing_entries, zero_shot
from braidlm.evals.babylm.conventions import AOA, FAST, FULL, GLUE
from braidlm.evals.formats.ranked_options import predictions_by_set
from braidlm.evals.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.suites import expand
from braidlm.evals.tasks import TASKS, OpenTask

PLAIN_TEXT_TASKS = ("ewok", "ewok_fast")


@dataclass
class WrittenFiles:
    """The files that were written, and what a submission still lacks."""

    files: list[Path] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    """By model: benchmarks that are not in its collated file."""

    @property
    def collated(self) -> list[Path]:
        """The files to submit, one for each model."""
        return [path for path in self.files if path.name == COLLATED]


def check_babylm_tasks(names: Sequence[str], all_checkpoints: bool) -> None:
    """Refuse, before anything is scored, an evaluation that has nothing for the leaderboard."""
    required = (*FAST, AOA) if all_checkpoints else (*FULL, *GLUE)
    if not any(name in required for name in expand(names)):
        suites = "babylm_fast and aoa" if all_checkpoints else "babylm_full and glue_babylm"
        kind = "the checkpoints of a run" if all_checkpoints else "a finished model"
        raise BraidError(
            f"none of these tasks is for the BabyLM leaderboard: {', '.join(names) or 'there are none'}",
            "--leaderboard",
            f"Of {kind} it wants {suites}.",
        )


def write_babylm_results(
    evaluations: Evaluation | Sequence[Evaluation], out: Path | str, *, ewok_text: bool = False
) -> WrittenFiles:
    """Write predictions: those of single models are `main`, those of a run's checkpoints its revisions.

    All predictions of one name go into one folder, also those of earlier evaluations.
    """
    written = WrittenFiles()
    names: list[str] = []
    all_evaluations = [evaluations] if isinstance(evaluations, Evaluation) else evaluations
    opened = [(evaluation, _TaskData(evaluation)) for evaluation in all_evaluations]
    for evaluation, data in opened:
        for model in evaluation.models:
            name = _file_name(model.run or model.name)
            names.append(name)
            _write_model(data, model, Path(out) / name, written, ewok_text)
    for evaluation, data in opened:  # after all models, whose outdated predictions have been deleted by now
        for run, results in evaluation.over_runs.items():
            if AOA in results:
                record = _surprisals(data.of(AOA), run, evaluation.runs[run])
                path = zero_shot(Path(out) / _file_name(run), MAIN) / "AoA_word" / "surprisal.json"
                written.files.append(_write(path, record))
    for name in dict.fromkeys(names):
        collated = collate(Path(out) / name)
        written.files.append(_write(Path(out) / name / COLLATED, collated))
        written.missing[name] = missing_entries(Path(out) / name, collated)
    return written


class _TaskData:
    """The data of an evaluation's tasks, opened again where predictions need it."""

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


def _write_model(opened: _TaskData, model: ModelResults, folder: Path, written: WrittenFiles, ewok_text: bool) -> None:
    revision = MAIN if model.run is None else Path(model.folder).name
    kinds = FULL if model.run is None else FAST
    record = _record(folder / revision, model.sha256)
    for task, result in model.tasks.items():
        if task in kinds and (ewok_text or task not in PLAIN_TEXT_TASKS):
            path = zero_shot(folder, revision) / kinds[task][1] / "predictions.json"
            _check_items(result)
            written.files.append(_write(path, opened.of(task).predictions(result)))
        elif task in GLUE and model.run is None:
            _check_items(result)
            labels = [int(label) for label in result.items[GLUE[task]]]
            path = folder / revision / "finetune" / GLUE[task] / "predictions.json"
            written.files.append(_write(path, predictions_by_set(labels, [GLUE[task]] * len(labels))))
        if model.run is not None and task in FAST:
            record["fast_scores"][FAST[task][0]] = _shares(task, result)
    written.files.append(_write(folder / revision / OURS, record))


def _record(folder: Path, sha256: str) -> dict[str, Any]:
    """The record of this model in the folder; predictions of another model are deleted."""
    if (folder / OURS).is_file():
        record = read_json(folder / OURS)
        if record.get("sha256") == sha256:
            return record
        shutil.rmtree(folder)
    return {"sha256": sha256, "fast_scores": {}}


def _check_items(result: TaskResult) -> None:
    if not result.items:
        raise BraidError(
            f"the answers of '{result.task}' were not kept",
            todo="Delete the folder `kept` of the evaluation and evaluate again.",
        )


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
    # The first word of a sentence has no word before it, whose surprisal is NaN, as in the pipeline's files.
    write_text(path, json.dumps(facts))
    return path


def _file_name(name: str) -> str:
    return name.replace("/", "-")
