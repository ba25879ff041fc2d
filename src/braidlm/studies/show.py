"""`braid show`: the facts of a recipe, a study, a model folder, a run or packed data, without running anything.

What only reads and counts does not import what runs a model: see docs/concepts.md, the floors.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from braidlm.core.addresses import is_address
from braidlm.core.devices import check_memory, choose_device
from braidlm.core.errors import BraidError, collecting, errors_at
from braidlm.core.models.accounting import CountedModel, model_facts
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.presets import is_preset, read_model
from braidlm.core.models.runs import RECIPE, is_run, last_records, newest_checkpoint
from braidlm.core.recipes import compose_recipe, is_study, list_recipes
from braidlm.data.loading.config import DataConfig
from braidlm.data.packing.packed_data import is_packed, read_manifest
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.kernels.lowered_parts import Lowered
from braidlm.model.config.braid_config import Architecture, BraidConfig
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder, decoder_facts, decoder_notes
from braidlm.opening.names import check_known, find_sources, is_folder
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel
from braidlm.training.amounts import Unit
from braidlm.training.machines import Machines
from braidlm.training.monitoring.speed import TOKENS_PER_WORD, tokens_of, training_seconds, training_speed
from braidlm.training.recipe import Recipe, decode_recipe
from braidlm.training.start_from import data_of, open_decoder

ASSUMED_VOCABULARY = 50_257
"""GPT-2's: used where a recipe takes the vocabulary from a tokenizer that does not exist yet."""


def show(
    x: str | Path | Sequence[str | Path],
    overrides: list[str] | None = None,
    length: int | None = None,
    gpus: int | None = None,
    machines: Machines | None = None,
) -> dict[str, Any]:
    """What `x` is and costs: a recipe's name or file (with `key=value` overrides), a model, a run, a study or data.

    Several are compared: `{"kind": "comparison", "models": [...]}`. So are the models of a study's folder. Overrides
    then change those that are recipes. With `gpus`, what the training of a recipe takes on so many GPUs of `machines`;
    a plan that does not fit is an error, which says what would.
    """
    if gpus is not None:
        facts = show(x, overrides, length)
        if facts["kind"] != "recipe" or facts["recipe"].get("decoder"):
            what = f"a plan is of one recipe that trains a model of ours, not of a {facts['kind']}"
            todo = "A step of a study is planned as a recipe of its own; a preset has no training."
            raise BraidError(what, "--gpus", todo)
        from braidlm.training.plan import plan_training

        loaded = decode_recipe(facts["recipe"])
        architecture = loaded.architecture or open_model(str(loaded.recipe.start_from), "braid").config.decoded
        plan = plan_training(
            loaded.recipe, BraidConfig(architecture, facts["vocab_size"]), gpus, machines or Machines()
        )
        return facts | {"plan": plan, "expected_seconds": None}
    if not isinstance(x, (str, Path)):
        recipes = [one for one in x if not is_folder(one)]
        return _comparison([show(one, overrides if one in recipes or not recipes else None, length) for one in x])
    name = str(x)
    if not is_folder(x) and not is_address(x):
        check_known(name)
        data = compose_recipe(name, overrides)
        if not is_study(data):
            return recipe_facts(name, data, length)
        from braidlm.studies.study_facts import study_facts

        return study_facts(name, data, length)
    if overrides:
        raise BraidError(f"overrides change a recipe, and this is a folder: {' '.join(overrides)}", name)
    if is_address(x) or is_packed(x):
        data = asdict(read_manifest(x))
        return {"kind": "data", **data, "name": name, "set": data.get("name"), "notes": [], "problems": []}
    return _comparison(
        [
            run_facts(one, length) if is_run(one) else {"kind": "model", **folder_facts(open_model(one), length)}
            for one in find_sources(x)
        ]
    )


