"""Llama as Hugging Face stores it: rotary positions, RMSNorm, SwiGLU, grouped-query attention, separate matrices."""

from collections.abc import Iterator
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from braidlm.bridges.bridge import Link, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.plain import PlainModel, stack_problems, wrong_kind


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
            problems.append(f"only {part} of each head turns (partial_rotary_factor); Braid turns all of it")
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

    def export_problems(self, plain: PlainModel) -> list[str]:
        problems = stack_problems(plain, self.title)
        problems += wrong_kind("positions are", plain.architecture.positions.kind, "rope", self.title)
        if not plain.is_stack:
            return problems
        problems += wrong_kind("the norm is", plain.block.norm.kind, "rms", self.title)
        problems += wrong_kind("the feed-forward is", plain.block.feed.kind, "swiglu", self.title)
        if plain.block.feed.kind == "swiglu" and plain.block.feed.options.learned_beta:
            problems.append(f"SwiGLU has a learned beta (learned_beta: true); {self.title}'s has none")
        heads, width = plain.block.attention.options, plain.architecture.width
        if plain.block.attention.kind == "softmax" and width % heads.heads:
            problems.append(f"the width {width} is not a multiple of {heads.heads} heads, which {self.title} demands")
        return problems

    def settings(self, plain: PlainModel) -> dict[str, Any]:
        architecture, block, attention = plain.architecture, plain.block, plain.attention
        return {
            "vocab_size": plain.config.vocab_size,
            "max_position_embeddings": architecture.context,
            "hidden_size": architecture.width,
            "intermediate_size": plain.feed_hidden,
            "num_hidden_layers": len(plain.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "attention_bias": block.attention.options.bias,
            "mlp_bias": block.feed.options.bias,
            "hidden_act": "silu",
            "rms_norm_eps": block.norm.options.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": architecture.positions.options.theta},
            "attention_dropout": block.dropout.attention,
            "initializer_range": plain.initial_std,
            "tie_word_embeddings": architecture.tie_embeddings,
            **plain.token_ids,
        }

    def export_notes(self, plain: PlainModel) -> list[str]:
        notes = plain.uneven_dropout()
        if plain.architecture.dropout.embedding or plain.block.dropout.residual:
            notes.append("Llama has dropout in attention only; the other rates are left out (logits do not change)")
        return notes

    def links(self, plain: PlainModel) -> Iterator[Link]:
        queries = plain.attention.heads * plain.attention.head_dim
        keys = plain.attention.kv_heads * plain.attention.head_dim
        order = _half_pairs(plain) if plain.architecture.positions.options.pairs == "interleaved" else None
        yield Link("model.embedding.weight", (self.embedding,))
        for number, ours in enumerate(plain.layers):
            theirs = f"model.layers.{number}"
            yield Link(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
            yield Link(f"{ours}.feed_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
            for kind in ("weight", "bias"):
                qkv = tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
                gate_up = tuple(f"{theirs}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
                yield Link(f"{ours}.attention.qkv.{kind}", qkv, (queries, keys, keys), rows=order)
                yield Link(f"{ours}.attention.out.{kind}", (f"{theirs}.self_attn.o_proj.{kind}",))
                yield Link(f"{ours}.feed.gate_up.{kind}", gate_up, (plain.feed_hidden,) * 2)
                yield Link(f"{ours}.feed.out.{kind}", (f"{theirs}.mlp.down_proj.{kind}",))
        yield Link("model.norm.weight", ("model.norm.weight",))
        yield Link("head.weight", (self.head,))


def _half_pairs(plain: PlainModel) -> tuple[int, ...]:
    """The rows of q, k and v with each turning pair (2i, 2i + 1) moved to (i, i + half): the same scores, turned alike.

    Queries and keys move together, so their products stay; values do not turn and stay where they are.
    """
    attention = plain.attention
    within = [*range(0, attention.head_dim, 2), *range(1, attention.head_dim, 2)]
    turning = attention.heads + attention.kv_heads
    moved = [head * attention.head_dim + channel for head in range(turning) for channel in within]
    first_value = turning * attention.head_dim
    return (*moved, *range(first_value, first_value + attention.kv_heads * attention.head_dim))
