"""The architecture: its errors, what stages inherit, and that it is written back in full."""

import dataclasses
import json
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.model.config.braid_config import Architecture, BraidConfig, read_architecture
from braidlm.model.config.ranges import Range
from braidlm.model.config.registry import PARTS, inherit
from braidlm.model.config.strict import encode, part_of, plain_type
from braidlm.model.dropout import BlockDropout
from braidlm.model.routing.router import ExpertsConfig
from tests.tiny_models import tiny_config


def problems(data: Any) -> list[str]:
    with pytest.raises(BraidError) as caught:
        read_architecture(data)
    return str(caught.value).split("\n")


def blocks(data: dict[str, Any]) -> list[Any]:
    return [stage.options for stage in read_architecture(data).stages]


def test_a_misspelled_key_is_named_with_its_path() -> None:
    stages = ["block", "block", {"block": {"attention": {"head": 4}}}]
    assert problems({"stages": stages}) == [
        "model.stages[2].block.attention: unknown key 'head'. Did you mean 'heads'?"
    ]


def test_every_problem_is_named_at_once() -> None:
    data = {"stages": ["blok", {"block": {"layers": 0}}], "widht": 3, "context": "long", "positions": "rop"}
    assert sorted(problems(data)) == sorted(
        [
            "model: unknown key 'widht'. Did you mean 'width'?",
            "model.context: expected a whole number from 1 to 100000000, got 'long'",
            "model.positions: unknown positions 'rop'. Did you mean 'rope'?",
            "model.stages[0]: unknown stage 'blok'. Did you mean 'block'?",
            "model.stages[1].block.layers: expected a whole number from 1 to 1000, got 0",
        ]
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (3, "model: expected a mapping, got 3"),
        ({}, "model.stages: missing; it has no default"),
        ({"stages": []}, "model: stages: a model needs at least one stage, for example `- block`"),
        ({"stages": "block"}, "model.stages: expected a list, got 'block'"),
        ({"stages": ["block"], "width": 0}, "model.width: expected a whole number from 1 to 100000, got 0"),
        ({"stages": ["block"], "context": -1}, "model.context: expected a whole number from 1 to 100000000, got -1"),
        ({"stages": ["block"], "block": "rms"}, "model.block: expected a mapping, got 'rms'"),
        ({"stages": [3], "block": {"norm": "rms"}}, "model.stages[0]: expected a stage name or a mapping, got 3"),
        ({"stages": [None], "dropout": 0.1}, "model.stages[0]: expected a stage name or a mapping, got None"),
        ({"stages": [{}], "dropout": 0.1}, "model.stages[0]: expected one stage name with its options, got {}"),
        ({"stages": [{"block": 3}], "dropout": 0}, "model.stages[0].block: expected a mapping, got 3"),
        (
            {"stages": ["block"], "block": {"nrom": "rms"}},
            "model.stages[0].block: unknown key 'nrom'. Did you mean 'norm'?",
        ),
        (
            {"stages": ["block"], "positions": {"theta": 0}},
            "model.positions.theta: expected a number above 0 and at most 1e12, got 0",
        ),
        (
            {"stages": [{"block": {"dropout": {"attention": 1}}}]},
            "model.stages[0].block.dropout.attention: expected a number of at least 0 and below 1, got 1",
        ),
    ],
)
def test_each_problem_has_its_message(data: Any, text: str) -> None:
    assert problems(data) == [text]


def test_stages_inherit_the_block() -> None:
    data = {"stages": ["block", {"block": {"layers": 3}}], "block": {"norm": "layer", "attention": {"heads": 2}}}
    first, second = blocks(data)
    assert first.norm.kind == second.norm.kind == "layer"
    assert first.attention.options.heads == second.attention.options.heads == 2
    assert (first.layers, second.layers) == (1, 3)
    assert read_architecture(data).norm.kind == "layer"
    assert read_architecture({**data, "norm": "rms"}).norm.kind == "rms"


