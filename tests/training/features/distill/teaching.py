"""Small teachers with the tokenizer of a data set."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from braidlm.core.models.folders import save_model
from braidlm.data.packing.packed_data import token_dtype
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.training.features.distill.storing import IDS, LOG_DTYPE, LOGS, StoredTargets
from tests.tiny_models import tiny_model


def braid_teacher(folder: Path, data: Path, seed: int = 0, **changes: Any) -> Path:
    """A Braid model of random weights."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(data)
    return save_model(tiny_model(vocab_size=tokenizer.vocab_size, **changes), folder, tokenizer, {})


def transformers_teacher(folder: Path, data: Path, seed: int = 0, **changes: Any) -> Path:
    """A GPT-2 of transformers, of random weights."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(data)
    sizes = {"n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocab_size, **{**sizes, **changes}))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def stored_targets(folder: Path, log_probabilities: torch.Tensor, k: int) -> StoredTargets:
    """Of log-probabilities [tokens, vocabulary] the best k, as they would have been stored."""
    tokens, vocab_size = log_probabilities.shape
    best = log_probabilities.cpu().topk(k)
    best.indices.numpy().astype(token_dtype(vocab_size)).tofile(folder / IDS)
    best.values.numpy().astype(LOG_DTYPE).tofile(folder / LOGS)
    return StoredTargets(folder, tokens, k, vocab_size)
