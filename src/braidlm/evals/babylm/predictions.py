"""Predictions in the BabyLM 2025 pipeline's own files, so that its collation and its leaderboard accept them.

OUT/MODEL/main/zero_shot/causal/blimp/blimp_filtered/predictions.json        what the pipeline's `collate_preds` reads
OUT/MODEL/main/finetune/boolq/predictions.json
OUT/MODEL/chck_1M/zero_shot/causal/blimp/blimp_fast/predictions.json         of checkpoints the fast evaluation
OUT/MODEL/main/zero_shot/causal/AoA_word/surprisal.json
OUT/MODEL/main/braid.json, chck_1M/braid.json                                the model's hash; fast scores
OUT/MODEL/all_full_preds_and_fast_scores_causal.json                         what it writes, and what is submitted

A finished model and the checkpoints of its run are often evaluated separately: predictions of one evaluation are added
to those in the folder, if they are of the same model, and the file to submit is made from the folder. The pipeline's
files of EWoK hold the chosen sentences, so plain text of EWoK: they are written only with `ewok_text`.
"""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.reading import read_json
from braidlm.evals.babylm.conventions import AOA, FAST, FULL, GLUE
from braidlm.evals.formats.options import predictions_by_set
from braidlm.evals.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import expand
from braidlm.opening.names import words_in_name

PLAIN_TEXT_TASKS = ("ewok", "ewok_fast")
MAIN, BACKEND = "main", "causal"
COLLATED = f"all_full_preds_and_fast_scores_{BACKEND}.json"
OURS = "braid.json"
CHECKPOINTS = tuple(f"chck_{millions}M" for millions in (*range(1, 10), *range(10, 101, 10)))
"""The checkpoints that the strict-small track requires; the other tracks require more after them."""
PIPELINE = "591121d1758efc535237d8f320b298eada1040dc"
"""The revision of github.com/babylm/evaluation-pipeline-2025 whose collation these files are for."""
AOA_ROWS = 8005
"""The surprisals of each checkpoint that it requires; earlier revisions left out words with fewer than 20 contexts."""


@dataclass
class WrittenFiles:
    """The files that were written, and what a submission still lacks."""

    files: list[Path] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    """The benchmarks that are not in the collated file of each model."""

    @property
    def collated(self) -> list[Path]:
        """The files to submit, one for each model."""
        return [path for path in self.files if path.name == COLLATED]

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        # The first word of a sentence has no word before it, whose surprisal is NaN, as in the pipeline's files.
        write_text(path, json.dumps(facts))
        self.files.append(path)


def check_babylm_tasks(names: Sequence[str], all_checkpoints: bool) -> None:
    """Refuse, before anything is scored, an evaluation that has nothing for the leaderboard."""
    required = (*FAST, AOA) if all_checkpoints else (*FULL, *GLUE)
    if not any(name in required for name in expand(names)):
        suites = "babylm_fast and aoa" if all_checkpoints else "babylm_full and glue_babylm"
        kind = "the checkpoints of a run" if all_checkpoints else "a finished model"
        what = f"none of these tasks is for the BabyLM leaderboard: {', '.join(names) or 'there are none'}"
        raise BraidError(what, "--leaderboard", f"Of {kind} it wants {suites}.")


def write_babylm_results(
    evaluations: Evaluation | Sequence[Evaluation], out: Path | str, *, ewok_text: bool = False
) -> WrittenFiles:
    """Write predictions: a single model is the revision `main`, a run's checkpoints are revisions by their names.

    All predictions of one name go into one folder, also those of earlier evaluations.
    """
    written = WrittenFiles()
    folders: dict[str, Path] = {}
    all_evaluations = [evaluations] if isinstance(evaluations, Evaluation) else evaluations
    opened = [(evaluation, _opener(evaluation)) for evaluation in all_evaluations]
    for evaluation, data_of in opened:
        for model in evaluation.models:
            name = (model.run or model.name).replace("/", "-")
            folders[name] = Path(out) / name
            _write_model(data_of, model, folders[name], written, ewok_text)
    for evaluation, data_of in opened:  # after all models, whose outdated predictions have been deleted by now
        for run, results in evaluation.over_runs.items():
            if AOA not in results:
                continue
            checkpoints = evaluation.runs[run]
            count = len(checkpoints)
            about = {"model_name": run, "use_bos_only": False, "total_steps": count, "completed_steps": count}
            facts = {"metadata": about, "results": data_of(AOA).records(AOA, checkpoints)}
            written.write(zero_shot(folders[run.replace("/", "-")], MAIN) / "AoA_word" / "surprisal.json", facts)
    for name, folder in folders.items():
        collated = collate(folder)
        written.write(folder / COLLATED, collated)
        written.missing[name] = missing_entries(folder, collated)
    return written


