"""Every number of every configuration declares its range: NaN, infinity and absurd values are refused at once."""

import dataclasses
import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from braidlm.core.catalogue import registries
from braidlm.core.decoding.decoder import Sampling
from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.order import orders, pacings
from braidlm.data.packing.shards import Limit
from braidlm.data.sources.format import ReadOptions
from braidlm.evals.evaluated_model import Settings
from braidlm.model.config.braid_config import Architecture, BraidConfig, read_architecture
from braidlm.model.config.ranges import MAX_INTEGER, MAX_ITEMS, Range
from braidlm.model.config.strict import NUMBERS, decode, part_of, plain_type, range_of, type_hints
from braidlm.model.stages import BlockConfig
from braidlm.studies.study import Study
from braidlm.training.features.averaging import averages
from braidlm.training.features.extra_losses import extra_losses
from braidlm.training.features.modules import dropout_schedules
from braidlm.training.recipe import Recipe
from braidlm.training.schedules import schedules
from braidlm.training.step.optimizers.contract import optimizers

ROOTS = [Architecture, BlockConfig, Recipe, Study, Settings, Sampling, ReadOptions, Limit]
OF_TRAINING = [chunkings, orders, pacings, schedules, dropout_schedules, optimizers, averages, extra_losses]
REGISTRIES = [*registries().values(), *OF_TRAINING]


def configs() -> Iterator[type]:
    """Every configuration class: those above, those of parts, and those inside of others."""
    waiting: list[Any] = [*ROOTS]
    for registry in REGISTRIES:
        waiting += [registry[name].Config for name in registry if hasattr(registry[name], "Config")]
    seen: set[type] = set()
    while waiting:
        config = waiting.pop()
        if config not in seen:
            seen.add(config)
            yield config
            waiting += [leaf for hint in type_hints(config).values() for leaf in leaves(hint) if _is_config(leaf)]


def leaves(hint: Any) -> Iterator[Any]:
    """The types inside of an annotation, with their marks."""
    if get_origin(hint) is Annotated and part_of(hint) is None and plain_type(hint) in NUMBERS:
        yield hint
    elif get_origin(hint) in (Union, types.UnionType, Annotated, list, tuple, dict):
        for inner in get_args(hint):
            yield from leaves(inner)
    else:
        yield hint


def _is_config(leaf: Any) -> bool:
    return isinstance(leaf, type) and dataclasses.is_dataclass(leaf) and leaf.__module__.startswith("braidlm.")


def numbers() -> Iterator[Any]:
    for config in sorted(configs(), key=lambda config: (config.__module__, config.__qualname__)):
        for name in (field.name for field in dataclasses.fields(config)):
            for leaf in leaves(type_hints(config)[name]):
                if plain_type(leaf) in NUMBERS:
                    module = config.__module__.removeprefix("braidlm.")
                    yield pytest.param(leaf, id=f"{module}:{config.__qualname__}.{name}")


@pytest.mark.parametrize("hint", numbers())
def test_a_number_has_a_range_and_nothing_absurd_is_in_it(hint: Any) -> None:
    declared = range_of(hint)
    assert declared is not None, "declare the range: `Annotated[int, Range(...)]`, or a name of model/config/ranges.py"
    absurd: list[Any] = [-1, 2**63, 10**400, -(10**400), "nan", "many", True, [1], None]
    if plain_type(hint) is float:
        absurd += [math.nan, math.inf, -math.inf, "inf", "-inf", 1e300]
    for value in absurd:
        with pytest.raises(BraidError, match=r"key: expected a (whole )?number"):
            decode(hint, value, "key")


def test_a_field_with_a_number_was_found_in_every_kind_of_configuration() -> None:
    found = {param.id for param in numbers()}
    some = {
        "model.norms:RMSNorm.Config.eps",
        "training.step.optimizers.contract:OptimizerConfig.betas",
        "studies.study:Study.epochs",
    }
    assert some <= found
    assert len(found) > 60


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ({"stages": [{"block": {"layers": 10**9}}]}, "stages[0].block.layers"),
        ({"stages": [{"block": {"feed": {"experts": 10**6}}}]}, "stages[0].block.feed.experts.names"),
        ({"stages": [{"block": {"feed": {"experts": {"names": list(map(str, range(10**6)))}}}}]}, "experts.names"),
        ({"stages": [{"parallel": {"paths": 10**9}}]}, "stages[0].parallel.paths"),
        ({"stages": [{"parallel": {"paths": list(map(str, range(10**6)))}}]}, "stages[0].parallel.paths"),
        ({"stages": ["block"] * 10**6}, "stages"),
        ({"stages": [{"parallel": {"paths": 1000, "layers": 1000, "stacked": False}}]}, "stages"),
        ({"stages": [{"block": {"layers": 1000}}] * 1000}, "stages"),
        ({"stages": ["block"], "width": 10**12}, "width"),
        ({"stages": ["block"], "block": {"attention": {"heads": 2**31}}}, "attention.heads"),
    ],
    ids=range(10),
)
def test_an_absurd_model_is_refused_before_anything_is_built(model: dict[str, Any], where: str) -> None:
    with pytest.raises(BraidError) as caught:
        read_architecture(model)
    assert where in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("size", [0, -1, 10**9, 2**63, 1.5, None])
def test_a_vocabulary_without_tokens_or_of_absurd_size_is_refused(size: Any) -> None:
    with pytest.raises(BraidError, match="vocab_size: expected a whole number from 1 to"):
        BraidConfig({"stages": ["block"]}, vocab_size=size)


def test_what_is_built_in_python_is_checked_when_it_becomes_a_model() -> None:
    architecture = read_architecture({"stages": [{"parallel": {"paths": 2, "join": "gumbel_v1"}}]})
    architecture.stages[0].options.join.options.temperature = math.nan
    architecture.dropout.embedding = 1.0
    with pytest.raises(BraidError) as caught:
        BraidConfig(architecture)
    assert str(caught.value).split("\n") == [
        "model.stages[0].parallel.join.temperature: expected a number above 0 and at most 1e9, got nan",
        "model.dropout.embedding: expected a number of at least 0 and below 1, got 1.0",
    ]


def test_ranges_in_words() -> None:
    assert str(Range(at_least=1, at_most=MAX_ITEMS)) == "from 1 to 4096"
    assert str(Range(above=0, below=1)) == "above 0 and below 1"
    assert str(Range(at_least=0, below=1.5)) == "of at least 0 and below 1.5"
    assert str(Range(above=0.0, at_most=1e12)) == "above 0 and at most 1e12"
    assert MAX_INTEGER in Range(at_least=1)
    assert math.nan not in Range()
    assert math.inf not in Range(above=0)
