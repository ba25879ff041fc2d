"""`braid show` for everything that has a recipe or a folder, studies included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import model_facts
from braidlm.core.reading import given_path
from braidlm.core.recipes import compose_recipe, list_recipes
from braidlm.data.packing.packed_data import is_packed
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.model.config.strict import encode
from braidlm.opening.names import find_sources
from braidlm.studies.decoding import decode_study, is_study
from braidlm.studies.members import distilled_domains
from braidlm.studies.models import errors_of, study_models
from braidlm.studies.phases import Phase, WholeSpec
from braidlm.studies.plan import StudyPlan, total_seconds
from braidlm.studies.study import Study
from braidlm.training.monitoring.speed import TOKENS_PER_WORD, TRAINING_FLOPS
from braidlm.training.show import any_folder_facts, check_recipe_exists, recipe_facts


def show(
    x: str | Path | Sequence[str | Path], overrides: list[str] | None = None, length: int | None = None
) -> dict[str, Any]:
    """What `x` is and costs: a recipe's name or file (with `key=value` overrides), a model, a run, a study or data.

    Several are compared: `{"kind": "comparison", "models": [...]}`. So are the models of a study's folder. Overrides
    then change those that are recipes.
    """
    if not isinstance(x, (str, Path)):
        recipes = [one for one in x if not _is_folder(one)]
        facts = [show(one, overrides if one in recipes or not recipes else None, length) for one in x]
        return facts[0] if len(facts) == 1 else _comparison(facts)
    name = str(x)
    if not _is_folder(x):
        _check_recipe(name)
        data = compose_recipe(name, overrides)
        return study_facts(name, data, length) if is_study(data) else recipe_facts(name, data, length)
    if overrides:
        raise BraidError(f"overrides change a recipe, and this is a folder: {' '.join(overrides)}", name)
    if is_packed(x):
        return any_folder_facts(x, length)
    sources = find_sources(x)
    facts = [any_folder_facts(source, length) for source in sources]
    return facts[0] if len(facts) == 1 else _comparison(facts)


def _check_recipe(name: str) -> None:
    """Refuse a name of nothing; what begins with a folder that exists was meant as one."""
    try:
        check_recipe_exists(name)
    except BraidError:
        if len(Path(name).parts) > 1 and Path(name).parent.is_dir() and Path(name).suffix not in (".yaml", ".yml"):
            find_sources(name)  # an error that suggests the nearest name
        raise


def _is_folder(x: str | Path) -> bool:
    """Whether it names something on this disk, such as one model of a study, and not a recipe."""
    try:
        return given_path(x).is_dir() or bool(find_sources(x))
    except BraidError:
        return False


def _comparison(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several models side by side; a comparison among them is taken apart."""
    models = [one for each in facts for one in (each["models"] if each["kind"] == "comparison" else [each])]
    if other := [one for one in models if one["kind"] in ("data", "study")]:
        raise BraidError(f"models are compared, and this is {other[0]['kind']}", other[0]["name"])
    return {
        "kind": "comparison",
        "models": models,
        "notes": [f"{one['name']}: {note}" for one in models for note in one["notes"]],
        "problems": [f"{one['name']}: {problem}" for one in models for problem in one["problems"]],
    }


def study_facts(name: str, data: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """Every model of a study as it would be built; the study's own figures are those of its first composed model."""
    study = decode_study(data)
    vocab_size = study.data.tokenizer.vocab_size
    models: list[dict[str, Any]] = []
    plans, plan = [], StudyPlan(study)
    with errors_at(name):
        built = study_models(study)
    for model in built:
        with errors_of(model.kind, model.name):
            facts = model_facts(model.skeleton, length)
        flops = facts["flops_per_token"]
        if model.kind == "distilled":
            taught = study.distilled[model.name]
            teacher = next(one for one in models if one["name"] == taught.teacher)
            epochs = study.epochs_of(taught)
            passes = epochs if taught.top_k is None else 1.0  # what the teacher says is stored once
            flops += round(teacher["flops_per_token"] / TRAINING_FLOPS * passes / epochs)  # it is only run forward
        plans.append(plan.training(*_training_share(study, model.kind, model.name), flops))
        times = _times(study, model.kind, model.name)
        models.append({"name": model.name, "kind": model.kind, **facts, "training": plans[-1].facts(), "times": times})
    notes = []
    if not plan.is_prepared:
        notes.append(
            f"Time is counted with {TOKENS_PER_WORD} tokens per word until the data is prepared."
            if plans[0].words is not None
            else "Words, checkpoints and time are known when the data is prepared, which `braid train` begins with."
        )
    if vocab_size is None:
        notes.append(f"The vocabulary comes from the tokenizer; counted here with {DEFAULT_VOCAB_SIZE:,} tokens.")
    if study.variants:
        notes.append("Variants are counted before their edits, which need the trained model.")
    problems: list[str] = []
    for domain, spec in study.domains.items():
        try:
            spec.resolved(domain)
        except BraidError as error:
            problems.append(str(error))
    main = next((m for m in models if m["kind"] == "composed"), models[0])
    return {
        **main,
        "kind": "study",
        "name": name,
        "about": dict(list_recipes()).get(name),
        "models": models,
        "seeds": study.seeds,
        "expected_seconds": total_seconds(plans, [model["times"] for model in models]),
        "domains": {domain: spec.source or spec.path or spec.folder for domain, spec in study.domains.items()},
        "vocab_size_assumed": vocab_size is None,
        "lineage": None,
        "tokenizer": None,
        "recipe": encode(study),
        "notes": notes,
        "problems": problems,
    }


def _times(study: Study, kind: str, label: str) -> int:
    """How many models of this name there are: one for each of its seeds, or one average of all seeds."""
    if kind == "average":
        own = study.seeds_of_average(label)
        return 1 if own is None else len(own)
    return len(study.seeds_of_distilled(label) if kind == "distilled" else study.seeds_of(label))


def _training_share(study: Study, kind: str, label: str) -> tuple[list[str], float, Phase]:
    """The domains that a model of a study is trained on, the share of them, and its phase."""
    if kind in ("whole", "variant"):
        spec = study.whole[label] if kind == "whole" else study.variants[label]
        return study.domains_of(spec), 1.0 - study.begin_of(spec) if isinstance(spec, WholeSpec) else 1.0, spec
    if kind == "average":
        return [], 0.0, Phase()
    if kind == "distilled":
        student = study.distilled[label]
        return distilled_domains(study, label), 1.0 - study.begin_of(student), student
    if kind == "composed":
        return list(study.domains), 1.0 - study.shared_from, study.composed[label]
    assert study.paths is not None
    return [label], study.paths.share, study.paths
