"""Llama as Hugging Face stores it, and Mistral and Qwen2, which differ from it in windows and biases."""

import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any, ClassVar

from braidlm.bridges.bridge import TensorMapping, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo, stack_problems, window_problems
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
    ignorable = {
        r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "the wavelengths of rotary positions, computed anew",
    }

    def windows(self, config: Any) -> list[int | None]:
        """The sliding window of each layer of a foreign configuration; None: it sees everything before."""
        return [None] * config.num_hidden_layers

    def biases(self, config: Any) -> dict[str, bool | None]:
        """Our attention's options for the biases of a foreign configuration."""
        return {"bias": config.attention_bias}

    def own_problems(self, info: ModelInfo) -> list[str]:
        """What the format cannot express of our layers' windows and of our biases."""
        problems = window_problems(info, self.title)
        if (info.attention.qkv.bias is None) != (getattr(info.attention.out, "bias", None) is None):
            has = f"{self.title} has them on all four or none"
            problems.append(f"only some projections of attention have biases; {has}")
        return problems

    def own_settings(self, info: ModelInfo) -> dict[str, Any]:
        """The settings for our layers' windows and for our biases."""
        return {"attention_bias": info.block.attention.options.bias, "mlp_bias": info.block.feed.options.bias}

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

    def architecture(self, config: Any) -> dict[str, Any]:
        stages = ((window, len(list(layers))) for window, layers in groupby(self.windows(config)))
        bias = getattr(config, "mlp_bias", False)
        return {
            "width": config.hidden_size,
            "context": config.max_position_embeddings,
            "positions": braid_positions(config),
            "tie_embeddings": config.tie_word_embeddings,
            "dropout": {"attention": float(config.attention_dropout or 0.0)},
            "initialisation": {"kind": "normal", "std": config.initializer_range},
            "block": {
                "norm": {"kind": "rms", "eps": config.rms_norm_eps},
                "attention": {
                    "heads": config.num_attention_heads,
                    "kv_heads": config.num_key_value_heads,
                    "head_dim": _head_dim(config),
                    **self.biases(config),
                },
                "feed": {"kind": "swiglu", "hidden": config.intermediate_size, "bias": bias},
            },
            "stages": [{"block": {"layers": layers, "attention": {"window": window}}} for window, layers in stages],
        }

    def export_problems(self, info: ModelInfo) -> list[str]:
        problems = stack_problems(info, self.title, "rope", "rms", "swiglu")
        if not info.is_stack:
            return problems
        scaling = getattr(info.architecture.positions.options, "scaling", None)
        if scaling is not None and scaling.kind not in ROPE_SCALINGS:
            has = f"{self.title} has {', '.join(ROPE_SCALINGS)}"
            problems.append(f"rotary positions are scaled by '{scaling.kind}'; {has}")
        if info.block.feed.kind == "swiglu" and info.block.feed.options.learned_beta:
            problems.append(f"SwiGLU has a learned beta (learned_beta: true); {self.title}'s has none")
        if info.has_plain_attention:
            heads, width = info.block.attention.options.heads, info.architecture.width
            if width % heads:
                problems.append(f"the width {width} is not a multiple of {heads} heads, which {self.title} demands")
            problems += self.own_problems(info)
        return problems

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        architecture, block, attention = info.architecture, info.block, info.attention
        return {
            "vocab_size": info.config.vocab_size,
            "max_position_embeddings": architecture.context,
            "hidden_size": architecture.width,
            "intermediate_size": info.feed_hidden,
            "num_hidden_layers": len(info.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": block.norm.options.eps,
            "rope_parameters": rope_parameters(architecture.positions.options),
            "attention_dropout": block.dropout.attention,
            "initializer_range": info.initial_std,
            "tie_word_embeddings": architecture.tie_embeddings,
            **self.own_settings(info),
            **info.token_ids,
        }

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
    """Transformers' `rope_parameters` for our rotary positions."""
    if positions.scaling is None:
        return {"rope_type": "default", "rope_theta": positions.theta}
    options = vars(positions.scaling.options)
    written = {theirs: options[ours] for theirs, ours in SCALING.items() if options.get(ours) is not None}
    return {"rope_type": positions.scaling.kind, "rope_theta": positions.theta, **written}


def _attention_factor(rope: dict[str, Any]) -> float | None:
    """Yarn's factor from DeepSeek's two scales, where a configuration has them; None: the one of the paper."""
    numbers = [rope.get(name) for name in ("factor", "mscale", "mscale_all_dim")]
    factor, over, under = (float(number) if isinstance(number, (int, float)) else 0.0 for number in numbers)
    if not (over and under):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (growth * over + 1.0) / (growth * under + 1.0)


def _feed_bias_problems(info: ModelInfo, title: str) -> list[str]:
    """A problem where the feed-forward has biases and the format's has none."""
    return [f"the feed-forward has biases; {title}'s has none"] if info.block.feed.options.bias else []


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

    def import_problems(self, config: Any) -> list[str]:
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        mixed = [f"layers have attention of several types ({', '.join(kinds)}), which Mistral does not have"]
        return super().import_problems(config) + (mixed if len(kinds) > 1 else [])

    def windows(self, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers

    def biases(self, config: Any) -> dict[str, bool | None]:
        return {"bias": False}

    def own_problems(self, info: ModelInfo) -> list[str]:
        problems = []
        if len(different := dict.fromkeys(info.windows)) > 1:
            shown = ", ".join("none" if window is None else str(window) for window in different)
            problems.append(f"layers have different sliding windows ({shown}); Mistral has one for all")
        if any(getattr(part, "bias", None) is not None for part in (info.attention.qkv, info.attention.out)):
            problems.append("attention has biases; Mistral's has none")
        return problems + _feed_bias_problems(info, self.title)

    def own_settings(self, info: ModelInfo) -> dict[str, Any]:
        return {"sliding_window": info.windows[0]}


FULL, SLIDING = "full_attention", "sliding_attention"


@bridges.register("qwen2")
class Qwen2Bridge(LlamaBridge):
    """Qwen2ForCausalLM."""

    title = "Qwen2"
    model_type = "qwen2"
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

    def biases(self, config: Any) -> dict[str, bool | None]:
        return {"bias": True, "out_bias": False}

    def own_problems(self, info: ModelInfo) -> list[str]:
        problems = []
        if len(different := sorted({window for window in info.windows if window is not None})) > 1:
            sizes = ", ".join(map(str, different))
            problems.append(f"layers have different sliding windows ({sizes}); Qwen2 has one size")
        problems += _feed_bias_problems(info, self.title)
        if getattr(info.attention.out, "bias", None) is not None:
            problems.append("attention's output projection has a bias; Qwen2's has none")
        return problems

    def own_settings(self, info: ModelInfo) -> dict[str, Any]:
        kinds = [FULL if window is None else SLIDING for window in info.windows]
        if SLIDING not in kinds:
            return {"use_sliding_window": False}
        # Versions before 4.53 know no types, and let the layers from this one on have the window.
        first = kinds.index(SLIDING)
        window = {"sliding_window": info.windows[first], "max_window_layers": first}
        return {"use_sliding_window": True, **window, "layer_types": kinds}

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        settings = super().settings(info)
        if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
            del settings["head_dim"]  # Qwen2 has the key for other sizes only
        return settings
