"""Reading a study: its recipe composed, its steps and models decoded, and every problem in it told at once."""

from dataclasses import replace
from typing import Any

from braidlm.core.errors import BraidError, collecting, did_you_mean
from braidlm.core.models.presets import RecipeModel, decode_model
from braidlm.core.recipes import compose_recipe
from braidlm.model.config.strict import decode
from braidlm.studies.steps import DistilStep, EditStep, Step, TrainStep, decode_edit, decode_step
from braidlm.studies.study import StepOptions, Study, StudyTraining

OLD_KEYS = {
    "paths": "`kept: SHARE`, and for each domain `steps.DOMAIN: {model: ..., train: {domains: [DOMAIN], text: kept}}`",
    "composed": "`steps.NAME: {compose: [PATH, PATH], join: ..., train: {text: shared}}`",
    "whole": "`steps.NAME: {model: ..., train: {domains: [...], epochs: ...}}`, `train` only where it differs",
    "variants": "`steps.NAME: {of: MODEL, edit: [...], train: {domains: [...]}}`",
    "averages": "`steps.NAME: {average: [MODEL, MODEL], seeds: each}`",
    "distilled": "`steps.NAME: {distil: {teacher: AVERAGE, weight: ...}, train: {text: ...}}`",
}
"""What is written now for the keys that studies had before they had steps."""


def is_study(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a study (`domains`) and not a single run (`data.sets`)."""
    return "domains" in data


def load_study(name: str, overrides: list[str] | None = None) -> Study:
    """Compose and decode a study; every problem in it is in one error."""
    return decode_study(compose_recipe(name, overrides))


def decode_study(data: dict[str, Any]) -> Study:
    """A study from plain data."""
    old = [f"{key}: a study is a graph of `steps` now: write {OLD_KEYS[key]}" for key in OLD_KEYS if key in data]
    if old:
        raise BraidError("\n".join(old), todo="Nothing was started. docs/recipes.md describes studies.")
    problems: list[str] = []
    data = dict(data)
    given, models = data.get("models"), {}
    if isinstance(given, dict):
        models = {name: _model(one, f"models.{name}", {}, problems) for name, one in given.items()}
        data["models"] = models
    if isinstance(data.get("steps"), dict):
        data["steps"] = {str(name): _step(one, str(name), models, problems) for name, one in data["steps"].items()}
    if isinstance(data.get("training"), dict):
        if "budget" in data["training"]:
            problems.append(
                "training.budget: a study's budgets come from `epochs` and its data; leave it out, or give a step one "
                "of its own: `steps.NAME.train.budget`"
            )
        else:
            with collecting(problems):
                decode(StudyTraining, data["training"], "training")
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
            problems.append(
                f"{where}: there is no model '{model}' in the study's `models`.{did_you_mean(model, models)}"
            )
        return models.get(model)
    if not isinstance(model, (dict, RecipeModel)):
        problems.append(f"{where}: expected an architecture, got {model!r}")
        return None
    with collecting(problems):
        return decode_model(model, where)
    return None
