"""The same shapes in Braid and in transformers, with random weights."""

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM

VOCABULARY = 16_384
SIZES = {"28m": (384, 12, 6), "tiny": (128, 4, 4)}
"""Width, layers, heads."""


def braid_model(family: str, size: str, context: int) -> BraidForCausalLM:
    """Our model of a family and size."""
    if family == "moep":
        return moep_model(context)
    width, layers, heads = SIZES[size]
    families = {
        "gpt2": {
            "positions": "learned",
            "block": {
                "norm": "layer",
                "attention": {"heads": heads, "bias": True},
                "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
            },
            "tie_embeddings": True,
        },
        "llama": {
            "positions": "rope",
            "block": {
                "norm": "rms",
                "attention": {"heads": heads},
                "feed": {"kind": "swiglu", "hidden": 8 * width // 3},
            },
            "tie_embeddings": False,
        },
    }
    architecture = {"width": width, "context": context, "stages": [{"block": {"layers": layers}}], **families[family]}
    return BraidForCausalLM(
        BraidConfig(architecture=architecture, vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=0)
    )


def moep_model(context: int, dropout: float = 0.0, stacked: bool = True, compute: str = "sparse") -> BraidForCausalLM:
    """MoEP 28M: 10 layers of 4 blocks of half the width, 2 for each token, between projections with experts."""
    router = {"top_k": 2, "losses": {"switch": 0.2}, "compute": compute}
    experts = {"bias": True, "experts": {"names": 4, "router": router}}
    architecture = {
        "width": 384,
        "context": context,
        "positions": "learned",
        "norm": "layer",
        "tie_embeddings": True,
        "dropout": dropout,
        "block": {
            "norm": "layer",
            "attention": {"heads": 6, "bias": True},
            "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
        },
        "stages": [
            "block",
            {"project": {"to": 192, **experts}},
            {
                "parallel": {
                    "layers": 10,
                    "paths": 4,
                    "stacked": stacked,
                    "attention": {"heads": 3},
                    "join": {"kind": "routed", **router},
                }
            },
            {"project": {"to": 384, **experts}},
            "block",
        ],
    }
    return BraidForCausalLM(
        BraidConfig(architecture=architecture, vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=0)
    )


def peer_model(family: str, size: str, context: int) -> PreTrainedModel:
    """transformers' own model of the same shape, without dropout, like ours."""
    width, layers, heads = SIZES[size]
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "gpt2":
        quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=context, **common, **quiet)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=context,
            **common,
        )
    )
