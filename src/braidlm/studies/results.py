"""The results of a study: bits per byte per domain, cost, time and routes of every model."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, get_args

from braidlm.core import console
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import load_model
from braidlm.core.models.runs import read_metrics, training_seconds
from braidlm.data.loading.halves import Half
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.validation import ValidationSet, validation_windows
from braidlm.evals.evaluate import evaluate
from braidlm.inspection.layers import find_layers
from braidlm.inspection.results import RoutingReport
from braidlm.inspection.routes import routes
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import use_paths
from braidlm.opening.names import find_model, title_of
from braidlm.studies.models import TrainedModel
from braidlm.studies.study import Role, Study
from braidlm.training.monitoring.reporter import score_text
from braidlm.training.trainable import TrainableBraid

ROUTES = "routes"
"""The folder of the routing report in the folder of a study."""
Bits = dict[str, float]
"""Bits per byte, by domain."""
Texts = dict[str, ValidationSet]
"""Held-out text, by domain."""


class Point(NamedTuple):
    """One validation during a training."""

    tokens: int
    words: int
    bits: Bits

    def seen(self, unit: str) -> int:
        """How far the training had come, in words or tokens."""
        return self.words if unit == "words" else self.tokens


@dataclass
class ModelResult:
    """One model of a study with one seed."""

    name: str
    kind: Role
    seed: int
    folder: Path
    """Its model folder."""
    run_folder: Path | None
    """None for a model that was only edited, or given."""
    parameters: int
    active_parameters: int
    """The parameters that take part in computing one token."""
    flops_per_token: int
    tokens: int
    """Seen in training; for a composed model, after it was composed, for a variant, after its edits, for an average by
    all members together."""
    words: int
    """The words of these tokens."""
    seconds: float
    """Seconds of training alone, without validation, samples and saving; for an average, of its members together."""
    wall_seconds: float
    """Seconds of the whole run up to its last validation, everything included; 0 where its records do not say."""
    bits: Bits
    curve: list[Point]
    """Every validation."""
    silenced: dict[str, Bits] = field(default_factory=dict)
    """The bits per byte of a composed model when one path is inactive, by that path."""
    trainable: int | None = None
    """How many parameters were trained; None without a training."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Scores on the study's tasks."""
    babylm: dict[str, float] = field(default_factory=dict)
    """Where BabyLM's tasks are among them, scores by the columns of the MoEP paper's Table 1."""
    halves: dict[str, Bits] = field(default_factory=dict)
    """Bits per byte on both halves of the held-out text, where `validation.half` names one of them."""