@pytest.mark.parametrize("own", ["swiglu", {"kind": "swiglu"}, {}, {"bias": True}])
def test_the_same_kind_refines_what_is_inherited(own: Any) -> None:
    for inherited in ({"kind": "swiglu", "hidden": 96}, {"hidden": 96}):
        (block,) = blocks({"stages": [{"block": {"feed": own}}], "block": {"feed": inherited}})
        assert block.feed.kind == "swiglu"
        assert block.feed.options.hidden == 96
        assert block.feed.options.bias == (own == {"bias": True})


@pytest.mark.parametrize("own", ["mlp", {"kind": "mlp"}])
def test_another_kind_replaces_what_is_inherited(own: Any) -> None:
    for inherited in ({"kind": "swiglu", "hidden": 96}, {"hidden": 96}, "swiglu"):
        (block,) = blocks({"stages": [{"block": {"feed": own}}], "block": {"feed": inherited}})
        assert block.feed.kind == "mlp"
        assert block.feed.options.hidden is None


def test_a_name_and_its_options_are_merged() -> None:
    assert inherit("mlp", {"bias": True}) == {"kind": "mlp", "bias": True}
    assert inherit({"kind": "a", "x": {"y": 1, "z": 2}}, {"x": {"y": 3}}) == {"kind": "a", "x": {"y": 3, "z": 2}}
    assert inherit(1, 2) == 2


@pytest.mark.parametrize("rates", [0.1, {"embedding": 0.3, "attention": 0.1, "residual": 0.1}])
def test_blocks_inherit_dropout_but_not_the_embeddings_rate(rates: Any) -> None:
    architecture = read_architecture({"stages": ["block"], "dropout": rates})
    assert architecture.stages[0].options.dropout == BlockDropout(0.1, 0.1)
    assert architecture.dropout.embedding == (0.1 if rates == 0.1 else 0.3)


def test_one_rate_given_lower_down_leaves_the_other() -> None:
    data = {"stages": [{"block": {"dropout": {"attention": 0.0}}}, "block"], "dropout": 0.1}
    assert [b.dropout for b in blocks(data)] == [BlockDropout(0.0, 0.1), BlockDropout(0.1, 0.1)]
    data = {"stages": ["block", {"block": {"dropout": 0.4}}], "dropout": 0.1, "block": {"dropout": {"residual": 0.2}}}
    assert [b.dropout for b in blocks(data)] == [BlockDropout(0.1, 0.2), BlockDropout(0.4, 0.4)]


def test_reading_leaves_the_data_alone() -> None:
    data = {"stages": ["block"], "block": {"norm": "layer"}, "dropout": {"embedding": 0.1}}
    before = json.dumps(data)
    read_architecture(data)
    assert json.dumps(data) == before


