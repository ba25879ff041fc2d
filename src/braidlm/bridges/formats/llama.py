"""Llama as Hugging Face stores it: rotary positions, RMSNorm, SwiGLU, grouped-query attention, separate matrices."""

from collections.abc import Iterator
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from braidlm.bridges.bridge import TensorMapping, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo, stack_problems


@bridges.register("llama")
class LlamaBridge(HuggingFaceBridge):
    """LlamaForCausalLM."""

    title = "Llama"
    config_class = LlamaConfig
    model_class = LlamaForCausalLM
    body = "model."
    embedding = "model.embed_tokens.weight"
    ignorable = {
        r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "the wavelengths of rotary positions, computed anew",
    }

    def import_problems(self, config: Any) -> list[str]:
        problems = []
        if config.hidden_act not in ("silu", "swish"):
            problems.append(f"hidden_act is '{config.hidden_act}'; Braid's SwiGLU has silu")
        rope = config.rope_parameters or {}
        if (kind := rope.get("rope_type", "default")) != "default":
            problems.append(f"rotary positions are scaled (rope_type '{kind}'); Braid has the unscaled ones only")
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            problems.append(f"only {part} of each head is rotated (partial_rotary_factor); Braid rotates all of it")
        if config.head_dim % 2:
            problems.append(f"head_dim is {config.head_dim}; rotary positions need an even one")
        if config.num_attention_heads % config.num_key_value_heads:
            problems.append(
                f"num_attention_heads ({config.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({config.num_key_value_heads})"
            )
        return problems

    def architecture(self, config: Any) -> dict[str, Any]:
        return {
            "width": config.hidden_size,
            "context": config.max_position_embeddings,
            "positions": {"kind": "rope", "theta": float((config.rope_parameters or {}).get("rope_theta", 10000.0))},
            "tie_embeddings": config.tie_word_embeddings,
            "dropout": {"attention": float(config.attention_dropout or 0.0)},
            "initialisation": {"kind": "normal", "std": config.initializer_range},
            "block": {
                "norm": {"kind": "rms", "eps": config.rms_norm_eps},
                "attention": {
                    "heads": config.num_attention_heads,
                    "kv_heads": config.num_key_value_heads,
                    "head_dim": config.head_dim,
                    "bias": config.attention_bias,
                },
                "feed": {"kind": "swiglu", "hidden": config.intermediate_size, "bias": config.mlp_bias},
            },
            "stages": [{"block": {"layers": config.num_hidden_layers}}],
        }

    def export_problems(self, info: ModelInfo) -> list[str]:
        problems = stack_problems(info, self.title, "rope", "rms", "swiglu")
        if not info.is_stack:
            return problems
        if info.block.feed.kind == "swiglu" and info.block.feed.options.learned_beta:
            problems.append(f"SwiGLU has a learned beta (learned_beta: true); {self.title}'s has none")
        heads, width = info.block.attention.options, info.architecture.width
        if info.block.attention.kind == "softmax" and width % heads.heads:
            problems.append(f"the width {width} is not a multiple of {heads.heads} heads, which {self.title} demands")
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
            "attention_bias": block.attention.options.bias,
            "mlp_bias": block.feed.options.bias,
            "hidden_act": "silu",
            "rms_norm_eps": block.norm.options.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": architecture.positions.options.theta},
            "attention_dropout": block.dropout.attention,
            "initializer_range": info.initial_std,
            "tie_word_embeddings": architecture.tie_embeddings,
            **info.token_ids,
        }

    def export_notes(self, info: ModelInfo) -> list[str]:
        notes = super().export_notes(info)
        if info.architecture.dropout.embedding or info.block.dropout.residual:
            notes.append("Llama has dropout in attention only; the other rates are left out (logits do not change)")
        return notes

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        queries = info.attention.heads * info.attention.head_dim
        keys = info.attention.kv_heads * info.attention.head_dim
        order = _half_pairs(info) if info.architecture.positions.options.pairs == "interleaved" else None
        yield TensorMapping("model.embedding.weight", (self.embedding,))
        for number, ours in enumerate(info.layers):
            theirs = f"model.layers.{number}"
            yield TensorMapping(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
            yield TensorMapping(f"{ours}.feed_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
            for kind in ("weight", "bias"):
                qkv = tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
                gate_up = tuple(f"{theirs}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
                yield TensorMapping(f"{ours}.attention.qkv.{kind}", qkv, (queries, keys, keys), row_order=order)
                yield TensorMapping(f"{ours}.attention.out.{kind}", (f"{theirs}.self_attn.o_proj.{kind}",))
                yield TensorMapping(f"{ours}.feed.gate_up.{kind}", gate_up, (info.feed_hidden,) * 2)
                yield TensorMapping(f"{ours}.feed.out.{kind}", (f"{theirs}.mlp.down_proj.{kind}",))
        yield TensorMapping("model.norm.weight", ("model.norm.weight",))
        yield TensorMapping("head.weight", (self.head,))


def _half_pairs(info: ModelInfo) -> tuple[int, ...]:
    """The rows of q, k and v with each rotated pair (2i, 2i + 1) moved to (i, i + half).

    Queries and keys are reordered alike, so their products do not change; values are not rotated and stay.
    """
    attention = info.attention
    within = [*range(0, attention.head_dim, 2), *range(1, attention.head_dim, 2)]
    rotated = attention.heads + attention.kv_heads
    moved = [head * attention.head_dim + channel for head in range(rotated) for channel in within]
    first_value = rotated * attention.head_dim
    return (*moved, *range(first_value, first_value + attention.kv_heads * attention.head_dim))
