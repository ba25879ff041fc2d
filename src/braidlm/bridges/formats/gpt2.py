"""GPT-2 as Hugging Face stores it: learned positions, LayerNorm, Conv1D matrices, biases everywhere."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from braidlm.bridges.bridge import TensorMapping, bridges
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo

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
    options = {
        "n_embd": "width",
        "n_positions": "context",
        "n_layer": "layers",
        "n_head": "block.attention.heads",
        "n_inner": "block.feed.hidden",
        "activation_function": "block.feed.activation",
        "layer_norm_epsilon": "block.norm.eps",
        "initializer_range": "initialisation.std",
        "tie_word_embeddings": "tie_embeddings",
        **{theirs: f"dropout.{ours}" for ours, theirs in DROPOUT.items()},
    }
    fixed = {
        **{"positions": "learned", "initialisation.kind": "gpt2", "block.norm.kind": "layer"},
        **{"block.feed.kind": "mlp", "block.feed.bias": True, "block.attention.bias": True},
    }

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

    def computed(self, config: Any) -> dict[str, Any]:
        hidden, activation = config.n_inner or 4 * config.n_embd, ACTIVATIONS[config.activation_function]
        return {"block.feed.hidden": hidden, "block.feed.activation": activation}

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
