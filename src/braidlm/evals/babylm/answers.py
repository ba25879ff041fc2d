"""Answers in the BabyLM 2025 pipeline's own files, so that its collation, and its leaderboard, accept them.

OUT/MODEL/main/zero_shot/causal/blimp/blimp_filtered/predictions.json        what the pipeline's `collate_preds` reads
OUT/MODEL/main/finetune/boolq/predictions.json
OUT/MODEL/chck_1M/zero_shot/causal/blimp/blimp_fast/predictions.json         of checkpoints the fast evaluation
OUT/MODEL/main/zero_shot/causal/AoA_word/surprisal.json
OUT/MODEL/main/braid.json, chck_1M/braid.json                                whose answers these are; fast scores
OUT/MODEL/all_full_preds_and_fast_scores_causal.json                         what it writes, and people submit

A finished model and the checkpoints of its run are often evaluated apart. What one evaluation writes is added to what
lies there, if that is of the same model. The pipeline's files of EWoK hold the chosen sentences, so plain text of EWoK:
they are written only if you say so.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, write_text
from braidlm.evals.babylm.collation import AOA, COLLATED, FAST, FULL, GLUE, MAIN, OURS, collate, lacking, zero_shot
from braidlm.evals.reports.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.suites import expand
from braidlm.evals.tasks import TASKS, OpenTask

PLAIN_TEXT_STAYS_OUT = ("ewok", "ewok_fast")


@dataclass
class Written:
    """What was written, and what a submission still lacks."""

    files: list[Path] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    """By model: benchmarks that are not in its collated file."""

    @property
    def collated(self) -> list[Path]:
        """The files that people submit, one for each model."""
        return [path for path in self.files if path.name == COLLATED]


def check_babylm_tasks(names: Sequence[str], all_checkpoints: bool) -> None:
    """Refuse, before anything is scored, an evaluation that has nothing for the leaderboard."""
    wanted = (*FAST, AOA) if all_checkpoints else (*FULL, *GLUE)
    if not any(name in wanted for name in expand(names)):
        suites = "babylm_fast and aoa" if all_checkpoints else "babylm_full and glue_babylm"
        kind = "the checkpoints of a run" if all_checkpoints else "a finished model"
        raise BraidError(
            f"none of these tasks is for the BabyLM leaderboard: {', '.join(names) or 'there are none'}",
            "--leaderboard",
            f"Of {kind} it wants {suites}.",
        )


def write_babylm_results(
    found: Evaluation | Sequence[Evaluation], out: Path | str, *, ewok_text: bool = False
) -> Written:
    """Write the answers of evaluations: those of single models are `main`, those of a run's checkpoints its revisions.

    What has one name goes into one folder, be it of several evaluations or of earlier ones.
    """
    written = Written()
    names: list[str] = []
    opened = [(one, _Opened(one)) for one in ([found] if isinstance(found, Evaluation) else found)]
    for evaluation, data in opened:
        for model in evaluation.models:
            name = _file_name(model.run or model.name)
            names.append(name)
            _write_model(data, model, Path(out) / name, written, ewok_text)
    for evaluation, data in opened:  # after all models, whose older answers have given way by now
        for run, results in evaluation.over_runs.items():
            if AOA in results:
                record = _surprisals(data.of(AOA), run, evaluation.runs[run])
                place = zero_shot(Path(out) / _file_name(run), MAIN) / "AoA_word" / "surprisal.json"
                written.files.append(_write(place, record))
    for name in dict.fromkeys(names):
        collated = collate(Path(out) / name)
        written.files.append(_write(Path(out) / name / COLLATED, collated))
        written.missing[name] = lacking(Path(out) / name, collated)
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


def _write_model(opened: _Opened, model: ModelResults, folder: Path, written: Written, ewok_text: bool) -> None:
    revision = MAIN if model.run is None else Path(model.folder).name
    kinds = FULL if model.run is None else FAST
    known = _known(folder / revision, model.sha256)
    for task, result in model.tasks.items():
        if task in kinds and (ewok_text or task not in PLAIN_TEXT_STAYS_OUT):
            place = zero_shot(folder, revision) / kinds[task][1] / "predictions.json"
            written.files.append(_write(place, _answers(opened, task, result)))
        elif task in GLUE and model.run is None:
            labels = _items(result)[GLUE[task]]
            answers = {GLUE[task]: {"predictions": [_label(GLUE[task], at, x) for at, x in enumerate(labels)]}}
            written.files.append(_write(folder / revision / "finetune" / GLUE[task] / "predictions.json", answers))
        if model.run is not None and task in FAST:
            known["fast_scores"][FAST[task][0]] = _shares(task, result)
    written.files.append(_write(folder / revision / OURS, known))


def _known(folder: Path, sha256: str) -> dict[str, Any]:
    """What was noted for this model before; answers of another one give way."""
    if (folder / OURS).is_file():
        known = read_json(folder / OURS)
        if known.get("sha256") == sha256:
            return known
        shutil.rmtree(folder)
    return {"sha256": sha256, "fast_scores": {}}


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