@dataclass
class StudyResults:
    """All models of a study."""

    study: Study
    models: list[ModelResult]

    @property
    def unit(self) -> str:
        """The unit of learning curves: words where a training is validated by words, else tokens."""
        return "words" if self.study.validation.every.unit == "words" else "tokens"

    @property
    def domains(self) -> list[str]:
        return list(self.study.domains)

    def names(self, *kinds: Role) -> list[str]:
        """Names of the models of these kinds, in the order of the study."""
        return list(dict.fromkeys(m.name for m in self.models if not kinds or m.kind in kinds))

    def of(self, name: str, *kinds: Role) -> list[ModelResult]:
        """A model with every seed."""
        return [m for m in self.models if m.name == name and (not kinds or m.kind in kinds)]

    def as_dict(self) -> dict[str, Any]:
        """Facts for programs."""
        return {
            "study": self.study.name,
            "seeds": self.study.seeds,
            "models": [vars(m) | {"folder": str(m.folder), "run_folder": _written(m.run_folder)} for m in self.models],
        }

    def before(self, model: ModelResult) -> list[ModelResult]:
        """The models whose training a model stands on beside its own: what it is made of or was trained on from.

        The tokens and seconds of an average are its members' already.
        """
        study, name = self.study, model.name
        if name not in study.steps:  # a folder that was given
            return []
        is_average = model.kind == "average"
        names = set(study.before(name)) - set(study.steps[name].reads if is_average else ())
        seeds = study.seeds if is_average and study.is_once(name) else [model.seed]
        return [m for m in self.models if m.name in names and m.seed in seeds]

    def base_of(self, variant: ModelResult) -> ModelResult:
        """What a variant was made of in the end, with the same seed."""
        base = self.study.base_of(variant.name)
        name = base if base in self.study.steps else title_of(find_model(base))
        return next(m for m in self.models if m.name == name and m.seed == variant.seed)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its standard deviation."""

    mean: float
    deviation: float | None
    """The deviation of the sample; None for one seed."""

    def text(self, digits: int = 3) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def over_seeds(values: list[float]) -> Spread:
    """Mean and sample deviation."""
    return Spread(mean(values), stdev(values) if len(values) > 1 else None)


def measure(study: Study, models: list[TrainedModel], device: str | None = None) -> StudyResults:
    """Score every model on the held-out documents of every domain, in float32."""
    device = choose_device(device or "auto")
    texts = _texts(study, study.validation.half)
    halves = {} if study.validation.half is None else {half: _texts(study, half) for half in get_args(Half)}
    results = StudyResults(study, [_measured(model, texts, halves, device) for model in models])
    if study.tasks is not None:
        folders = {f"{model.name}, seed {model.seed}": model.folder for model in results.models}
        tasks = study.tasks
        evaluation = evaluate(
            folders, tasks.names, data=tasks.data, settings=tasks.settings, out=study.folder / "tasks", device=device
        )
        for scored, model in zip(evaluation.models, results.models, strict=True):
            model.tasks = {name: result.score for name, result in scored.tasks.items()}
            model.babylm = evaluation.averages.get(scored.name, {}).get("columns", {})
    return results


def _texts(study: Study, half: Half | None) -> Texts:
    with console.silence():  # all of it is prepared
        streams = open_data(study.data_config, half).validation
    return {stream.name: validation_windows(stream, study.data.length, study.validation.tokens) for stream in streams}


def _measured(trained: TrainedModel, texts: Texts, halves: dict[str, Texts], device: str) -> ModelResult:
    model = load_model(trained.model, device)
    cost = model_cost(model)
    run = trained.run
    records = [] if run is None else read_metrics(run.folder)
    runs = [one.run for one in (trained.parts if trained.kind == "average" else [trained]) if one.run is not None]
    trainings = [read_metrics(one.folder) for one in runs]
    silenced = {}
    if trained.kind == "composed":
        names = [part.name for part in trained.parts]
        for inactive in names:
            use_paths(model, [name for name in names if name != inactive])
            silenced[inactive] = _scores(model, texts)
        use_paths(model, None)
    return ModelResult(
        name=trained.name,
        kind=trained.kind,
        seed=trained.seed,
        folder=trained.model,
        run_folder=None if run is None else run.folder,
        parameters=cost.parameters,
        active_parameters=cost.active_parameters,
        flops_per_token=cost.flops_per_token,
        tokens=sum(one.progress.tokens for one in runs),
        words=sum(one.progress.words for one in runs),
        seconds=sum(map(training_seconds, trainings)),
        wall_seconds=sum(record.get("seconds", 0.0) for each in trainings for record in each),
        bits=_scores(model, texts),
        curve=[Point(r["tokens"], r["words"], _record_bits(r)) for r in records if r["kind"] == "validation"],
        silenced=silenced,
        trainable=None if run is None else run.trainable,
        halves={half: _scores(model, each) for half, each in halves.items()},
    )


def _written(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _scores(model: BraidForCausalLM, texts: Texts) -> Bits:
    return {domain: score_text(TrainableBraid(model), text).bits_per_byte for domain, text in texts.items()}


def _record_bits(record: dict[str, Any]) -> Bits:
    return {domain: score["bits_per_byte"] for domain, score in record["sets"].items()}


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
    held_out_data = {stream.name: str(stream.data.folder) for stream in data.validation}
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
