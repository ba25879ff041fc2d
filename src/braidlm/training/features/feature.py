"""The contract of training features: what a recipe adds to the plain loop of batch, loss and update.

A feature is a class in a file of this folder, registered under the recipe key that asks for it and found by scanning.
Its `Keys` are a dataclass whose fields are keys of the recipe's `training` section:

    @feature("training.lengths")
    class Lengths(Feature):
        @dataclass
        class Keys:
            lengths: list[ShorterRows] = field(default_factory=list)

The loop calls the hooks of all features that a recipe asks for. None of them may wait for the device, but where it is
said. A step may be captured as a CUDA graph: `inputs`, `own_pass`, `read_pass`, `end_gradients` and `end_update` are
called while it is recorded and not when it is replayed, so that what changes from step to step must be in tensors that
stay where they are.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import transformers
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import OpenData
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import decode
from braidlm.training.step.parallel import Rank

features = Registry("training feature")
Part = tuple[float, int]  # a share of the training, and the length of its sequences
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What features are made from; there is no data where steps are run without a loop."""

    model: "transformers.PreTrainedModel"
    training: Any  # the recipe's `training` section, which has the keys of all features
    rank: Rank
    dtype: torch.dtype
    seed: int = 0
    data: DataConfig | None = None  # the recipe's `data` section
    opened: OpenData | None = None


