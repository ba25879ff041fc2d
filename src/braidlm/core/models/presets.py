"""From a recipe's name to a model's configuration, whether the recipe is a model preset or that of a whole run."""

from dataclasses import dataclass
from typing import Any

from braidlm.core.errors import BraidError, collecting, errors_at
from braidlm.core.recipes import compose_recipe
from braidlm.model.config.braid_config import Architecture, BraidConfig, read_architecture
from braidlm.model.config.ranges import VocabularySize
from braidlm.model.config.strict import decode, encode


@dataclass(frozen=True)
class RecipeModel:
    """A recipe's `model`: decoded once, and handed on as it is."""

    architecture: Architecture
    vocab_size: int | None
    """None leaves it to the tokenizer."""

    def to_shorthand(self) -> dict[str, Any]:
        """The plain data that is written into a resolved recipe."""
        return {"vocab_size": self.vocab_size} | encode(self.architecture)


def config_from(name: str, overrides: list[str] | None = None, vocab_size: int | None = None) -> BraidConfig:
    """The configuration that a recipe describes; `vocab_size` is for one that leaves it to the tokenizer."""
    data = compose_recipe(name, overrides)
    model = read_model(data, name)
    if (size := model.vocab_size or vocab_size) is None:
        key = "vocab_size" if is_preset(data) else "model.vocab_size"
        what = "the vocabulary's size is not known: this recipe takes it from the tokenizer"
        raise BraidError(what, name, f"Give {key}=N.")
    return BraidConfig(model.architecture, size)


def is_preset(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a model alone (its keys at the top) and not a run (`model`, `data`, `training`)."""
    return "stages" in data


def read_model(data: dict[str, Any], name: str) -> RecipeModel:
    """The model of a composed recipe."""
    preset = is_preset(data)
    if preset and "model" in data:
        raise BraidError("a model preset has its keys at the top, not under 'model'", name, "Write width=N.")
    model = data if preset else data.get("model")
    if not isinstance(model, dict):
        raise BraidError("this recipe describes no model: it has neither 'stages' nor 'model'", name)
    with errors_at(name):
        return decode_model(model, "" if preset else "model")


def decode_model(model: "dict[str, Any] | RecipeModel", where: str = "model") -> RecipeModel:
    """A recipe's `model` decoded, with every problem in one error; what is decoded already stays as it is."""
    if isinstance(model, RecipeModel):
        return model
    problems: list[str] = []
    vocab_size = model.get("vocab_size")
    with collecting(problems):
        decode(VocabularySize | None, vocab_size, f"{where}.vocab_size" if where else "vocab_size")
    with collecting(problems):
        architecture = read_architecture({k: v for k, v in model.items() if k != "vocab_size"}, where)
    if problems:
        raise BraidError("\n".join(problems))
    return RecipeModel(architecture, vocab_size)