def _opener(evaluation: Evaluation) -> Callable[[str], Any]:
    """Opens the data of an evaluation's tasks again, each once, where predictions need it."""

    @functools.cache
    def data_of(task: str) -> Any:
        path = evaluation.tasks[task]["data"]
        data = TASKS[task]().open(Path(path))
        if data.sha256 != evaluation.tasks[task]["sha256"]:
            raise BraidError("this data is not what was evaluated", str(path), "Evaluate again.")
        return data

    return data_of


def _write_model(
    data_of: Callable[[str], Any], model: ModelResults, folder: Path, written: WrittenFiles, ewok_text: bool
) -> None:
    revision = MAIN if model.run is None else Path(model.folder).name
    kinds = FULL if model.run is None else FAST
    record: dict[str, Any] = {"sha256": model.sha256, "fast_scores": {}}
    if (folder / revision / OURS).is_file():
        earlier = read_json(folder / revision / OURS)
        if earlier.get("sha256") == model.sha256:
            record = earlier
        else:  # its predictions are of another model
            shutil.rmtree(folder / revision)
    for task, result in model.tasks.items():
        zero_shot_task = task in kinds and (ewok_text or task not in PLAIN_TEXT_TASKS)
        fine_tuned = task in GLUE and model.run is None
        if (zero_shot_task or fine_tuned) and not result.items:
            todo = "Delete the folder `kept` of the evaluation and evaluate again."
            raise BraidError(f"the answers of '{task}' were not kept", todo=todo)
        if zero_shot_task:
            path = zero_shot(folder, revision) / kinds[task][1] / "predictions.json"
            written.write(path, data_of(task).predictions(result))
        elif fine_tuned:
            labels = [int(label) for label in result.items[GLUE[task]]]
            path = folder / revision / "finetune" / GLUE[task] / "predictions.json"
            written.write(path, predictions_by_set(labels, [GLUE[task]] * len(labels)))
        if model.run is not None and task in FAST:
            record["fast_scores"][FAST[task][0]] = _shares(task, result)
    written.write(folder / revision / OURS, record)


def _shares(task: str, result: TaskResult) -> dict[str, float]:
    """A checkpoint's scores as the pipeline collates them: shares, not percentages."""
    if task == "reading":
        return {"spr": result.parts["self_paced"].score / 100, "rt": result.parts["eye_tracking"].score / 100}
    scores = {name: part.score for name, part in result.parts.items()} or {task: result.score}
    return {name: score / 100 for name, score in scores.items()}


def zero_shot(folder: Path, revision: str) -> Path:
    """The pipeline's folder of predictions without fine-tuning."""
    return folder / revision / "zero_shot" / BACKEND


def collate(folder: Path) -> dict[str, Any]:
    """All predictions of one model in its folder, as `collate_preds` of the pipeline collects them.

    Only the scores of checkpoints are read from `braid.json`, where the pipeline computes them again.
    """
    main = zero_shot(folder, MAIN)
    paths = {key: main / subfolder / "predictions.json" for key, subfolder in FULL.values()}
    paths[AOA] = main / "AoA_word" / "surprisal.json"
    collated: dict[str, Any] = {key: read_json(path) for key, path in paths.items() if path.is_file()}
    collated["glue"] = {}
    for task in GLUE.values():
        path = folder / MAIN / "finetune" / task / "predictions.json"
        collated["glue"] |= read_json(path) if path.is_file() else {}
    collated["fast_eval_results"] = {}
    for key, shares in (item for scores in _checkpoints(folder).values() for item in scores.items()):
        collated["fast_eval_results"].setdefault(key, []).append(shares)
    return collated


def missing_entries(folder: Path, collated: dict[str, Any]) -> list[str]:
    """The tasks that the leaderboard requires for the strict-small track, and the folder does not have."""
    missing = [task for task, (key, _) in FULL.items() if key not in collated]
    surprisals = Counter(row["step"] for row in collated.get(AOA, {"results": []})["results"])
    missing += [] if surprisals == dict.fromkeys(CHECKPOINTS, AOA_ROWS) else [AOA]
    missing += [task for task, key in GLUE.items() if key not in collated["glue"]]
    keys = {key for key, _ in FAST.values()}
    complete = {name for name, scores in _checkpoints(folder).items() if keys <= set(scores)}
    return missing + [f"checkpoint {name}" for name in CHECKPOINTS if name not in complete]


def _checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """The fast scores of each checkpoint, in the order of training."""
    scores = {path.parent.name: read_json(path)["fast_scores"] for path in folder.glob(f"*/{OURS}")}
    ordered = sorted(scores, key=lambda name: (words_in_name(name) or 0, name))
    return {name: scores[name] for name in ordered if scores[name]}
