"""The models of a study as they will be built, before anything is trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError, collecting
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.memory import check_training_fits
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.edits.compose import composed_architecture
from braidlm.inspection.texts import DataSource
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.names import find_model
from braidlm.opening.open import open_model
from braidlm.studies.steps import AverageStep, ComposeStep, DistilStep, EditStep, TrainStep, decode_edit
from braidlm.studies.study import Role, Study
from braidlm.training.train import Run


@dataclass(frozen=True)
class StudyModel:
    """A model of a study before it is made."""

    name: str
    kind: Role
    config: BraidConfig
    """With the vocabulary that the study says, or the default of a trained tokenizer; an edited model's before its
    edits."""
    skeleton: BraidForCausalLM
    """Models of one configuration share it."""


@dataclass
class TrainedModel:
    """One model of a study, made with one seed."""

    name: str
    kind: Role
    seed: int
    """The first seed for an average of all seeds."""
    model: Path
    """Its model folder."""
    run: Run | None = None
    """Its training; None for a model that was only edited or averaged, or that was given."""
    parts: list["TrainedModel"] = field(default_factory=list)
    """The models that its step reads."""


def study_models(study: Study) -> list[StudyModel]:
    """Every model, in the order in which they are made; one error has the problems of all that cannot be built."""
    models: dict[str, StudyModel] = {}
    problems: list[str] = []
    for name in study.order:
        with collecting(problems), errors_of(name):
            config = _config(study, name, models)
            same = next((model.skeleton for model in models.values() if model.config == config), None)
            models[name] = StudyModel(name, study.role(name), config, same or skeleton(config))
    if problems:
        raise BraidError("\n".join(dict.fromkeys(problems)))
    return list(models.values())


def check_study(study: Study, device: str | None) -> None:
    """Refuse, before any work, a model that cannot be trained in the memory there is, and text that is not there."""
    for model in study_models(study):
        if study.steps[model.name].train is not None:
            with errors_of(model.name):
                check_training_fits(model.skeleton, torch.device(choose_device(device or "auto")))
    problems: list[str] = []
    for name, step in study.steps.items():
        for at, written in enumerate(step.edit if isinstance(step, EditStep) else ()):
            edit = decode_edit(written, f"edit[{at}]")
            text = getattr(edit.edit, "text", None)
            if text is not None and text not in study.domains:
                with collecting(problems), errors_of(name):
                    DataSource(edit.kind, text, 1).check()
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
        raise BraidError(f"steps.{step}: {where}{error.what}", todo=error.todo) from error


def _config(study: Study, name: str, before: dict[str, StudyModel]) -> BraidConfig:
    """The configuration of a model; one that is edited or trained on has that of what it is made of."""

    def of(other: str) -> BraidConfig:
        if other not in study.steps:
            return open_model(find_model(other), "braid").config
        if other not in before:
            raise BraidError(f"'{other}', which it is made of, cannot be built")
        return before[other].config

    step, size = study.steps[name], study.data.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if isinstance(step, (ComposeStep, AverageStep)):
        parts = [_decoded(of(member.step)) for member in study.members(name)]
        layers, blocks = (step.layers, step.blocks) if isinstance(step, ComposeStep) else (None, 0)
        return BraidConfig(composed_architecture(parts, study.path_names(name), step.join, layers, blocks), size)
    own = study.model_of(name) if isinstance(step, (TrainStep, DistilStep)) else None
    if own is not None:
        return BraidConfig(own.architecture, size)
    return of(step.reads[0])


def _decoded(config: BraidConfig) -> Architecture:
    architecture: Architecture = config.decoded
    return architecture