def values_for(hint: Any) -> st.SearchStrategy:
    """Values that fit a field of a part's Config."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*(values_for(arm) for arm in get_args(hint) if part_of(arm) is None))
    if isinstance(hint, type) and issubclass(hint, ExpertsConfig):
        few = st.integers(2, 5)
        return few | st.fixed_dictionaries(
            {"names": few, "router": st.fixed_dictionaries({"top_k": st.integers(1, 2)})}
        )
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        return st.lists(st.fixed_dictionaries(fields_of(item, required=True)), min_size=1, max_size=3)
    least = [limit.at_least for limit in getattr(hint, "__metadata__", ()) if isinstance(limit, Range)]
    hint = plain_type(hint)
    strategies = {
        str: st.sampled_from("abc"),
        bool: st.booleans(),
        int: st.integers(max([1, *filter(None, least)]), 8),
        float: st.floats(0.01, 0.9),
        type(None): st.none(),
    }
    return strategies[hint]


def fields_of(config: Any, required: bool) -> dict[str, st.SearchStrategy]:
    """Values for the fields of a dataclass that have no default, or for the others."""
    hints = get_type_hints(config, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: values_for(hints[field.name])
        for field in dataclasses.fields(config)
        if (field.default is missing and field.default_factory is missing) == required
    }


def readable(data: dict[str, Any]) -> Architecture:
    """The architecture, unless it has a flaw that independent values can have: sizes that do not divide."""
    try:
        return read_architecture(data)
    except BraidError as error:
        assume("must be a multiple of kv_heads" not in str(error))
        assume("does not divide into" not in str(error))
        raise


def parts_of(noun: str) -> st.SearchStrategy[dict[str, Any]]:
    """Any registered part of a kind with some of its options, as it is written."""

    def options(kind: str) -> st.SearchStrategy[dict[str, Any]]:
        config = PARTS[noun][kind].Config
        given = {"kind": st.just(kind), **fields_of(config, required=True)}
        return st.fixed_dictionaries(given, optional=fields_of(config, required=False))

    return st.sampled_from(list(PARTS[noun])).flatmap(options)


block_options = st.fixed_dictionaries(
    {},
    optional={
        "norm": parts_of("norm"),
        "attention": parts_of("attention"),
        "feed": parts_of("feed-forward"),
        "dropout": st.floats(0, 0.9) | st.fixed_dictionaries({}, optional={"residual": st.floats(0, 0.9)}),
    },
)
layers = st.fixed_dictionaries({}, optional={"layers": st.integers(1, 4)})
architectures = st.fixed_dictionaries(
    {
        "stages": st.lists(
            st.just("block") | st.builds(lambda a, b: {"block": {**a, **b}}, block_options, layers),
            min_size=1,
            max_size=3,
        )
    },
    optional={
        "width": st.integers(1, 99),
        "block": block_options,
        "positions": parts_of("positions"),
        "head": parts_of("head"),
        "embedding": parts_of("embedding"),
        "initialisation": parts_of("initialisation"),
        "norm": parts_of("norm"),
        "dropout": st.floats(0, 0.9),
        "tie_embeddings": st.booleans(),
    },
)


@given(architectures)
def test_an_architecture_is_written_in_full_and_read_back_the_same(data: dict[str, Any]) -> None:
    architecture = readable(data)
    written = json.loads(json.dumps(encode(architecture)))
    assert read_architecture(written) == architecture
    assert encode(read_architecture(written)) == written
    assert set(written) == {f.name for f in dataclasses.fields(Architecture)}


@settings(max_examples=25)
@given(architectures)
def test_the_configuration_survives_json(data: dict[str, Any]) -> None:
    config = BraidConfig(readable(data), vocab_size=11)
    again = BraidConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.architecture == config.architecture
    assert again.decoded == config.decoded
    assert again.vocab_size == 11


def test_other_tools_find_the_names_they_look_for() -> None:
    config = tiny_config(stages=["block", {"block": {"layers": 3}}])
    assert config.hidden_size == 16
    assert config.num_hidden_layers == 4
    assert config.num_attention_heads == 4
    assert config.max_position_embeddings == 32
    assert config.tie_word_embeddings is True
    assert config.eos_token_id is config.bos_token_id is config.pad_token_id is None
    assert config.auto_map["AutoModelForCausalLM"] == "modeling_braid.BraidForCausalLM"


def test_the_architecture_wins_over_names_derived_from_it() -> None:
    config = BraidConfig({"stages": ["block"], "tie_embeddings": False}, hidden_size=3, tie_word_embeddings=True)
    assert config.hidden_size == 256
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({"stages": ["block"], "zzz": 1}, {f.name for f in dataclasses.fields(Architecture)} | {"block", "vocab_size"}),
        (
            {"stages": [{"parallel": {"paths": 2, "zzz": 1}}]},
            {"paths", "layers", "join", "to", "stacked", "share", "norm", "attention", "feed", "dropout"},
        ),
        ({"stages": ["block"], "norm": {"kind": "rms", "zzz": 1}}, {"kind", "eps"}),
    ],
)
def test_an_unknown_key_is_answered_with_every_key_that_exists(data: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(BraidError) as caught:
        read_architecture(data)
    assert set(str(caught.value).split("There are: ")[1].rstrip(".").split(", ")) == keys
