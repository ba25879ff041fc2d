"""From a recipe's name to a model's configuration, whether the recipe is a model preset or that of a whole run."""

from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.recipes import compose_recipe
from braidlm.model.config.architecture import Architecture, read_architecture
from braidlm.model.config.braid_config import BraidConfig


def config_from(name: str, overrides: list[str] | None = None, vocab_size: int | None = None) -> BraidConfig:
    """The configuration that a recipe describes; `vocab_size` is for one that leaves it to the tokenizer."""
    data = compose_recipe(name, overrides)
    architecture, given = read_model(data, name)
    size = given or vocab_size
    if size is None:
        key = "vocab_size" if is_preset(data) else "model.vocab_size"
        raise BraidError(
            "the vocabulary's size is not known: this recipe takes it from the tokenizer", name, f"Give {key}=N."
        )
    return BraidConfig(architecture, size)


def is_preset(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a model alone (its keys at the top) and not a run (`model`, `data`, `training`)."""
    return "stages" in data


def read_model(data: dict[str, Any], name: str) -> tuple[Architecture, int | None]:
    """The architecture of a composed recipe, and its vocabulary's size where that is given."""
    preset = is_preset(data)
    if preset and "model" in data:
        raise BraidError("a model preset has its keys at the top, not under 'model'", name, "Write width=N.")
    model = data if preset else data.get("model")
    if not isinstance(model, dict):
        raise BraidError("this recipe describes no model: it has neither 'stages' nor 'model'", name)
    model = dict(model)
    vocab_size = model.pop("vocab_size", None)
    problems = []
    if vocab_size is not None and (not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1):
        key = "vocab_size" if preset else "model.vocab_size"
        problems.append(f"{key}: expected a whole number above 0, got {vocab_size!r}")
    try:
        architecture = read_architecture(model, "" if preset else "model")
    except BraidError as error:
        problems.append(error.what)
    if problems:
        raise BraidError("\n".join(problems), name)
    return architecture, vocab_size
