"""What several recipes have in common and what not; those that are compared must see identical batches."""

from collections.abc import Mapping
from typing import Any

from braidlm.core.changes import as_yaml
from braidlm.core.differences import differences
from braidlm.core.errors import BraidError
from braidlm.model.config.strict import encode
from braidlm.training.recipe import LoadedRecipe
from braidlm.training.start_from import data_of


def check_same_batches(recipes: Mapping[str, LoadedRecipe]) -> None:
    """Refuse recipes that would not be trained, step by step, on the same batches."""
    # A batch is cut where a checkpoint by words or tokens is due; those by steps cut nothing.
    cut = any(loaded.recipe.checkpoints.every.unit != "steps" for loaded in recipes.values())
    different = differences({name: _what_makes_batches(loaded, cut) for name, loaded in recipes.items()})
    if different:
        lines = [f"{path}: {_listed(values)}" for path, values in different.items()]
        raise BraidError(
            "\n  ".join(["these recipes would not see the same batches:", *lines]),
            todo="Nothing was started. An override is for all recipes, so that `KEY=VALUE` makes them equal.",
        )


def _what_makes_batches(loaded: LoadedRecipe, cut: bool) -> dict[str, Any]:
    """The values of a recipe that decide on its batches; `cut` says whether checkpoints may."""
    recipe = loaded.recipe
    data = {key: value for key, value in encode(data_of(recipe)).items() if key != "cache"}
    training = {key: encode(getattr(recipe.training, key)) for key in ("batch", "accumulation", "lengths", "budget")}
    held_out = {"tokens": recipe.validation.tokens, "half": recipe.validation.half}
    same = {"seed": recipe.seed, "data": data, "training": training, "validation": held_out}
    return same | ({"checkpoints": {"every": encode(recipe.checkpoints.every)}} if cut else {})


def _listed(values: Mapping[str, Any]) -> str:
    """`16 in a and b, 8 in c`."""
    named: dict[str, list[str]] = {}
    for name, value in values.items():
        named.setdefault("nothing" if value is None else _quoted(value), []).append(name)
    return ", ".join(f"{value} in {' and '.join(names)}" for value, names in named.items())


def _quoted(value: Any) -> str:
    """As a recipe has it; a phrase such as `1M words to 10M, then 10M` in quotes, since commas part values too."""
    return f"'{value}'" if isinstance(value, str) and ", " in value else as_yaml(value)
