"""The averages of a study: members trained apart, their probabilities averaged, and one model that learns from them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from braidlm.core import console
from braidlm.edits.compose import compose
from braidlm.studies.editing import is_made_of, remove_made
from braidlm.studies.members import member_names
from braidlm.studies.models import errors_of
from braidlm.studies.phases import AverageSpec
from braidlm.studies.study import Study
from braidlm.studies.trained_model import TrainedModel

Distil = Callable[[str, TrainedModel, int], TrainedModel]
"""Trains the distilled model of the average of this name, taught by it, with a seed."""


def average_models(study: Study, models: Sequence[TrainedModel], distil: Distil) -> Iterator[TrainedModel]:
    """Every average, of all seeds or for each, followed by what is distilled from it."""
    for name, spec in study.averages.items():
        averages = [
            _average(study, name, [m for m in models if m.name in spec.members and m.seed in seeds])
            for seeds in ([study.seeds] if spec.seeds == "all" else [[s] for s in study.seeds_of(spec.members[0])])
        ]
        yield from averages
        if spec.distilled is not None:
            yield from (distil(name, teacher, seed) for teacher, seed in _taught(study, spec, averages))


def _taught(study: Study, spec: AverageSpec, averages: Sequence[TrainedModel]) -> Iterator[tuple[TrainedModel, int]]:
    """Each teacher with a seed of what it teaches: its own, or all seeds where it is the average of all."""
    assert spec.distilled is not None
    for average in averages:
        own = [average.seed] if spec.seeds == "each" else study.seeds
        yield from ((average, seed) for seed in spec.distilled.seeds or own if spec.seeds == "all" or seed in own)


def _average(study: Study, name: str, members: list[TrainedModel]) -> TrainedModel:
    """The average in a folder of its own; one of the same members is used again."""
    spec, seed = study.averages[name], members[0].seed
    out = study.folder / name if spec.seeds == "all" else study.folder / f"seed-{seed}" / name
    with errors_of("average", name):
        _compose(out, members, member_names(study, spec))
    return TrainedModel(name, "average", seed, out, parts=members)


def _compose(out: Path, members: Sequence[TrainedModel], names: Sequence[str]) -> None:
    sources = [member.model for member in members]
    if out.is_dir():
        if is_made_of(out, sources):
            return
        remove_made(out)  # its members were trained again since, or are others
    console.say(f"\n{out.name}: the average of {', '.join(names)}")
    with console.silence():  # its account of every tensor is in the lineage
        compose(sources, out, names=list(names), join="average")
