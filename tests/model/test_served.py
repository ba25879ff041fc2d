"""Attention by another library's function: rows of several texts, layers of one shape, and what cannot be served."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from braidlm.model.attention.backend import common_shape
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM, BraidModel
from braidlm.model.routing.router import ScoreLinear
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model

STAND_IN = "stand_in_of_a_server"
LENGTHS = (7, 1, 12, 4)
"""Of the texts in a row."""
NARROW = {"attention": {"heads": 2}, "feed": {"hidden": 12}}
EXPERTS = {"names": 3, "router": {"top_k": 2}}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"block": {"attention": {"heads": 4, "kv_heads": 2}}},
    "gpt2": {"positions": "learned", "block": {"norm": "layer", "attention": {"bias": True}, "feed": {"kind": "mlp"}}},
    "window": {"stages": [{"block": {"attention": {"window": 3}}}, "block"]},
    "head sizes": {"stages": [{"block": {"attention": {"heads": 3, "head_dim": 6}}}, "block"]},
    "queries per key": {
        "stages": [
            {"block": {"attention": {"heads": 8, "kv_heads": 1, "head_dim": 2}}},
            {"block": {"attention": {"heads": 6, "kv_heads": 3, "head_dim": 4}}},
        ]
    },
    "paths": {
        "stages": [
            "block",
            {"project": {"to": 8}},
            {"parallel": {"layers": 2, "paths": 2, **NARROW, "join": "shared_linear", "to": 16}},
            "block",
        ]
    },
    "paths of two shapes": {
        "stages": [
            {"parallel": {"layers": 2, "paths": {"deep": {"depth": 4}, "wide": {"attention": {"heads": 8}}}}},
        ]
    },
    "moep": {
        "positions": "learned",
        "stages": [
            "block",
            {"project": {"to": 8, "experts": 4}},
            {"parallel": {"layers": 2, "paths": 4, **NARROW, "join": {"kind": "routed", "top_k": 2}}},
            {"project": {"to": 16, "experts": 4}},
        ],
    },
    "sublayers": {"stages": [{"parallel": {"layers": 2, "paths": 3, "join": {"kind": "routed", "per": "sublayer"}}}]},
    "feed experts": {"block": {"feed": {"experts": EXPERTS}}},
    "attention experts": {"block": {"attention": {"experts": EXPERTS}, "feed": {"experts": EXPERTS}}},
    "mixture of heads": {
        "stages": [
            {
                "block": {
                    "attention": {"heads": 2, "kv_heads": 1, "head_dim": 8, "experts": {"names": 4, "keys": "shared"}}
                }
            },
            {"block": {"attention": {"heads": 2, "head_dim": 8, "experts": {"names": 4, "keys": "stream"}}}},
            "block",
        ]
    },
    "shared": {"stages": [{"block": {"layers": 3, "share": "blocks"}}]},
    "low rank": {"stages": [{"block": {"layers": 3, "share": {"kind": "feeds", "lora": 2}}}]},
    "gates": {"gates": {"kind": "matrix"}},
    "untied": {"tie_embeddings": False},
}


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[tuple[int, int | None, float]]]:
    """The layer, window and scale of every call of the stand-in, which knows itself which token is of which text."""
    made: list[tuple[int, int | None, float]] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, text_T: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        scale, window = options["scaling"], options["sliding_window"]
        made.append((module.layer_idx, window, scale))
        shape = (module.config.num_attention_heads, module.config.num_key_value_heads, module.config.head_dim)
        assert (query.shape[1], key.shape[1], query.shape[3]) == shape
        position = torch.arange(len(text_T))
        distance = position[:, None] - position
        seen = (text_T[:, None] == text_T) & (distance >= 0) & (distance < (window or len(text_T)))
        options = {"attn_mask": seen, "scale": scale, "enable_gqa": True}
        output = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return output.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(STAND_IN, attend)
    yield made
    del ALL_ATTENTION_FUNCTIONS._global_mapping[STAND_IN]


def served(model: BraidForCausalLM, texts: list[Tensor]) -> Tensor:
    """The logits of texts, in one row without any padding or mask."""
    model.set_attn_implementation(STAND_IN)
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    text_T = torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts)])
    with torch.no_grad():
        row = torch.cat(texts)[None]
        hidden = model.model(row, position_ids=positions[None], use_cache=False, return_dict=False, text_T=text_T)[0]
        return model.head(hidden)[0]  # type: ignore[no-any-return]


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [random_ids(1, length, seed)[0] for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("name", SERVED)
def test_a_row_of_texts_has_the_logits_of_each_alone(name: str, calls: list[Any]) -> None:
    model, texts = tiny_model(**SERVED[name]), texts_of()
    with torch.no_grad():
        alone = torch.cat([model(text[None]).logits[0] for text in texts])
    assert not calls
    torch.testing.assert_close(served(model, texts), alone, atol=1e-5, rtol=1e-4)
    # Every use of attention has layers of its own, in the order of the cache's slots, whatever it shares.
    assert [layer for layer, _, _ in calls] == list(range(model.config.num_hidden_layers))
    assert [window for _, window, _ in calls] == model.config.served_attention.windows


@pytest.mark.parametrize("name", ["paths", "attention experts"])
def test_rows_longer_than_the_context_and_than_one_dispatch(name: str) -> None:
    model, texts = tiny_model(positions="learned", **SERVED[name]), texts_of((30, 31, 29, 32))
    with torch.no_grad():
        alone = torch.cat([model(text[None]).logits[0] for text in texts])
    torch.testing.assert_close(served(model, texts), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_the_configuration_says_what_a_server_reads(name: str) -> None:
    config = tiny_model(**SERVED[name]).config
    plain = config.num_hidden_layers
    assert plain == config.decoded.depth
    assert not hasattr(config, "layer_types")
    again = type(config)(**config.to_dict())
    assert again.to_dict() == config.to_dict()
    again._attn_implementation = STAND_IN
    model = BraidModel._from_config(again, attn_implementation=STAND_IN)
    shape = common_shape(model.attentions)
    assert (again.num_attention_heads, again.num_key_value_heads, again.head_dim) == shape
    assert again.num_hidden_layers == len(again.layer_types) == len(model.attention_layers)
    assert [layer.layer_idx for layer in model.attention_layers] == list(range(again.num_hidden_layers))
    assert again.to_dict()["num_hidden_layers"] == plain
    again._attn_implementation = "sdpa"
    assert again.num_hidden_layers == plain


def test_windows_are_told() -> None:
    config = tiny_model(**SERVED["window"]).config
    config._attn_implementation = STAND_IN
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 3


def test_heads_of_stacks_and_of_other_sizes_fill_layers_of_one_shape() -> None:
    config = tiny_model(**SERVED["queries per key"]).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 32)
    assert len(config.served_attention.windows) == 4 + 3
    config = tiny_model(**SERVED["paths"]).config
    assert (config.num_attention_heads, len(config.served_attention.windows)) == (4, 4)


@pytest.mark.parametrize("name", SERVED)
def test_the_plan_of_tensor_parallelism_names_plain_linear_layers(name: str) -> None:
    model = tiny_model(**SERVED[name])
    assert not model.model.tp_plan
    model.set_attn_implementation(STAND_IN)
    served(model, texts_of((3,)))
    modules = dict(model.model.named_modules())
    plan = model.model.tp_plan
    for pattern in plan:
        assert any(re.fullmatch(pattern, address) for address in modules), pattern
    # vLLM matches from the beginning of a name on.
    planned = {address for address in modules if any(re.match(pattern, address) for pattern in plan)}
    linear = {address for address, module in modules.items() if type(module) is nn.Linear}
    assert linear <= planned
    assert not any("router" in address for address in planned)


@pytest.mark.parametrize("name", ["shared", "low rank", "moep"])
def test_a_server_fills_every_parameter_from_the_names_in_the_file(name: str) -> None:
    model = tiny_model(**SERVED[name])
    tied = model.model.tied
    saved = {key: value for key, value in model.model.state_dict().items() if key not in tied}
    assert len(saved) == len(model.model.state_dict()) - len(tied)
    empty = randomised(BraidModel._from_config(model.config, attn_implementation=STAND_IN), seed=5)
    for address in tied:  # vLLM's layers share nothing
        owner, _, own = address.rpartition(".")
        part = empty.get_submodule(owner)
        part._parameters[own] = nn.Parameter(torch.zeros_like(part._parameters[own]))
    filled = empty.load_weights(saved.items())
    assert filled == set(model.model.state_dict())
    for key, value in model.model.state_dict().items():
        assert torch.equal(empty.state_dict()[key], value), key
    with pytest.raises(BraidError, match=r"have 'stages\.9\.weight', and the model has not"):
        empty.load_weights([("stages.9.weight", torch.zeros(1))])


def test_modules_that_are_no_plain_linear_layers_are_not_taken_for_them() -> None:
    model = tiny_model(**SERVED["moep"])
    assert any(isinstance(module, ScoreLinear) for module in model.modules())
    served(model, texts_of((3,)))
    assert all(type(module) is nn.Linear for module in model.model.modules() if isinstance(module, nn.Linear))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stick-breaking": ({"block": {"attention": {"kind": "stick_breaking"}}}, r"no softmax \(StickBreaking\)"),
    "scope": ({"block": {"attention": {"experts": {"names": 4, "scope": "routed"}}}}, "only the tokens that chose"),
    "depths": ({"stages": [{"mixture_of_depths": {"layers": 2}}]}, "mixture of depths"),
    "windows": (
        {"stages": [{"block": {"attention": {"window": 3}}}, {"block": {"attention": {"window": 4}}}]},
        "windows of different sizes",
    ),
    "bytes": ({"embedding": "bytes", "tie_embeddings": False}, "not 'bytes' and 'linear'"),
    "bias": ({"head": {"kind": "linear", "bias": True}}, "its head has a bias"),
    "width": ({"stages": ["block", {"project": {"to": 8}}], "tie_embeddings": False}, "ends with 8 channels"),
    "quantised": (
        {"compression": [{"int8": {"modules": ["stages.*.feed.*"]}}]},
        "quantised .int8.; .*`braid convert FOLDER --to llama",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_says_so_in_one_sentence(name: str) -> None:
    architecture, message = REFUSED[name]
    config = tiny_config(**architecture)
    config = BraidModel(config).config
    assert config.served_attention is None
    with pytest.raises(BraidError, match=rf"'{STAND_IN}' .* cannot serve this model: .*{message}") as error:
        BraidModel._from_config(config, attn_implementation=STAND_IN)
    assert error.value.todo == "Serve it with `braid serve`, which runs every model folder."
    model = BraidForCausalLM(tiny_config(**architecture)).eval()
    model.set_attn_implementation(STAND_IN)
    with pytest.raises(BraidError, match="cannot serve this model"):
        model(random_ids(1, 3))
