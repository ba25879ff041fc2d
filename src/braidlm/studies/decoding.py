"""Reading a study: its recipe decoded, its models built as skeletons, and every problem in it told before any work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from braidlm.core.devices import check_training_fits, choose_device
from braidlm.core.errors import BraidError, collecting, did_you_mean
from braidlm.core.models.accounting import CountedModel
from braidlm.core.models.presets import RecipeModel, decode_model
from braidlm.core.recipes import compose_recipe
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.edits.compose import composed_architecture
from braidlm.edits.composing.path_models import MODULES
from braidlm.edits.composing.side_by_side import counted_modules
from braidlm.inspection.texts import DataSource
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode
from braidlm.opening.names import find_model
from braidlm.opening.open import open_model
from braidlm.studies.steps import (
    AverageStep,
    ComposeStep,
    DistilStep,
    EditStep,
    Step,
    TrainStep,
    decode_edit,
    decode_step,
)
from braidlm.studies.study import Role, StepOptions, Study, StudyTraining

if TYPE_CHECKING:
    from braidlm.training.train import Run

OLD_KEYS = {
    "paths": "`kept: SHARE`, and for each domain `steps.DOMAIN: {model: ..., train: {domains: [DOMAIN], text: kept}}`",
    "composed": "`steps.NAME: {compose: [PATH, PATH], join: ..., train: {text: shared}}`",
    "whole": "`steps.NAME: {model: ..., train: {domains: [...], epochs: ...}}`, `train` only where it differs",
    "variants": "`steps.NAME: {of: MODEL, edit: [...], train: {domains: [...]}}`",
    "averages": "`steps.NAME: {average: [MODEL, MODEL], seeds: each}`",
    "distilled": "`steps.NAME: {distil: {teacher: AVERAGE, weight: ...}, train: {text: ...}}`",
}
"""What is written now for the keys that studies had before they had steps."""
PARTS = ("models", "steps", "training")
"""The parts of a study that are decoded before the whole; what is no mapping is refused with the whole."""


def load_study(name: str, overrides: list[str] | None = None) -> Study:
    """Compose and decode a study; every problem in it is in one error."""
    return decode_study(compose_recipe(name, overrides))


def decode_study(data: dict[str, Any]) -> Study:
    """A study from plain data."""
    old = [f"{key}: a study is a graph of `steps` now: write {OLD_KEYS[key]}" for key in OLD_KEYS if key in data]
    if old:
        raise BraidError("\n".join(old), todo="Nothing was started. docs/recipes.md describes studies.")
    problems: list[str] = []
    given, steps, training = (one if isinstance(one := data.get(key), dict) else {} for key in PARTS)
    models = {name: _model(one, f"models.{name}", {}, problems) for name, one in given.items()}
    steps = {str(name): _step(one, str(name), models, problems) for name, one in steps.items()}
    data = data | ({"models": models} if models else {}) | ({"steps": steps} if steps else {})
    if "budget" in training:
        instead = "leave it out, or give a step one of its own: `steps.NAME.train.budget`"
        problems.append(f"training.budget: a study's budgets come from `epochs` and its data; {instead}")
    else:
        with collecting(problems):
            decode(StudyTraining, training, "training")
    study = None
    with collecting(problems):  # steps that cannot be read must not hide what is wrong with the other keys
        study = decode(Study, data | {"steps": {"step": TrainStep(model="")}} if problems else data)
    for name in study.steps if study is not None and not problems else ():
        if study.steps[name].train is not None:
            with collecting(problems):
                decode(StepOptions, study.options_of(name), f"steps.{name}.train")
    if problems or study is None:
        raise BraidError("\n".join(problems), todo="Nothing was started. `braid show STUDY` checks a study.")
    return study


def _step(data: Any, name: str, models: dict[str, RecipeModel], problems: list[str]) -> Step | None:
    """A step with its model and its edits decoded."""
    where, step = f"steps.{name}", None
    with collecting(problems):
        step = decode_step(data, where)
    if isinstance(step, (TrainStep, DistilStep)) and step.model is not None:
        model = _model(step.model, f"{where}.model", models, problems)
        return step if model is None else replace(step, model=model)
    for at, one in enumerate(step.edit if isinstance(step, EditStep) else ()):
        with collecting(problems):
            decode_edit(one, f"{where}.edit[{at}]")
    return step


def _model(model: Any, where: str, models: dict[str, RecipeModel], problems: list[str]) -> Any:
    """An architecture, decoded once; a name is that of one among the study's `models`."""
    if isinstance(model, str):
        if model not in models:
            hint = did_you_mean(model, models)
            problems.append(f"{where}: there is no model '{model}' in the study's `models`.{hint}")
        return models.get(model)
    if not isinstance(model, (dict, RecipeModel)):
        problems.append(f"{where}: expected an architecture, got {model!r}")
        return None
    with collecting(problems):
        return decode_model(model, where)
    return None


