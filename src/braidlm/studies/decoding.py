"""Reading a study: its recipe composed, its models decoded, and every problem in it told at once."""

from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError, collecting
from braidlm.core.models.presets import RecipeModel, decode_model
from braidlm.core.recipes import compose_recipe
from braidlm.model.config.strict import decode
from braidlm.studies.phases import Phase, WholeSpec, edit_step
from braidlm.studies.study import Study, StudyTraining


def is_study(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a study (`domains`) and not a single run (`data.sets`)."""
    return "domains" in data


def load_study(name: str, overrides: list[str] | None = None) -> Study:
    """Compose and decode a study; every problem in it is in one error."""
    return decode_study(compose_recipe(name, overrides))


def decode_study(data: dict[str, Any]) -> Study:
    """A study from plain data."""
    problems: list[str] = []
    data = dict(data)
    for key in ("whole", "paths"):
        part = data.get(key)
        if isinstance(part, dict):
            data[key] = _with_models(part, key, problems)
    if isinstance(data.get("distilled"), dict):
        data["distilled"] = {name: _distilled(spec, name, problems) for name, spec in data["distilled"].items()}
    if isinstance(data.get("training"), dict):
        _check_training(data["training"], "training", problems)
    study = None
    with collecting(problems):
        study = decode(Study, data)
    if study is not None and not problems:
        for where, phase in _phases(study):
            if phase.training:
                _check_training(study.training_of(phase), f"{where}.training", problems)
        for name, spec in study.variants.items():
            for at, step in enumerate(spec.edits):
                with collecting(problems):
                    edit_step(step, f"variants.{name}.edits[{at}]")
    if problems or study is None:
        raise BraidError("\n".join(problems), todo="Nothing was started. `braid show STUDY` checks a study.")
    return study


def _phases(study: Study) -> Iterator[tuple[str, Phase]]:
    """Every phase with its key."""
    if study.paths is not None:
        yield "paths", study.paths
    for key in ("composed", "whole", "variants", "distilled"):
        for name, spec in getattr(study, key).items():
            yield f"{key}.{name}", spec


def _check_training(training: dict[str, Any], where: str, problems: list[str]) -> None:
    if "budget" in training:
        problems.append(
            f"{where}.budget: a study's budgets come from `epochs` and its data; leave it out, or give a model one of "
            "its own: `variants.NAME.budget`"
        )
        return
    with collecting(problems):
        decode(StudyTraining, training, where)


def _with_models(part: dict[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    """Models decoded, so that runs cannot differ in what they inherit."""
    if key == "paths":
        return {**part, "model": _model(part.get("model"), "paths.model", problems)}
    return {name: _whole(spec, f"whole.{name}", problems) for name, spec in part.items()}


def _whole(spec: Any, where: str, problems: list[str]) -> Any:
    """An architecture as the model of a spec; one that has a `model` is a spec already."""
    if isinstance(spec, WholeSpec):
        return spec
    if isinstance(spec, dict) and "model" in spec:
        return {**spec, "model": _model(spec["model"], f"{where}.model", problems)}
    return {"model": _model(spec, where, problems)}


def _distilled(spec: Any, name: str, problems: list[str]) -> Any:
    """A distilled model with its architecture decoded, if it says one."""
    if not isinstance(spec, dict) or spec.get("model") is None:
        return spec
    return {**spec, "model": _model(spec["model"], f"distilled.{name}.model", problems)}


def _model(model: Any, where: str, problems: list[str]) -> Any:
    if isinstance(model, RecipeModel):
        return model
    if not isinstance(model, dict):
        problems.append(f"{where}: expected an architecture, got {model!r}")
        return model
    with collecting(problems):
        return decode_model(model, where)
    return model
