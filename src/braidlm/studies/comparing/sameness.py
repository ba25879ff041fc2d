"""What several recipes have in common and what not; those that are compared must see identical batches."""

from collections.abc import Mapping
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import encode
from braidlm.training.recipe import LoadedRecipe
from braidlm.training.start_from import data_of

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
    if recipe.checkpoints.every.unit != "steps":  # a batch is cut where such a checkpoint is due
        same["checkpoints"] = {"every": encode(recipe.checkpoints.every)}
    return same


def differences(trees: Mapping[str, Any]) -> Differences:
    """Every key whose values are not all equal, of named trees of plain data."""
    flat = {name: dict(_leaves(tree)) for name, tree in trees.items()}
    paths = dict.fromkeys(path for leaves in flat.values() for path in leaves)
    values = {path: {name: leaves.get(path) for name, leaves in flat.items()} for path in paths}
    return {path: each for path, each in values.items() if len({repr(value) for value in each.values()}) > 1}


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The values of a tree with their paths; an empty branch is a value."""
    if isinstance(tree, Mapping) and tree:
        items = [(f"{path}.{key}" if path else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and tree:
        items = [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return [(path, tree)]
    return [leaf for key, value in items for leaf in _leaves(value, key)]


def _listed(values: Mapping[str, Any]) -> str:
    """`16 in a and b, 8 in c`."""
    named: dict[str, list[str]] = {}
    for name, value in values.items():
        named.setdefault("nothing" if value is None else str(value), []).append(name)
    return ", ".join(f"{value} in {' and '.join(names)}" for value, names in named.items())