@dataclass
class TrainedModel:
    """One model of a study, made with one seed."""

    name: str
    kind: Role
    seed: int
    """The first seed for an average of all seeds."""
    model: Path
    run: "Run | None" = None
    """Its training; None for a model that was only edited or averaged, or that was given."""
    parts: list["TrainedModel"] = field(default_factory=list)
    """The models that its step reads."""


def study_models(study: Study) -> dict[str, CountedModel]:
    """The skeletons of all models, in the order in which they are made; one error has all that cannot be built.

    They have the vocabulary that the study says, or the default of a trained tokenizer, and an edited model's is as
    before those edits that need the trained model. Models of one configuration share a skeleton.
    """
    models: dict[str, CountedModel] = {}
    problems: list[str] = []
    for name in study.order:
        with collecting(problems), errors_of(name):
            config = _config(study, name, models)
            models[name] = next((one for one in models.values() if one.config == config), None) or CountedModel(config)
    if problems:
        raise BraidError("\n".join(dict.fromkeys(problems)))
    return models


def check_study(study: Study, device: str | None, here: bool = True) -> None:
    """Refuse, before any work, a model that cannot be trained in the memory there is, and text that is not there. The
    memory is this machine's, if the study runs `here`."""
    for name, model in study_models(study).items():
        if here and study.steps[name].train is not None:
            with errors_of(name):
                check_training_fits(model, torch.device(choose_device(device or "auto")))
    problems: list[str] = []
    for name, step in study.steps.items():
        for at, written in enumerate(step.edit if isinstance(step, EditStep) else ()):
            kind, edit = decode_edit(written, f"edit[{at}]")
            for text in edit.texts.values():
                if text not in study.domains:
                    with collecting(problems), errors_of(name):
                        DataSource(kind, text, 1).check()
    if problems:
        raise BraidError("\n".join(problems), todo="A text is a file, a folder, packed data, or a domain's name.")
    if study.tasks is not None:
        study.tasks.check()


@contextmanager
def errors_of(step: str) -> Iterator[None]:
    """Let an error in the block say which step of the study it is about."""
    try:
        yield
    except BraidError as error:
        where = f"{error.where}: " if error.where else ""
        raise type(error)(f"steps.{step}: {where}{error.what}", todo=error.todo) from error


def _config(study: Study, name: str, before: dict[str, CountedModel]) -> BraidConfig:
    """The configuration of a model; one that is edited or trained on has that of what it is made of."""

    def of(other: str) -> BraidConfig:
        if other not in study.steps:
            return open_model(find_model(other), "braid").config
        if other not in before:
            raise BraidError(f"'{other}', which it is made of, cannot be built")
        return before[other].config

    step, size = study.steps[name], study.data.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if isinstance(step, ComposeStep) and step.join.kind == MODULES:
        return counted_modules({member: of(member) for member in step.compose})
    if isinstance(step, (ComposeStep, AverageStep)):
        parts = [of(member).decoded for member, _ in study.members(name)]
        layers, blocks = (step.layers, step.blocks) if isinstance(step, ComposeStep) else (None, 0)
        return BraidConfig(composed_architecture(parts, study.path_names(name), step.join, layers, blocks), size)
    if isinstance(step, EditStep):
        config = of(step.of)
        for at, written in enumerate(step.edit):
            config = decode_edit(written, f"edit[{at}]")[1].counted(config) or config
        return config
    own = study.model_of(name) if isinstance(step, (TrainStep, DistilStep)) else None
    return of(step.reads[0]) if own is None else BraidConfig(own.architecture, size)
