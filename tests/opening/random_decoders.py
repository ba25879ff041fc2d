"""Tiny decoders of several architectures with random weights."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

WIDTH, DEPTH, VOCABULARY = 16, 4, 50
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0}
GPT2 = {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "n_positions": 64}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_key_value_heads": 2}),
    "deepseek-coder": (LlamaConfig, {"rope_scaling": ROPE, "rope_theta": 100_000.0}),
    "mistral": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": 8}),
    "phi3": (Phi3Config, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": (GPT2Config, GPT2),
    "gpt-neox": (GPTNeoXConfig, {"rotary_pct": 0.5}),
}
"""Architectures by name: the class of the configuration, and what it has beside the common options."""


def tiny_decoder_config(name: str, **options: Any) -> PretrainedConfig:
    kind, own = CONFIGS[name]
    common = {key: value for key, value in COMMON.items() if kind is not GPT2Config or key not in GPT2_NAMES}
    return kind(**{**common, **own, **options})


GPT2_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@torch.no_grad()
def tiny_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A model in evaluation mode whose weights are large enough for every part to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_decoder_config(name, **options))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


@torch.no_grad()
def open_gates(gates: dict[int, Any], seed: int = 0, scale: float = 0.3) -> None:
    """Gates as training might leave them: no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    for gate in gates.values():
        for parameter in gate.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)


def token_ids(batch: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))
