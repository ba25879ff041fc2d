"""Tiny models of the shapes that llama.cpp knows."""

from typing import Any

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.bridges.checkpoints import randomised

ROWS = 260
"""Two more than the tokenizer of bytes has tokens."""
TWO_LAYERS = {"width": 32, "context": 24, "stages": [{"block": {"layers": 2}}]}
LLAMA = {**TWO_LAYERS, "block": {"attention": {"heads": 4, "kv_heads": 2}}}
GPT2 = {
    **TWO_LAYERS,
    "positions": "learned",
    "block": {
        "norm": "layer",
        "attention": {"heads": 4, "bias": True},
        "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
    },
}
BIASED = {"attention": {"heads": 4, "head_dim": 12, "bias": True}, "feed": {"bias": True}, "norm": {"eps": 0.1}}
YARN = {"kind": "yarn", "factor": 4.0, "original_context": 12}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_context": 12}
MODELS = {
    "llama": LLAMA,
    "interleaved pairs": {**LLAMA, "positions": {"pairs": "interleaved", "theta": 500.0}},
    "untied, biased, other sizes": {**LLAMA, "tie_embeddings": False, "block": BIASED},
    "shared weights": {**LLAMA, "stages": [{"block": {"layers": 3, "share": "blocks"}}]},
    "linear scaling": {**LLAMA, "positions": {"scaling": {"kind": "linear", "factor": 3.0}}},
    "llama3 scaling": {**LLAMA, "positions": {"scaling": LLAMA3}},
    "yarn scaling": {**LLAMA, "positions": {"scaling": YARN}},
    "gpt2": GPT2,
    "gpt2, untied": {**GPT2, "tie_embeddings": False},
    "gpt2 without biases": {
        **GPT2,
        "block": {
            "norm": {"kind": "layer", "bias": False},
            "attention": {"heads": 4},
            "feed": {"kind": "mlp", "activation": "gelu_new"},
        },
    },
}


def saved_braid(folder, architecture: dict[str, Any], tokenizer: Any = None, rows: int = ROWS, **lineage: Any):
    """A random model of ours in a folder."""
    model = randomised(BraidForCausalLM(BraidConfig(architecture, vocab_size=rows)))
    save_model(model, folder, tokenizer or bytes_tokenizer(), {"made_by": "a test", **lineage})
    return model
