"""GPT-2 as Hugging Face stores it: learned positions, LayerNorm, Conv1D matrices, biases everywhere."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from braidlm.bridges.bridge import TensorMapping, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo, stack_problems, window_problems

TANH = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
ACTIVATIONS = {"gelu": "gelu", "gelu_python": "gelu", "relu": "relu"} | dict.fromkeys(TANH, "gelu_new")
"""Transformers' names, several of which mean the same function, and ours."""
KNOWN = ", ".join(sorted(set(ACTIVATIONS.values())))

DROPOUT = {"embedding": "embd_pdrop", "attention": "attn_pdrop", "residual": "resid_pdrop"}
"""Our dropout rates and theirs."""
LAYER = {
    "attention_norm": "ln_1",
    "feed_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed.up": "mlp.c_fc",
    "feed.out": "mlp.c_proj",
}
"""Parts of our layer and of theirs."""


@bridges.register("gpt2")
class GPT2Bridge(HuggingFaceBridge):
    """GPT2LMHeadModel."""

    title = "GPT-2"
    model_type = "gpt2"
    body = "transformer."
    embedding = "transformer.wte.weight"
    ignorable = {
        r"transformer\.h\.\d+\.attn\.bias": "the causal mask, which old versions stored",
        r"transformer\.h\.\d+\.attn\.masked_bias": "a constant of the causal mask, which old versions stored",
    }
    zero_biases = True

    def import_problems(self, config: Any) -> list[str]:
        problems = []
        if config.activation_function not in ACTIVATIONS:
            problems.append(f"activation_function is '{config.activation_function}'; Braid has {KNOWN}")
        if not config.scale_attn_weights:
            problems.append("scale_attn_weights is false; Braid always divides scores by the root of the head size")
        if config.scale_attn_by_inverse_layer_idx:
            problems.append("scale_attn_by_inverse_layer_idx is true; Braid's attention is the same in every layer")
        if config.add_cross_attention:
            problems.append("add_cross_attention is true; Braid has no encoder to attend to")
        if config.n_embd % config.n_head:
            problems.append(f"n_embd ({config.n_embd}) is not a multiple of n_head ({config.n_head})")
        return problems

    def architecture(self, config: Any) -> dict[str, Any]:
        return {
            "width": config.n_embd,
            "context": config.n_positions,
            "positions": "learned",
            "tie_embeddings": config.tie_word_embeddings,
            "dropout": {name: float(getattr(config, rate)) for name, rate in DROPOUT.items()},
            "initialisation": {"kind": "gpt2", "std": config.initializer_range},
            "block": {
                "norm": {"kind": "layer", "eps": config.layer_norm_epsilon},
                "attention": {"heads": config.n_head, "bias": True},
                "feed": {
                    "kind": "mlp",
                    "hidden": config.n_inner or 4 * config.n_embd,
                    "activation": ACTIVATIONS[config.activation_function],
                    "bias": True,
                },
            },
            "stages": [{"block": {"layers": config.n_layer}}],
        }

    def export_problems(self, info: ModelInfo) -> list[str]:
        problems = stack_problems(info, self.title, "learned", "layer", "mlp")
        if info.has_plain_attention:
            heads, kv_heads, size = info.attention.heads, info.attention.kv_heads, info.attention.head_dim
            problems += window_problems(info, self.title)
            if kv_heads != heads:
                both = f"{self.title} has as many of both"
                problems.append(f"attention has {heads} query and {kv_heads} key heads; {both}")
            if heads * size != (width := info.architecture.width):
                problems.append(f"{heads} heads of {size} do not make the width {width}; {self.title}'s do")
        return problems

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        architecture, block = info.architecture, info.block
        return {
            "vocab_size": info.config.vocab_size,
            "n_positions": architecture.context,
            "n_embd": architecture.width,
            "n_layer": len(info.layers),
            "n_head": info.attention.heads,
            "n_inner": info.feed_hidden,
            "activation_function": block.feed.options.activation,
            "layer_norm_epsilon": block.norm.options.eps,
            "embd_pdrop": architecture.dropout.embedding,
            "attn_pdrop": block.dropout.attention,
            "resid_pdrop": block.dropout.residual,
            "initializer_range": info.initial_std,
            "tie_word_embeddings": architecture.tie_embeddings,
            **info.token_ids,
        }

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        yield TensorMapping("model.embedding.weight", (self.embedding,))
        yield TensorMapping("model.positions.weight", ("transformer.wpe.weight",))
        for number, ours in enumerate(info.layers):
            for kind, (our_name, their_name) in product(("weight", "bias"), LAYER.items()):
                is_matrix = kind == "weight" and "norm" not in our_name
                theirs = f"transformer.h.{number}.{their_name}.{kind}"
                yield TensorMapping(f"{ours}.{our_name}.{kind}", (theirs,), transposed=is_matrix)
        for kind in ("weight", "bias"):
            yield TensorMapping(f"model.norm.{kind}", (f"transformer.ln_f.{kind}",))
        yield TensorMapping("head.weight", (self.head,))
