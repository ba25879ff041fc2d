"""Tiny models with byte ends that know some tokens, some of which have several pieces."""

from typing import Any

import torch

from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import tiny_model

HEADS = ("bytes_parallel", "bytes_autoregressive")
TOKENS: list[bytes | None] = [
    None,
    b"a",
    b"ab",
    b"abc",
    b"abcd",
    b"abcdefghij",
    b"efghabcdij",
    b"b",
    "猫".encode(),
    b"\xff",
    None,
    b"abcde",
]
SMALL = {"width": 8, "heads": 2, "piece": 4}


def byte_model(head: str = HEADS[0], dtype: torch.dtype = torch.float64, **changes: Any) -> BraidForCausalLM:
    options = SMALL | changes
    model = tiny_model(
        dtype, vocab_size=len(TOKENS), embedding={"kind": "bytes", **options}, head={"kind": head, **options}
    )
    for end in (model.model.embedding, model.head):
        end.read_tokenizer(TOKENS)
    return model
