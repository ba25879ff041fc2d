"""Tiny checkpoints to convert: random Hugging Face models and Braid-born ones, and how to compare them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from braidlm.core.models.folders import save_model
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM

VOCABULARY = 67
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """A random GPT-2."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return randomised(GPT2LMHeadModel(GPT2Config(**{**sizes, **TOKENS, **options})))


LLAMA_SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
}


def llama(**options: Any) -> LlamaForCausalLM:
    """A random Llama."""
    return randomised(LlamaForCausalLM(LlamaConfig(**{**LLAMA_SIZES, **TOKENS, **options})))


def mistral(**options: Any) -> MistralForCausalLM:
    """A random Mistral with a window."""
    own = {"num_key_value_heads": 2, "sliding_window": 5}
    return randomised(MistralForCausalLM(MistralConfig(**{**LLAMA_SIZES, **own, **TOKENS, **options})))


def qwen2(**options: Any) -> Qwen2ForCausalLM:
    """A random Qwen2."""
    own = {"num_key_value_heads": 2}
    return randomised(Qwen2ForCausalLM(Qwen2Config(**{**LLAMA_SIZES, **own, **TOKENS, **options})))


def braid(architecture: dict[str, Any], **options: Any) -> BraidForCausalLM:
    """A random model of ours."""
    config = {"width": 32, "context": 24, **architecture}
    return randomised(BraidForCausalLM(BraidConfig(config, vocab_size=VOCABULARY, **options)))


def saved(model: BraidForCausalLM, folder: Path) -> Path:
    """Our model as a folder."""
    return save_model(model, folder, None, {"made_by": "a test"})


def randomised(model: Any) -> Any:
    """Every parameter random, biases and norms too: zeros and ones would hide that they are swapped."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            is_scale = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(1 + noise if is_scale else noise)
    return model.eval()


@torch.no_grad()
def difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of logits at real tokens: whole rows, padded on the left, padded on the right."""
    one, other = one.eval(), other.eval()
    ids = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
    whole = torch.ones_like(ids)
    left, right = whole.clone(), whole.clone()
    left[0, :5] = left[1, :1] = 0
    right[0, -6:] = right[2, -2:] = 0
    return max(_difference(one, other, ids, mask) for mask in (whole, left, right))


def _difference(one: PreTrainedModel, other: PreTrainedModel, ids: Tensor, mask: Tensor) -> float:
    # Transformers' models take positions from the mask in generate() only; ours always do.
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    a = one(ids, attention_mask=mask, position_ids=positions).logits
    b = other(ids, attention_mask=mask, position_ids=positions).logits
    assert a.dtype == b.dtype == torch.float32
    assert a.abs().max() > 0.5, "logits near zero would prove nothing"
    return (a - b)[mask.bool()].abs().max().item()


@torch.no_grad()
def difference_with_a_cache(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of logits, read in pieces that each see the ones before through a cache."""
    ids = torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(2))
    logits = []
    for model in (one.eval(), other.eval()):
        cache = DynamicCache(config=model.config)
        pieces = ids.split([6, 1, 1, 4, 1, 4], dim=1)
        logits.append(torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1))
    assert (logits[0] - one(ids).logits).abs().max() < 1e-4
    return (logits[0] - logits[1]).abs().max().item()


def rewrite(folder: Path, change: Any) -> None:
    """Change the stored tensors of a checkpoint: `change` gets the dictionary."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def reconfigure(folder: Path, **settings: Any) -> None:
    """Change config.json; a value of `...` removes the key."""
    config = json.loads((folder / "config.json").read_text()) | settings
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same names and the same bits."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