def _comparison(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several models side by side, where a comparison among them is taken apart; one thing alone is as it is."""
    if len(facts) == 1:
        return facts[0]
    models = [one for each in facts for one in (each["models"] if each["kind"] == "comparison" else [each])]
    if other := [one for one in models if one["kind"] in ("data", "study")]:
        raise BraidError(f"models are compared, and this is {other[0]['kind']}", other[0]["name"])
    return {
        "kind": "comparison",
        "models": models,
        "notes": [f"{one['name']}: {note}" for one in models for note in one["notes"]],
        "problems": [f"{one['name']}: {problem}" for one in models for problem in one["problems"]],
    }


def recipe_facts(name: str, data: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """A composed recipe, checked in full; its model as it would be built."""
    about, run = dict(list_recipes()).get(name), None
    notes: list[str] = []
    problems: list[str] = []
    if data.get("decoder"):  # which is opened and not loaded
        from braidlm.training.decoder import plan_decoder_run

        with errors_at(name):
            recipe = decode_recipe(data).recipe
        facts = folder_facts(open_decoder(recipe), length)
        with collecting(facts["problems"]):
            facts["notes"].append(plan_decoder_run(recipe, torch.device(choose_device("auto"))))
        return {**facts, "kind": "recipe", "name": name, "about": about, "lineage": None, "recipe": data}
    if is_preset(data):
        kind, key, model = "preset", "vocab_size", read_model(data, name)
        architecture, vocab_size = model.architecture, model.vocab_size
    else:
        kind, key = "recipe", "model.vocab_size"
        architecture, vocab_size, run = _read_run(data, name, problems)
    if (data.get("training") or {}).get("losses"):
        notes.append(
            "Extra losses read the plain pass: on a GPU the step is compiled by torch, without kernels of ours."
        )
    if vocab_size is None:
        counted = f"counted here with GPT-2's {ASSUMED_VOCABULARY:,} tokens. {key}=N counts with another."
        notes.append(f"The vocabulary comes from the tokenizer; {counted}")
    with errors_at(name):
        facts = costs_and_kernels(BraidConfig(architecture, vocab_size or ASSUMED_VOCABULARY), length)
    with collecting(notes):
        needed = facts["memory"].get("training_adamw", 0)  # what is quantised is not trained
        check_memory(needed, torch.device(choose_device("auto")), "weights, gradients and AdamW's two moments need")
    seconds = None if run is None else _expected_seconds(run, facts["flops_per_token"])
    facts |= {"expected_seconds": seconds, "vocab_size_assumed": vocab_size is None, "lineage": None, "tokenizer": None}
    return {"kind": kind, "name": name, "about": about, **facts, "recipe": data, "notes": notes, "problems": problems}


def folder_facts(opened: OpenedModel, length: int | None = None) -> dict[str, Any]:
    """A model folder, with what is wrong with it."""
    problems: list[str] = []
    fingerprint, lineage = None, load_lineage(opened.folder)
    if isinstance(opened, OpenedDecoder):
        with collecting(problems):
            fingerprint = opened.tokenizer.fingerprint
        costs, recipe, notes = decoder_facts(opened, length), opened.config.to_dict(), decoder_notes(opened)
    else:
        assert isinstance(opened, OpenedBraid)
        config = opened.config
        with collecting(problems):
            opened.check()
        costs, recipe, notes = costs_and_kernels(config, length), config.architecture, []
        if opened.is_bridged:
            notes.append(
                f"This is a '{opened.kind}' folder, shown as Braid reads it; `braid convert` writes it as Braid's."
            )
        elif lineage is None:
            problems.append("lineage.json is missing: where the model came from is not known")
        if config.frozen:
            notes.append(f"Training leaves these parts as they are: {', '.join(config.frozen)}.")
        with collecting(problems):
            tokenizer = load_tokenizer(opened.folder)
            fingerprint = tokenizer.fingerprint
            if tokenizer.vocab_size > config.vocab_size:
                has = f"the tokenizer has {tokenizer.vocab_size} tokens"
                problems.append(f"{has}, the model a vocabulary of {config.vocab_size}")
        recorded = (lineage or {}).get("tokenizer")
        if fingerprint and recorded and fingerprint != recorded:
            problems.append("the tokenizer is not the one the model was made with (another fingerprint)")
    costs["memory"] = {"weights_on_disk": opened.disk_bytes, **costs["memory"]}
    facts = {"name": str(opened.folder), **costs, "vocab_size_assumed": False, "lineage": lineage}
    return facts | {"tokenizer": fingerprint, "recipe": recipe, "notes": notes, "problems": problems}


def costs_and_kernels(config: BraidConfig, length: int | None) -> dict[str, Any]:
    """What a model costs, and which of its parts kernels serve in training on a GPU."""
    model = CountedModel(config)
    lowered = Lowered(model)
    return {**model_facts(model, length), "kernels": {"summary": lowered.summary(), "refusals": lowered.refusals}}


def run_facts(folder: Path, length: int | None = None) -> dict[str, Any]:
    """A run: its newest checkpoint and progress; before the first checkpoint, its recipe."""
    newest = newest_checkpoint(folder)
    if newest is None:
        recipe = str(folder / RECIPE)
        facts = recipe_facts(recipe, compose_recipe(recipe), length)
        facts["notes"].append("This run has no checkpoint yet: the model is as its recipe says.")
    else:
        facts = folder_facts(open_model(newest), length)
    run: dict[str, Any] = {"checkpoint": newest.name if newest else None}
    for kind, record in sorted(last_records(folder).items()):
        if kind in ("train", "validation"):
            run[kind] = {key: value for key, value in record.items() if key != "kind"}
    return {**facts, "kind": "run", "name": str(folder), "run": run}


def _expected_seconds(recipe: Recipe, flops_per_token: int) -> float:
    """How long a run takes on this machine, with its validations where their text is limited."""
    per_step = recipe.training.batch * recipe.training.accumulation * recipe.data.length
    tokens = tokens_of(recipe.training.budget, per_step)
    last: dict[Unit, int] = {
        "words": round(tokens / TOKENS_PER_WORD),
        "tokens": tokens,
        "steps": -(-tokens // per_step),
    }
    held_out = (recipe.validation.tokens or 0) * len(recipe.data.sets)
    return training_seconds(tokens, held_out, last, recipe.validation.every, flops_per_token, training_speed())


def _read_run(data: dict[str, Any], name: str, problems: list[str]) -> tuple[Architecture, int | None, Recipe]:
    """A run's model, vocabulary and recipe; problems that would stop it at its start are added to `problems`."""
    try:
        loaded = decode_recipe(data)
    except BraidError as error:
        raise BraidError(error.what, name) from error
    tokens, recipe = None, loaded.recipe
    with collecting(problems):
        tokens = _tokenizer_size(data_of(recipe), problems)
    architecture, vocab_size = loaded.architecture, loaded.vocab_size
    if architecture is None:
        config = open_model(str(recipe.start_from), "braid").config
        architecture, vocab_size = config.decoded, config.vocab_size
    if vocab_size and tokens and tokens > vocab_size:
        problems.append(f"the tokenizer has {tokens:,} tokens, the model a vocabulary of {vocab_size:,}")
    if (length := recipe.data.length) > architecture.context:
        has = "learned positions" if architecture.positions.kind == "learned" else "tokens of context"
        problems.append(f"data.length is {length}, and the model has {architecture.context} {has}")
    return architecture, vocab_size or tokens, recipe


def _tokenizer_size(config: DataConfig, problems: list[str]) -> int | None:
    """The vocabulary size of a run's tokenizer, where it is known without fetching or training it."""
    packed = {name: spec.path for name, spec in config.sets.items() if spec.path is not None}
    missing = {name: path for name, path in packed.items() if not is_packed(path)}
    problems += [f"data.sets.{name}.path: {path} is not a packed data set" for name, path in missing.items()]
    for path in packed.values():
        return read_manifest(path).vocab_size if not missing else None
    kind = config.tokenizer.kind
    if kind == "bpe":
        return config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    return load_tokenizer(kind).vocab_size if kind == "bytes" or Path(kind).exists() else None
