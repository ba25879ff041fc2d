"""The averages of a study: members trained apart, their probabilities averaged, and the models that learn from them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.edits.compose import compose
from braidlm.model.config.strict import encode
from braidlm.studies.editing import is_made_of, remove_made
from braidlm.studies.members import member_names
from braidlm.studies.models import errors_of
from braidlm.studies.study import Study
from braidlm.studies.trained_model import TrainedModel

Distil = Callable[[str, TrainedModel, int], TrainedModel]
"""Trains the distilled model of this name, taught by an average, with a seed."""


def average_models(study: Study, models: Sequence[TrainedModel], distil: Distil) -> Iterator[TrainedModel]:
    """Every average, of all seeds or for each, then every model that learns from one, with each of its seeds."""
    averages: dict[str, list[TrainedModel]] = {}
    for name, spec in study.averages.items():
        own = study.seeds_of_average(name)
        averages[name] = [
            _average(study, name, [m for m in models if m.name in spec.members and m.seed in seeds])
            for seeds in ([study.seeds] if own is None else [[seed] for seed in own])
        ]
        yield from averages[name]
    for name, taught in study.distilled.items():
        own = study.seeds_of_average(taught.teacher)
        for seed in study.seeds_of_distilled(name):
            teacher = next(one for one in averages[taught.teacher] if own is None or one.seed == seed)
            yield distil(name, teacher, seed)


def _average(study: Study, name: str, members: list[TrainedModel]) -> TrainedModel:
    """The average in a folder of its own; one of the same members is used again."""
    spec, seed = study.averages[name], members[0].seed
    out = study.folder / name if spec.seeds == "all" else study.folder / f"seed-{seed}" / name
    with errors_of("average", name):
        _compose(out, members, member_names(study, spec), encode(spec.join))
    return TrainedModel(name, "average", seed, out, parts=members)


def _compose(out: Path, members: Sequence[TrainedModel], names: Sequence[str], join: Any) -> None:
    sources = [member.model for member in members]
    if out.is_dir():
        if is_made_of(out, sources, {"join": join}):
            return
        remove_made(out)  # its members were trained again since, or are others
    console.say(f"\n{out.name}: the average of {', '.join(names)}")
    with console.silence():  # its account of every tensor is in the lineage
        compose(sources, out, names=list(names), join=join)
