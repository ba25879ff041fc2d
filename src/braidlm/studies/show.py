"""`braid show` for everything that has a recipe or a folder, studies included."""

from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_facts
from braidlm.core.recipes import compose_recipe, list_recipes
from braidlm.data.packing.prepare import DEFAULT_VOCAB_SIZE
from braidlm.edits.compose import composed_architecture
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import encode
from braidlm.studies.study import Study, decode_study, is_study
from braidlm.training.show import any_folder_facts, check_recipe_exists, recipe_facts


def show(x: str | Path, overrides: list[str] | None = None, length: int | None = None) -> dict[str, Any]:
    """What `x` is and costs: a recipe's name or file (with `key=value` overrides), a model, run or data folder."""
    name = str(x)
    if Path(x).is_dir():
        if overrides:
            raise BraidError(f"overrides change a recipe, and this is a folder: {' '.join(overrides)}", name)
        return any_folder_facts(x, length)
    check_recipe_exists(name)
    data = compose_recipe(name, overrides)
    return study_facts(name, data, length) if is_study(data) else recipe_facts(name, data, length)


def study_facts(name: str, data: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """Every model of a study as it would be built; the study's own figures are those of its first composed model."""
    study = decode_study(data)
    vocab_size = study.data.tokenizer.vocab_size
    models = []
    for kind, label, architecture in _architectures(study):
        config = BraidConfig(architecture, vocab_size or DEFAULT_VOCAB_SIZE)
        models.append({"name": label, "kind": kind, **model_facts(config, length)})
    notes = []
    if vocab_size is None:
        notes.append(f"The vocabulary comes from the tokenizer; counted here with {DEFAULT_VOCAB_SIZE:,} tokens.")
    problems = []
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
        "domains": {domain: spec.source or spec.path or spec.folder for domain, spec in study.domains.items()},
        "vocab_size_assumed": vocab_size is None,
        "lineage": None,
        "tokenizer": None,
        "recipe": encode(study),
        "notes": notes,
        "problems": problems,
    }


def _architectures(study: Study) -> list[tuple[str, str, Architecture]]:
    architectures: list[tuple[str, str, Architecture]] = []
    if study.paths is not None:
        path = study.paths.model.architecture
        names = list(study.domains)
        architectures += [("path", name, path) for name in names]
        for label, spec in study.composed.items():
            composed = composed_architecture([path] * len(names), names, spec.join, spec.layers, spec.blocks)
            architectures.append(("composed", label, composed))
    return architectures + [("whole", label, model.architecture) for label, model in study.whole.items()]
