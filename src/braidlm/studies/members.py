"""What follows from the members of an average: the names of its paths, and the model and domains of what it teaches."""

from braidlm.core.models.presets import RecipeModel
from braidlm.studies.phases import AverageSpec
from braidlm.studies.study import Study


def member_names(study: Study, spec: AverageSpec) -> list[str]:
    """The names of the paths of one average, in the order in which members are made: by seed, then by model."""
    ordered = [name for name in study.model_names if name in spec.members]
    if spec.seeds == "each" or len(study.seeds) == 1:
        return ordered
    if len(ordered) == 1:
        return [f"seed_{seed}" for seed in study.seeds]
    return [f"{name}_{seed}" for seed in study.seeds for name in ordered]


def member_model(study: Study, member: str) -> RecipeModel:
    """The architecture of a whole model or a path."""
    source = study.whole.get(member, study.paths)
    assert source is not None
    model: RecipeModel = source.model
    return model


def distilled_model(study: Study, average: str) -> RecipeModel:
    """The architecture of what is distilled from an average."""
    spec = study.averages[average]
    assert spec.distilled is not None
    own: RecipeModel | None = spec.distilled.model
    return own if own is not None else member_model(study, spec.members[0])


def distilled_domains(study: Study, average: str) -> list[str]:
    """The domains of all members."""
    members = study.averages[average].members
    read = [study.domains_of(study.whole[member]) if member in study.whole else [member] for member in members]
    return [domain for domain in study.domains if any(domain in domains for domains in read)]
