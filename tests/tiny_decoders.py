"""Small random decoders of several architectures, as folders of transformers with a tokenizer of ours."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from braidlm.core.files import atomic_folder
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gated_folders import weights_sha256, write_adapter_files
from braidlm.opening.gating import attach

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "gpt2": GPT2Config(vocab_size=320, n_embd=16, n_layer=3, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=1),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
}


def save_decoder(name: str, tokenizer: Path, folder: Path, **changes: Any) -> Path:
    """A random decoder of this architecture, with the tokenizer of packed data."""
    config = CONFIGS[name].__class__(**{**CONFIGS[name].to_dict(), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    load_tokenizer(tokenizer).save(folder)
    return folder


def save_gates(base: Path, folder: Path, kind: Any = "vector", moved: float = 0.0) -> Path:
    """Gates for a decoder; `moved` from zero by random numbers of this size."""
    model = decoder_by_name(base).load()
    attach(model, decode(GatesConfig, {"kind": kind}))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if ".gate." in name and moved:
                parameter.normal_(std=moved)
    return save_adapter(model, folder, str(base), weights_sha256(base), {"made_by": "a test"})


def save_adapter(model: Any, folder: Path, base: str, base_sha256: str | None, lineage: dict[str, Any]) -> Path:
    """Write the gates of a decoder, in one atomic step."""
    with atomic_folder(folder) as scratch:
        write_adapter_files(model, scratch, base, base_sha256, lineage, folder.name)
    return folder
