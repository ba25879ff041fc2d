"""Llama as Hugging Face stores it, and Mistral and Qwen2, which differ from it in windows and biases."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

from braidlm.bridges.bridge import TensorMapping, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo
from braidlm.model.attention.positions import rope_scalings

ROPE_SCALINGS = ("linear", "llama3", "yarn")
"""The kinds of scaling that have one name and meaning in both."""
SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Transformers' names of the options of a scaling, and ours."""


@bridges.register("llama")
class LlamaBridge(HuggingFaceBridge):
    """LlamaForCausalLM, and the base of the formats that differ from it in windows and biases."""

    title = "Llama"
    model_type = "llama"
    body = "model."
    embedding = "model.embed_tokens.weight"
    pairs: ClassVar[str] = "half"
    """Which channels of a head are rotated together, in the words of our rotary positions."""
    options = {
        "hidden_size": "width",
        "max_position_embeddings": "context",
        "num_hidden_layers": "layers",
        "num_attention_heads": "block.attention.heads",
        "num_key_value_heads": "block.attention.kv_heads",
        "head_dim": "block.attention.head_dim",
        "attention_bias": "block.attention.bias",
        "attention_dropout": "dropout.attention",
        "intermediate_size": "block.feed.hidden",
        "mlp_bias": "block.feed.bias",
        "rms_norm_eps": "block.norm.eps",
        "initializer_range": "initialisation.std",
        "tie_word_embeddings": "tie_embeddings",
    }
    fixed = {"initialisation.kind": "normal", "block.norm.kind": "rms", "block.feed.kind": "swiglu"}
    ignorable = {
        r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "the wavelengths of rotary positions, computed anew",
    }

    def import_problems(self, config: Any) -> list[str]:
        rope, problems = config.rope_parameters or {}, []
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if (kind := rope.get("rope_type", "default")) not in ("default", *ROPE_SCALINGS):
            problems.append(f"rotary positions are scaled by '{kind}'; Braid has {', '.join(ROPE_SCALINGS)}")
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            problems.append(f"only {part} of each head is rotated (partial_rotary_factor); Braid rotates all of it")
        if config.hidden_act not in ("silu", "swish"):
            problems.append(f"hidden_act is '{config.hidden_act}'; Braid's SwiGLU has silu")
        if (size := _head_dim(config)) % 2:
            problems.append(f"head_dim is {size}; rotary positions need an even one")
        if heads % kv_heads:
            problems.append(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
        return problems

    def computed(self, config: Any) -> dict[str, Any]:
        return {"positions": braid_positions(config), "block.attention.head_dim": _head_dim(config)}

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        positions = info.architecture.positions
        return super().settings(info) | (rope_parameters(positions.options) if positions.kind == "rope" else {})

    def export_notes(self, info: ModelInfo) -> list[str]:
        notes = super().export_notes(info)
        if info.architecture.dropout.embedding or info.block.dropout.residual:
            only = "has dropout in attention only; the other rates are left out (logits do not change)"
            notes.append(f"{self.title} {only}")
        return notes

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        queries = info.attention.heads * info.attention.head_dim
        keys = info.attention.kv_heads * info.attention.head_dim
        order = None if info.architecture.positions.options.pairs == self.pairs else _pair_order(info, self.pairs)
        yield TensorMapping("model.embedding.weight", (self.embedding,))
        for number, ours in enumerate(info.layers):
            theirs = f"model.layers.{number}"
            yield TensorMapping(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
            yield TensorMapping(f"{ours}.feed_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
            for kind in ("weight", "bias"):
                for part, names, sizes in (
                    ("attention.qkv", ("self_attn.q", "self_attn.k", "self_attn.v"), (queries, keys, keys)),
                    ("attention.out", ("self_attn.o",), ()),
                    ("feed.gate_up", ("mlp.gate", "mlp.up"), (info.feed_hidden,) * 2),
                    ("feed.out", ("mlp.down",), ()),
                ):
                    foreign = tuple(f"{theirs}.{name}_proj.{kind}" for name in names)
                    row_order = order if part == "attention.qkv" else None
                    yield TensorMapping(f"{ours}.{part}.{kind}", foreign, sizes, row_order=row_order)
        yield TensorMapping("model.norm.weight", ("model.norm.weight",))
        yield TensorMapping("head.weight", (self.head,))


def braid_positions(config: Any) -> dict[str, Any]:
    """Our positions for a foreign configuration without problems."""
    rope = dict(config.rope_parameters or {})
    positions = {"kind": "rope", "theta": rope.get("rope_theta") or 10000.0}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return positions
    if kind == "yarn":
        rope["attention_factor"] = rope.get("attention_factor") or _attention_factor(rope)
    known = {field.name for field in fields(rope_scalings[kind].Config)}
    options = {ours: rope[theirs] for theirs, ours in SCALING.items() if ours in known and rope.get(theirs) is not None}
    return positions | {"scaling": {"kind": kind, **options}}


def rope_parameters(positions: Any) -> dict[str, Any]:
    """Transformers' setting for our rotary positions; nothing of a scaling that it does not know."""
    own: dict[str, Any] = {"rope_type": "default", "rope_theta": positions.theta}
    if positions.scaling is not None and positions.scaling.kind in ROPE_SCALINGS:
        options = vars(positions.scaling.options)
        written = {theirs: options[ours] for theirs, ours in SCALING.items() if options.get(ours) is not None}
        own |= {"rope_type": positions.scaling.kind, **written}
    return {"rope_parameters": own}


def _attention_factor(rope: dict[str, Any]) -> float | None:
    """Yarn's factor from DeepSeek's two scales, where a configuration has them; None: the one of the paper."""
    numbers = [rope.get(name) for name in ("factor", "mscale", "mscale_all_dim")]
    factor, over, under = (float(number) if isinstance(number, (int, float)) else 0.0 for number in numbers)
    if not (over and under):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (growth * over + 1.0) / (growth * under + 1.0)


WITHOUT_BIASES = {theirs: ours for theirs, ours in LlamaBridge.options.items() if not theirs.endswith("bias")}


def _head_dim(config: Any) -> int:
    """Some configurations have the key only where it is not the width divided by the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _pair_order(info: ModelInfo, pairs: str) -> tuple[int, ...]:
    """The rows of q, k and v with each rotated pair moved: from (2i, 2i + 1) to (i, i + half), or the other way round.
    Queries and keys are reordered alike, so their products do not change; values are not rotated and stay."""
    attention = info.attention
    within = [*range(0, attention.head_dim, 2), *range(1, attention.head_dim, 2)]
    if pairs == "interleaved":
        within = [within.index(channel) for channel in range(attention.head_dim)]
    rotated = attention.heads + attention.kv_heads
    moved = [head * attention.head_dim + channel for head in range(rotated) for channel in within]
    first_value = rotated * attention.head_dim
    return (*moved, *range(first_value, first_value + attention.kv_heads * attention.head_dim))


@bridges.register("mistral")
class MistralBridge(LlamaBridge):
    """MistralForCausalLM."""

    title = "Mistral"
    model_type = "mistral"
    options = WITHOUT_BIASES

    def import_problems(self, config: Any) -> list[str]:
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        mixed = [f"layers have attention of several types ({', '.join(kinds)}), which Mistral does not have"]
        return super().import_problems(config) + (mixed if len(kinds) > 1 else [])

    def windows(self, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        return super().settings(info) | {"sliding_window": info.windows[0]}


FULL, SLIDING = "full_attention", "sliding_attention"


@bridges.register("qwen2")
class Qwen2Bridge(LlamaBridge):
    """Qwen2ForCausalLM."""

    title = "Qwen2"
    model_type = "qwen2"
    options = WITHOUT_BIASES
    fixed = {**LlamaBridge.fixed, "block.attention.bias": True, "block.attention.out_bias": False}
    zero_biases = True

    def import_problems(self, config: Any) -> list[str]:
        problems = super().import_problems(config)
        if unknown := sorted(set(config.layer_types) - {FULL, SLIDING}):
            problems.append(f"layers have attention of type {', '.join(unknown)}; Braid has {FULL} and {SLIDING}")
        if SLIDING in config.layer_types and config.sliding_window is None:
            problems.append(f"layer_types names {SLIDING}, but there is no sliding_window")
        return problems

    def windows(self, config: Any) -> list[int | None]:
        return [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        settings = super().settings(info)
        kinds = [FULL if window is None else SLIDING for window in info.windows]
        if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
            del settings["head_dim"]  # Qwen2 has the key for other sizes only
        if SLIDING not in kinds:
            return settings | {"use_sliding_window": False}
        # Versions before 4.53 know no types, and let the layers from this one on have the window.
        first = kinds.index(SLIDING)
        window = {"sliding_window": info.windows[first], "max_window_layers": first}
        return settings | {"use_sliding_window": True, **window, "layer_types": kinds}