class Feature:
    """The base class. A hook that a feature does not need does nothing."""

    name: ClassVar[str] = ""  # the recipe key that asks for the feature
    Keys: ClassVar[Any] = None
    order: ClassVar[int] = 0  # features act in this order, and those of one number by their names
    excludes: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """The features that it cannot be used with, by name, each with why (or "") and what to do."""
    for_decoders: ClassVar[bool] = True  # whether decoders of transformers have it too, and not only Braid's models
    file: ClassVar[str] = ""
    """The file of a saved state that holds `state()`; with `{rank}` in its name, each process has its own."""
    capturable: bool = True
    """Whether it never waits for the device, so that a step with it can be replayed as a graph."""
    draws_rows: bool = False
    """Whether steps differ in their number of rows, of which `training.batch` are the most that one pass has."""
    plain_pass: bool = False
    """Whether it needs the model's plain pass, since kernels keep less or see one chunk alone."""

    # Before anything starts

    @classmethod
    def is_given(cls, training: Any) -> bool:
        """Whether one of its keys is not at its default."""
        return any(getattr(training, key) != value for key, value in _defaults(cls.Keys).items())

    @classmethod
    def is_asked(cls, training: Any, data: DataConfig | None) -> bool:
        """Whether a recipe uses it, which by default its keys say."""
        return cls.is_given(training)

    @classmethod
    def asked(cls, training: Any, data: DataConfig | None) -> "dict[str, type[Feature]]":
        """The features of a recipe by their names in errors."""
        return {cls.name: cls} if cls.is_asked(training, data) else {}

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        """What is wrong with its keys in a recipe that asks for it."""
        return ()

    @classmethod
    def check_model(cls, model: Any, training: Any, data: DataConfig) -> None:
        """Refuse a Braid model that it cannot be used with; the weights are not loaded yet."""

    @classmethod
    def make(cls, setup: Setup) -> "Sequence[Feature]":
        """The features of a run."""
        return [cls(setup)] if cls.is_asked(setup.training, setup.data) else []  # type: ignore[call-arg]

    def warnings(self) -> Iterable[str]:
        """What the user should know before the first step."""
        return ()

    def sources(self) -> list[dict[str, Any]]:
        """What the lineage of the trained model says of other models that it used."""
        return []

    # The length of sequences

    def text_length(self, length: int) -> int:
        """How many tokens of text a sequence of `length` tokens has."""
        return length

    def attended(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of the training, each with the length of the plain sequences whose attention costs as much."""
        return parts

    def row_length(self, share: float) -> int | None:
        """The length of rows when this share of the training is done; None for whole sequences."""
        return None

    def read_loader(self, loader: Loader) -> None:
        """Called once, with the loader at its beginning."""

    # Each step, in this order

    def find_parameters(self) -> None:
        """Called once, when the weights lie where they are trained: parameters that were seen before may be others."""

    def begin_step(self, step: int, share: float) -> bool:
        """Called before a step, with its number from 0 and the share of the training that is done. True if this changes
        what a step computes other than through tensors: a captured step is recorded again."""
        return False

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        """This process's rows as they are trained; `share` of the training is done with them."""
        return batch

    def inputs(self, index: int, parts: int) -> dict[str, Any]:
        """What the objective reads beside the tokens of micro-batch `index` of so many `parts`."""
        return {}

    def own_pass(self, run: Any, tokens: Tensor, labels: Tensor, count: Tensor) -> Any:
        """The `BatchLosses` of a micro-batch whose gradients the feature has computed and keeps until `end_gradients`;
        None where they are computed as ever. `run` is the objective; `count` labels are in the batch."""
        return None

    def read_pass(self, found: Any) -> None:
        """Called with the `BatchLosses` of each micro-batch."""

    def end_gradients(self) -> None:
        """Called before the update of the weights, which reads the gradients."""

    def end_update(self) -> None:
        """Called after the update of the weights, inside of a captured step."""

    def end_step(self, share: float) -> None:
        """Called after a step, captured or not; `share` of the training is done with it."""

    # Evaluating, saving, going on

    def readings(self) -> dict[str, float]:
        """Numbers that the run's metrics record beside the loss; it may wait for the device."""
        return {}

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Inside of the block the model is as it is validated, sampled and saved."""
        return contextlib.nullcontext()

    def told(self) -> dict[str, Any]:
        """What lineage and card say of the training so far; what is None is left out."""
        return {}

    def facts(self) -> dict[str, int]:
        """What is said of a model that is not as the last step left it, beside its scores and in its lineage."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a run that goes on needs."""
        return {}

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Take the tensors of a saved state's `file`."""

    def check_checkpoint(self, folder: Path) -> None:
        """Refuse to go on from a checkpoint that was made otherwise."""

    def budget_grew(self) -> None:
        """Called where a run goes on with a larger budget than its steps so far had."""


def feature(name: str) -> Callable[[type[T]], type[T]]:
    """Decorator that registers a feature under the recipe key that asks for it."""

    def add(cls: type[T]) -> type[T]:
        cls.name = name  # type: ignore[attr-defined]
        return features.register(name)(cls)

    return add


@cache
def _defaults(keys: Any) -> dict[str, Any]:
    """The keys of a feature as they are where a recipe does not give them."""
    return {} if keys is None else vars(decode(keys, {}))


def with_features(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass with the keys of all features behind its own."""
    keys = [found.Keys for name in features if (found := features[name]).Keys is not None]
    names = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return dataclass(type(cls.__name__, (*reversed(keys), cls), names))


def asked_features(training: Any, data: DataConfig | None) -> dict[str, type[Feature]]:
    """The features that a recipe asks for, by their names in errors."""
    return {name: found for key in features for name, found in features[key].asked(training, data).items()}


def feature_problems(training: Any, data: DataConfig) -> Iterator[BraidError]:
    """What is wrong with the features of a recipe: each by itself, and those that do not go together."""
    asked = asked_features(training, data)
    for name, found in asked.items():
        yield from found.problems(training, data)
        for other in filter(asked.__contains__, found.excludes):
            why, todo = found.excludes[other]
            yield BraidError(f"{name}: {why}" if why else f"{name} and {other} do not go together", todo=todo)


def make_features(setup: Setup) -> list[Feature]:
    """The features of a run, in the order in which they act."""
    made = [one for name in features for one in features[name].make(setup)]
    return sorted(made, key=lambda one: one.order)


@contextlib.contextmanager
def evaluating(made: Iterable[Feature]) -> Iterator[None]:
    """Inside of the block the model is as it is validated, sampled and saved."""
    with contextlib.ExitStack() as stack:
        for one in made:
            stack.enter_context(one.evaluating())
        yield
