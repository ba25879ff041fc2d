"""A recipe: one file that says everything about a run, decoded strictly."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.models.presets import RecipeModel, decode_model, is_preset
from braidlm.core.recipes import compose_recipe
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.ranges import Seed
from braidlm.model.config.strict import decode, encode
from braidlm.training.config import CheckpointConfig, LogConfig, SampleConfig, TrainingConfig, ValidationConfig
from braidlm.training.features.feature import asked_features, feature_problems


@dataclass
class Recipe:
    """Everything about a run."""

    data: DataConfig
    training: TrainingConfig
    name: str = "run"
    """The run's name; its folder is `runs/NAME` unless `out` says otherwise."""
    out: str | None = None
    """The run's folder."""
    seed: Seed = 1
    """Fixes weights, order of data and dropout."""
    model: Any = None
    """The architecture; see `braid list parts`."""
    start_from: str | None = None
    """A model whose weights the training begins with; it brings its architecture, unless `model` is given, and its
    tokenizer for sources that are prepared."""
    decoder: str | None = None
    """A decoder of transformers to train as it is, in place of a Braid model: its folder, its name on the Hub, or a
    folder of gates or of LoRA adapters. It brings its tokenizer for sources that are prepared."""
    licence: str | None = None
    """The model's licence for its card, as the Hub writes it: apache-2.0, mit, cc-by-4.0."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_folder_name("name", self.name)
        if errors := [*self._problems(), *feature_problems(self.training, self.data)]:
            raise errors[0] if len(errors) == 1 else BraidError("\n".join(line for e in errors for line in e.lines()))

    def _problems(self) -> Iterator[BraidError]:
        """Keys that do not go together; features say it of theirs themselves."""
        training = self.training
        if training.lora is not None and self.start_from is None and self.decoder is None:
            yield BraidError(
                "training.lora adapts a trained model",
                todo="Name one: start_from=MODEL, or leave out training.lora to train a new one.",
            )
        if training.lora is not None and training.optimizer.kind == "muon":
            yield BraidError(
                "training.lora: Muon trains whole matrices, and adapters are two thin ones whose product counts",
                todo="Leave out training.optimizer.kind, so that AdamW trains the adapters.",
            )
        if self.decoder is None:
            if training.precision == "pure_bf16":
                yield BraidError(
                    "training.precision: pure_bf16 is for decoders; Braid's models train in float32 or bf16"
                )
            return
        if self.start_from is not None:
            yield BraidError("start_from is a Braid model, and decoder is one of transformers: give one of them")
        if training.lora is not None and training.train == "gates":
            yield BraidError("training.lora trains adapters and gates, and training.train: gates only these: give one")
        given = {
            "data.chunking": chunkings[self.data.chunking.kind].keeps_rows,
            "training.routing_losses": training.routing_losses is not None,
            "training.freeze": training.freeze,
            "training.graph": training.graph,
        }
        asked = asked_features(training, self.data).values()
        given |= {one.name: not one.for_decoders and one.is_given(training) for one in asked if one.name}
        if named := [name for name, is_given in given.items() if is_given]:
            yield BraidError(
                f"{', '.join(named)}: only Braid's models have this, and a decoder of transformers is trained as it is",
                todo="Leave it out; `training.train: gates` and `training.lora` say what of a decoder is trained.",
            )

    @property
    def folder(self) -> str:
        return self.out or f"runs/{self.name}"


@dataclass
class LoadedRecipe:
    """A recipe with its model decoded."""

    recipe: Recipe
    model: RecipeModel | None
    """None where the model is the one to start from, or a decoder."""

    @property
    def architecture(self) -> Architecture | None:
        return None if self.model is None else self.model.architecture

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None else self.model.vocab_size

    def as_dict(self) -> dict[str, Any]:
        """The resolved recipe, as written into the run folder."""
        return encode(self.recipe) | ({} if self.model is None else {"model": encode(self.model)})


def load_recipe(name: str, overrides: list[str] | None = None) -> LoadedRecipe:
    """Compose and decode a recipe; every problem in it is in one error."""
    return decode_recipe(compose_recipe(name, overrides), name)


def decode_recipe(data: dict[str, Any], name: str = "NAME") -> LoadedRecipe:
    """A recipe from plain data, which was composed from the recipe of this name."""
    if is_preset(data):
        advice = f"Use it in a recipe of a run: `defaults: [/models/{Path(name).stem}@model, _self_]`."
        raise BraidError("this is a model without data and training", name, advice)
    problems: list[str] = []
    decoded, model = None, data.get("model")
    if isinstance(model, (dict, RecipeModel)):
        with collecting(problems):
            decoded = decode_model(model)
        if problems and data.get("start_from"):
            problems.append("model: the one to start_from has its own; leave `model` out, or give the whole of it")
    elif model is not None:
        problems.append(f"model: expected a mapping, got '{model}'")
    elif not data.get("start_from") and not data.get("decoder"):
        problems.append("model: missing; give an architecture, or start_from a model folder, or a decoder")
    if model is not None and data.get("decoder"):
        problems.append("decoder: brings its own architecture; leave out model")
    recipe = None
    with collecting(problems):
        recipe = decode(Recipe, {key: value for key, value in data.items() if key != "model"})
    if problems or recipe is None:
        raise BraidError("\n".join(problems), todo="Nothing was started. `braid show RECIPE` checks a recipe.")
    return LoadedRecipe(recipe, decoded)
