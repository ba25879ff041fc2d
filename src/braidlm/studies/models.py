"""The models of a study as they will be built, each with its key in the recipe, which errors name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError, collecting
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.memory import check_training_fits
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.edits.compose import composed_architecture
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.open import open_model
from braidlm.studies.members import distilled_model, member_model, member_names, members_of
from braidlm.studies.study import Study

Kind = Literal["path", "composed", "whole", "variant", "given", "average", "distilled"]
"""`given`: a model folder that variants are made of."""


@dataclass(frozen=True)
class StudyModel:
    """A model of a study."""

    kind: Kind
    name: str
    config: BraidConfig
    """With the vocabulary that the study says, or the default of a trained tokenizer; a variant's before its edits."""
    skeleton: BraidForCausalLM
    """Models of one configuration share it."""


def study_models(study: Study) -> list[StudyModel]:
    """Every model, in the order in which they are trained; one error has the problems of all that cannot be built."""
    models: list[StudyModel] = []
    problems: list[str] = []
    for kind, name in _names(study):
        with collecting(problems), errors_of(kind, name):
            config = _config(study, kind, name, models)
            same = next((model.skeleton for model in models if model.config == config), None)
            models.append(StudyModel(kind, name, config, same or skeleton(config)))
    if problems:
        raise BraidError("\n".join(dict.fromkeys(problems)))
    return models


def check_study_fits(study: Study, device: str | None) -> None:
    """Refuse a study with a model that cannot be trained in the memory there is."""
    for model in study_models(study):
        if model.kind == "average":
            continue  # it is not trained
        with errors_of(model.kind, model.name):
            check_training_fits(model.skeleton, torch.device(choose_device(device or "auto")))


@contextmanager
def errors_of(kind: Kind, name: str) -> Iterator[None]:
    """Let an error in the block say which model of the study it is about."""
    keys = {"path": "paths.model", "variant": f"variants.{name}", "given": name, "average": f"averages.{name}"}
    key = keys.get(kind, f"{kind}.{name}")
    try:
        yield
    except BraidError as error:
        where = f"{error.where}: " if error.where else ""
        raise BraidError(f"{key}: {where}{error.what}", todo=error.todo) from error


def _names(study: Study) -> list[tuple[Kind, str]]:
    paths: list[tuple[Kind, str]] = [("path", domain) for domain in study.domains] if study.paths is not None else []
    return [
        *paths,
        *(("composed", name) for name, spec in study.composed.items() if spec.members is None),
        *(("whole", name) for name in study.whole),
        *(("variant", name) for name in study.variants),
        *(("composed", name) for name, spec in study.composed.items() if spec.members is not None),
        *(("average", name) for name in study.averages),
        *(("distilled", name) for name in study.distilled),
    ]


def _config(study: Study, kind: Kind, name: str, before: list[StudyModel]) -> BraidConfig:
    """The configuration of a model; a variant has that of what it is made of, since edits need its weights."""
    if kind != "variant":
        size = study.data.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
        return BraidConfig(_architecture(study, kind, name), size)
    base = study.base_of(name)
    if base not in study.model_names:
        return open_model(base, "braid").config
    config = next((model.config for model in before if model.name == base), None)
    if config is None:
        raise BraidError(f"'{base}', which it is made of, cannot be built")
    return config


def _architecture(study: Study, kind: Kind, name: str) -> Architecture:
    if kind == "whole":
        return study.whole[name].model.architecture  # type: ignore[no-any-return]
    if kind == "average":
        average = study.averages[name]
        members = [member_model(study, member.model).architecture for member in members_of(study, average)]
        return composed_architecture(members, member_names(study, average), average.join, blocks=0)
    if kind == "distilled":
        return distilled_model(study, name).architecture
    if kind == "path":
        return member_model(study, name).architecture
    spec, parts = study.composed[name], study.parts_of(name)
    architectures = [member_model(study, part).architecture for part in parts]
    return composed_architecture(architectures, parts, spec.join, spec.layers, spec.blocks)
