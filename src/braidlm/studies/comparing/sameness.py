"""What several recipes have in common and what not; those that are compared must see identical batches."""

import json
from collections.abc import Mapping
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import encode
from braidlm.training.recipe import LoadedRecipe
from braidlm.training.start_from import data_of

MAX_SHOWN = 60
"""Characters of a value."""
Differences = dict[str, dict[str, Any]]
"""By the path of a key, the value of each recipe; None where it has none."""


def check_same_batches(recipes: Mapping[str, LoadedRecipe]) -> None:
    """Refuse recipes that would not be trained, step by step, on the same batches."""
    different = differences({name: _what_makes_batches(loaded) for name, loaded in recipes.items()})
    if different:
        lines = [f"{path}: {_listed(values)}" for path, values in different.items()]
        raise BraidError(
            "\n".join(["these recipes would not see the same batches:", *lines]),
            todo="Nothing was started. An override is for all recipes, so that `KEY=VALUE` makes them equal.",
        )


def _what_makes_batches(loaded: LoadedRecipe) -> dict[str, Any]:
    recipe = loaded.recipe
    data = {key: value for key, value in encode(data_of(recipe)).items() if key != "cache"}
    training = {key: encode(getattr(recipe.training, key)) for key in ("batch", "accumulation", "budget")}
    same = {"seed": recipe.seed, "data": data, "training": training, "validation": {"tokens": recipe.validation.tokens}}
    # A batch is cut where a checkpoint by words or tokens is due; those by steps cut nothing.
    every = recipe.checkpoints.every
    return same | {"checkpoints": {"every": "steps" if every.unit == "steps" else encode(every)}}


def differences(trees: Mapping[str, Any], path: str = "") -> Differences:
    """Every key whose values are not all equal, of named trees of plain data.

    A branch that one of them lacks, or a list of another length, is one difference and not one for each of its leaves.
    """
    values = list(trees.values())
    if all(repr(value) == repr(values[0]) for value in values):
        return {}
    if all(isinstance(value, Mapping) for value in values):
        steps = {key: f"{path}.{key}" if path else str(key) for value in values for key in value}
        branches = {step: {name: tree.get(key) for name, tree in trees.items()} for key, step in steps.items()}
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        positions = range(len(values[0]))
        branches = {f"{path}[{at}]": {name: tree[at] for name, tree in trees.items()} for at in positions}
    else:
        return {path: dict(trees)}
    return {key: found for step, branch in branches.items() for key, found in differences(branch, step).items()}


def shown(value: Any) -> str:
    """A value as a recipe would have it, if it is not too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _listed(values: Mapping[str, Any]) -> str:
    """`16 in a and b, 8 in c`."""
    named: dict[str, list[str]] = {}
    for name, value in values.items():
        named.setdefault("nothing" if value is None else shown(value), []).append(name)
    return ", ".join(f"{value} in {' and '.join(names)}" for value, names in named.items())
