"""What follows from the members of an average: the names of its paths, and the model and domains of what it teaches."""

from typing import NamedTuple

from braidlm.core.models.presets import RecipeModel
from braidlm.studies.phases import AverageSpec
from braidlm.studies.study import Study


class Member(NamedTuple):
    """A member of an average."""

    model: str
    seed: int


def members_of(study: Study, spec: AverageSpec) -> list[Member]:
    """The members of one average in the order in which they are made, by seed, then by model; of `each`, the first."""
    ordered = [name for name in study.model_names if name in spec.members]
    seeds = study.seeds_of(ordered[0])[:1] if spec.seeds == "each" else study.seeds
    return [Member(name, seed) for seed in seeds for name in ordered if seed in study.seeds_of(name)]


def member_names(study: Study, spec: AverageSpec) -> list[str]:
    """The names of the paths of one average."""
    members = members_of(study, spec)
    if len({member.seed for member in members}) == 1:
        return [member.model for member in members]
    if len(spec.members) == 1:
        return [f"seed_{member.seed}" for member in members]
    return [f"{member.model}_{member.seed}" for member in members]


def path_of_domains(study: Study, model: str) -> dict[str, str] | None:
    """Of an average or a composed model, the path that was trained on each domain alone, where none has its name.

    None where a domain has no such path, or several.
    """
    average = study.averages.get(model)
    names = member_names(study, average) if average else study.parts_of(model) if model in study.composed else []
    found = {}
    for domain in study.domains if names else ():
        specs = {name: study.whole.get(name) or study.variants.get(name) for name in names}
        own = [name for name, spec in specs.items() if spec is not None and list(spec.domains or ()) == [domain]]
        if domain in names:
            continue
        if len(own) != 1:
            return None
        found[domain] = own[0]
    return found


def member_model(study: Study, member: str) -> RecipeModel:
    """The architecture of a whole model or a path, or of one that was trained on."""
    base = study.base_of(member) if member in study.variants else member
    source = study.whole.get(base, study.paths)
    assert source is not None
    model: RecipeModel = source.model
    return model


def distilled_model(study: Study, name: str) -> RecipeModel:
    """The architecture of a distilled model."""
    spec = study.distilled[name]
    own: RecipeModel | None = spec.model
    return own if own is not None else member_model(study, study.averages[spec.teacher].members[0])


def distilled_domains(study: Study, name: str) -> list[str]:
    """The domains of all members of a distilled model's teacher."""
    members = study.averages[study.distilled[name].teacher].members
    read = {domain for member in members for domain in domains_read(study, member)}
    return [domain for domain in study.domains if domain in read]


def domains_read(study: Study, member: str) -> list[str]:
    """The domains of a member; of one that was trained on, also those of what it started from."""
    if member in study.variants:
        spec = study.variants[member]
        return [*study.domains_of(spec), *domains_read(study, spec.start)]
    return study.domains_of(study.whole[member]) if member in study.whole else [member]
