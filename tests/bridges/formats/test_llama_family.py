"""Mistral and Qwen2 in and out, and scaled rotary positions: the same logits as transformers' own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert
from tests.bridges.checkpoints import (
    braid,
    difference,
    difference_with_a_cache,
    llama,
    mistral,
    qwen2,
    reconfigure,
    same_tensors,
    saved,
)

TOLERANCE = 1e-5
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 3}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral": (mistral, {}),
    "mistral tied": (mistral, {"tie_word_embeddings": True}),
    "mistral without a window": (mistral, {"sliding_window": None}),
    "mistral other head size": (mistral, {"head_dim": 12}),
    "qwen2": (qwen2, {}),
    "qwen2 tied": (qwen2, {"tie_word_embeddings": True}),
    "qwen2 windows in the last layers": (qwen2, {**WINDOWS, "max_window_layers": 1}),
    "qwen2 windows everywhere": (qwen2, {**WINDOWS, "max_window_layers": 0}),
    "qwen2 windows here and there": (
        qwen2,
        {
            **WINDOWS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_window_layers": 0,
        },
    ),
    "qwen2 yarn": (
        qwen2,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 6,
            }
        },
    ),
}


@pytest.mark.parametrize(("make", "options"), MODELS.values(), ids=MODELS)
def test_there_and_back(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    theirs = make(**options)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    ours = load_model(tmp_path / "braid")
    assert difference(theirs, ours) <= TOLERANCE
    assert difference_with_a_cache(theirs, ours) <= TOLERANCE
    convert(tmp_path / "braid", tmp_path / "back", to=theirs.config.model_type)
    assert same_tensors(tmp_path / "hf", tmp_path / "back")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs)
    assert difference(theirs, again) <= TOLERANCE
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    if "yarn" in str(options):  # what a configuration leaves out is written with its default
        assert before.pop("rope_parameters").items() <= after.pop("rope_parameters").items()
    if not options.get("use_sliding_window"):  # then it has no effect
        before.pop("max_window_layers", None), after.pop("max_window_layers", None)
    assert {name: value for name, value in after.items() if name not in ("rope_theta", "rope_scaling")} == before


def test_the_window_matters(tmp_path: Path) -> None:
    """Or the tests above would prove nothing."""
    theirs = mistral()
    theirs.save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", sliding_window=None)
    convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) > 0.01


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn in full": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 6.0,
        "beta_slow": 0.5,
        "truncate": False,
        "attention_factor": 1.7,
    },
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_scaled_positions_there_and_back(tmp_path: Path, scaling: dict[str, Any]) -> None:
    theirs = llama(rope_parameters={"rope_theta": 500.0, **scaling}, max_position_embeddings=512)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    ours = load_model(tmp_path / "braid")
    assert difference(theirs, ours) <= TOLERANCE
    assert difference_with_a_cache(theirs, ours) <= TOLERANCE
    assert difference(llama(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}), ours) > 1e-3
    convert(tmp_path / "braid", tmp_path / "back", to="llama")
    assert difference(theirs, AutoModelForCausalLM.from_pretrained(tmp_path / "back")) <= TOLERANCE


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_wavelengths_are_transformers_own(scaling: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0, **scaling}
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    from braidlm.bridges.formats.llama import braid_positions

    architecture = {"positions": braid_positions(config), "block": {"attention": {"heads": 1, "head_dim": head_dim}}}
    positions = torch.arange(512)[None]
    cos, sin = braid({**architecture, "stages": ["block"]}).model.positions.tables(head_dim, positions)
    angle = positions[..., None] * frequencies
    half = head_dim // 2
    torch.testing.assert_close(cos[..., :half], angle.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(sin[..., half:], angle.sin() * factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_keys_of_transformers_4(tmp_path: Path, name: str, key: str) -> None:
    theirs = llama(rope_parameters={"rope_theta": 500.0, **SCALED[name]})
    theirs.save_pretrained(tmp_path / "hf")
    old = {key: name, **{option: value for option, value in SCALED[name].items() if option != "rope_type"}}
    reconfigure(tmp_path / "hf", rope_parameters=..., rope_theta=500.0, rope_scaling=old)
    convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) <= TOLERANCE


def test_a_braid_model_without_biases_becomes_qwen2_with_zeros(tmp_path: Path) -> None:
    ours = braid({"block": {"attention": {"heads": 4}}, "stages": [{"block": {"layers": 2}}]})
    saved(ours, tmp_path / "braid")
    plan = convert(tmp_path / "braid", tmp_path / "hf", to="qwen2")
    assert any("added as zeros" in note for note in plan.notes)
    assert difference(ours, AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) <= TOLERANCE


def with_window(window: int | None) -> dict[str, Any]:
    return {"block": {"attention": {"heads": 4, "window": window}}}


BOTH = {"attention": {"heads": 4, "bias": True}, "feed": {"bias": True}}
REFUSED = [
    ("mistral", {"block": BOTH}, "block.attention.bias is true; Mistral has false"),
    ("mistral", {"block": BOTH}, "block.feed.bias is true; Mistral has false"),
    (
        "mistral",
        {"stages": [with_window(4), with_window(None)]},
        "stages[1].block.attention.window is none; Mistral has 4",
    ),
    (
        "qwen2",
        {"stages": [with_window(4), with_window(None), with_window(6)]},
        "stages[2].block.attention.window is 6; Qwen2 has 4",
    ),
    ("qwen2", {"block": BOTH}, "block.attention.out_bias is true; Qwen2 has false"),
    ("qwen2", {"block": BOTH}, "block.feed.bias is true; Qwen2 has false"),
    ("llama", {"stages": [with_window(None), with_window(6)]}, "stages[1].block.attention.window is 6; Llama has none"),
    (
        "llama",
        {"block": {"attention": {"heads": 4, "bias": True, "out_bias": False}}},
        "block.attention.out_bias is false; Llama has true",
    ),
]


@pytest.mark.parametrize(("to", "options", "reason"), REFUSED)
def test_what_the_format_cannot_express_is_refused(
    tmp_path: Path, to: str, options: dict[str, Any], reason: str
) -> None:
    saved(braid({"block": {"attention": {"heads": 4}}, "stages": ["block"], **options}), tmp_path / "braid")
    with pytest.raises(BraidError) as caught:
        convert(tmp_path / "braid", tmp_path / "hf", to=to)
    assert reason in str(caught.value)
    assert not (tmp_path / "hf").exists()


IMPORTS = [
    (mistral, {"layer_types": ["sliding_attention", "full_attention"]}, "attention of several types"),
    (qwen2, {"layer_types": ["full_attention", "chunked_attention"]}, "attention of type chunked_attention"),
    (qwen2, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": "three"}}, "factor"),
    (qwen2, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "yarn needs a theta above 1"),
]


@pytest.mark.parametrize(("make", "settings", "reason"), IMPORTS)
def test_what_braid_cannot_express_is_refused(tmp_path: Path, make: Any, settings: dict[str, Any], reason: str) -> None:
    make().save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", **settings)
    with pytest.raises(BraidError) as caught:
        convert(tmp_path / "hf", tmp_path / "braid")
    assert reason in str(caught.value)
    assert not (tmp_path / "braid").exists()


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"kind": "linear"}, "factor: missing"),
        ({"kind": "linear", "factor": 0.0}, "factor"),
        ({"kind": "llama3", "factor": 2.0, "original_context": 8, "low_freq_factor": 4.0}, "must be below"),
        ({"kind": "yarn", "factor": 2.0, "original_context": 8, "beta_fast": 1.0}, "must be below"),
        ({"kind": "ntk", "factor": 2.0}, "unknown rope scaling 'ntk'"),
    ],
)
def test_impossible_scalings_are_refused(scaling: dict[str, Any], reason: str) -> None:
    with pytest.raises(BraidError, match=reason):
        braid({"positions": {"scaling": scaling}, "stages": ["block"]})


def test_routed_attention_keeps_its_shared_keys_and_biases() -> None:
    from braidlm.bridges.model_info import ModelInfo

    attention = {"heads": 4, "kv_heads": 2, "experts": 3, "bias": True}
    model: BraidForCausalLM = braid({"block": {"attention": attention}, "stages": ["block"]})
    options = ModelInfo(model.config).block_options(0)["attention"]
    assert (options["kv_heads"], options["head_dim"], options["out_bias"]) == (2, 8, True)
