"""Measuring the models of a study: bits per byte per domain, tasks, and the routes of tokens."""

import contextlib
import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from braidlm.core import console
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.files import make_folder, write_json
from braidlm.core.jobs import Jobs
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import load_model
from braidlm.core.models.integrity import model_hash
from braidlm.core.reading import read_json
from braidlm.data.loading.halves import Half
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.validation import ValidationSet, validation_windows
from braidlm.evals.evaluate import evaluate
from braidlm.inspection.layers import find_layers
from braidlm.inspection.results import RoutingReport
from braidlm.inspection.routes import routes
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import path_names, switch_off_modules, use_paths
from braidlm.studies.decoding import TrainedModel
from braidlm.studies.results import Bits, ModelResult, StudyResults, read_run
from braidlm.studies.running import SCORES
from braidlm.studies.study import Study
from braidlm.training.monitoring.reporter import score_text
from braidlm.training.trainable import TrainableBraid

ROUTES = "routes"
"""The folder of the routing report in the folder of a study."""
Texts = dict[str, ValidationSet]
"""Held-out text, by domain."""


def measure(
    study: Study, models: list[TrainedModel], device: str | None = None, jobs: Jobs | None = None
) -> StudyResults:
    """Score every model on the held-out documents of every domain, in float32."""
    jobs = jobs or Jobs()
    scorer = Scorer(study, device)
    measured = [jobs.start(f"scores of {model.name}, seed {model.seed}", scorer.score, model) for model in models]
    results = StudyResults(study, jobs.results(measured))
    if (tasks := study.tasks) is not None:
        folders = {f"{model.name}, seed {model.seed}": model.folder for model in results.models}
        out, device_name = study.folder / "tasks", device or "auto"
        evaluation = evaluate(
            folders, tasks.names, data=tasks.data, settings=tasks.settings, out=out, device=device_name
        )
        for scored, model in zip(evaluation.models, results.models, strict=True):
            model.tasks = {name: result.score for name, result in scored.tasks.items()}
            errors = {name: result.standard_error for name, result in scored.tasks.items()}
            model.task_errors = {name: error for name, error in errors.items() if error is not None}
            chances = {name: result.chance for name, result in scored.tasks.items()}
            results.chance = {name: chance for name, chance in chances.items() if chance is not None}
            model.babylm = evaluation.averages.get(scored.name, {}).get("columns", {})
    return results


@dataclass
class Scorer:
    """Scores models of a study, each once: what a model costs and reaches is kept in the study's folder, so that it
    outlives a study that was stopped."""

    study: Study
    device: str | None

    @cached_property
    def texts(self) -> dict[str, Texts]:
        """Held-out text, by how much of it: what the study validates on (`all`), and both halves if that is a half."""
        own = self.study.validation.half
        halves: tuple[Half, ...] = () if own is None else get_args(Half)
        with console.silence():  # all of it is prepared
            return {"all": self._texts(own)} | {half: self._texts(half) for half in halves}

    def _texts(self, half: Half | None) -> Texts:
        streams, study = open_data(self.study.data_config, half).validation, self.study
        return {one.name: validation_windows(one, study.data.length, study.validation.tokens) for one in streams}

    @cached_property
    def _read(self) -> dict[str, dict[str, str]]:
        """What changes where another text is scored, or in other rows, wherever its files lie."""
        return {half: {name: _sha256(text) for name, text in texts.items()} for half, texts in self.texts.items()}

    def score(self, trained: TrainedModel) -> ModelResult:
        """What is known of a model, which is scored unless it was."""
        spent = ("tokens", "words", "seconds", "wall_seconds")
        if trained.run is None:
            own = ModelResult(name=trained.name, folder=trained.model)
        else:
            own = replace(read_run(trained.name, trained.run.folder), trainable=trained.run.trainable)
        members = [part.run for part in trained.parts if part.run is not None] if trained.kind == "average" else []
        trainings = [read_run("", run.folder) for run in members] or [own]
        return replace(
            own,
            kind=trained.kind,
            seed=trained.seed,
            folder=trained.model,
            **{key: sum(getattr(one, key) for one in trainings) for key in spent},
            **self._kept(trained),
        )

    def _kept(self, trained: TrainedModel) -> dict[str, Any]:
        file = self.study.folder / SCORES / f"{trained.name}-seed-{trained.seed}.json"
        silenced = [part.name for part in trained.parts] if trained.kind == "composed" else []
        scored = {"model": model_hash(trained.model), "texts": self._read, "silenced": silenced}
        with contextlib.suppress(BraidError, FileNotFoundError):  # what is damaged is scored again
            if (kept := read_json(file)).get("scored") == scored:
                return kept["found"]
        found = self._measured(trained.model, silenced)
        make_folder(file.parent)
        write_json(file, {"name": trained.name, "seed": trained.seed, "scored": scored, "found": found})
        return found

    def _measured(self, folder: Path, names: list[str]) -> dict[str, Any]:
        """What a model costs and its bits per byte, also when one of the paths of these names is inactive."""
        model = load_model(folder, choose_device(self.device or "auto"))
        texts, silenced = self.texts["all"], {}
        for inactive in names:
            if path_names(model):
                use_paths(model, [name for name in names if name != inactive])
            else:
                switch_off_modules(model, [f"{inactive}_[0-9]*"])
            silenced[inactive] = _scores(model, texts)
        if names:
            use_paths(model, None)
            switch_off_modules(model, ())
        bits = {half: _scores(model, each) for half, each in self.texts.items()}
        return vars(model_cost(model)) | {"bits": bits.pop("all"), "halves": bits, "silenced": silenced}


def _sha256(text: ValidationSet) -> str:
    digest = hashlib.sha256(f"{text.bytes} {text.length}".encode())
    for inputs, labels in text:
        digest.update(inputs.tobytes() + labels.tobytes())
    return digest.hexdigest()


def _scores(model: BraidForCausalLM, texts: Texts) -> Bits:
    return {domain: score_text(TrainableBraid(model), text).bits_per_byte for domain, text in texts.items()}


def study_routes(results: StudyResults, data: OpenData, out: Path, tokens: int = 20_000) -> RoutingReport | None:
    """The routing report of the first seed's models, also as a page in `out`; None if none has paths or experts."""
    seed, folders = results.study.seeds[0], {}
    path_of: dict[str, str] = {}
    for model in results.models:
        if model.seed == seed and model.kind != "path" and _has_routes(model.folder):
            own = results.study.path_of_domains(model.name) if model.kind != "given" else {}
            if own is not None and all(path_of.get(domain, path) == path for domain, path in own.items()):
                folders[model.name] = model.folder
                path_of |= own
    if not folders:
        return None
    held_out_data = {stream.name: stream.data.address for stream in data.validation}
    specs = [results.study.domains[name] for name in held_out_data]
    shares = {spec.holdout for spec in specs if not spec.has_validation}
    held_out = shares.pop() if len(shares) == 1 else None
    return routes(
        folders, data=held_out_data, domains=path_of, tokens=tokens, held_out=held_out, out=out, back="../report.html"
    )


def _has_routes(folder: Path) -> bool:
    """Whether a model has a layer in which it can be read who goes where."""
    try:
        return bool(find_layers(load_model(folder)))
    except BraidError:
        return False
