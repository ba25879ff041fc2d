"""Logits on random tokens, by which edits and exports check that a new model is the old one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidlm.core.console import say
from braidlm.core.devices import free_memory
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import errors_of_transformers

UNCHANGED = 1e-4
"""The largest change of a logit where an edit promises none: sums of other lengths are rounded in another way."""
PROBE = (2, 32)
"""Sequences and their tokens at which logits are compared where no text is given."""


def probe_ids(config: Any) -> Tensor:
    """Random token ids [sequence, time] at which the logits of two models are compared."""
    length = min(PROBE[1], getattr(config, "max_position_embeddings", PROBE[1]))
    return torch.randint(config.vocab_size, (PROBE[0], length), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Probe:
    """Random tokens, and the logits that a model computes for them."""

    ids: Tensor
    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any) -> "Probe":
        ids = probe_ids(model.config)
        return cls(ids, model(ids).logits)


def check_promise(promise: str, before: Tensor, after: Tensor, largest: float = UNCHANGED) -> None:
    """Refuse a result that breaks a promise; the sentence ends with the largest change of a number."""
    change = (before - after).abs().max().item()
    if not change <= largest:
        todo = "Nothing was written. Please report it: this is a mistake of Braid's."
        raise BraidError(f"{promise} {change:g}", todo=todo)


def rounding(logits: Tensor) -> float:
    """The largest change of a logit that other sums of the same numbers explain: large logits are rounded more."""
    return UNCHANGED * max(1.0, logits.abs().max().item())


def fits_beside(tensors: Iterable[Tensor]) -> bool:
    """Whether a model of these weights fits into memory in float32, to be compared; where it does not, that is said."""
    needed, free = 4 * sum(tensor.numel() for tensor in tensors), free_memory(torch.device("cpu"))
    if free is None or needed <= free:
        return True
    numbers = f"in float32 the new model needs {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
    say(f"  logits are not compared: {numbers}")
    return False


@torch.no_grad()
def logits_of_transformers(folder: Path, ids: Tensor) -> Tensor:
    """The logits of a folder as plain transformers opens it; a tensor that it misses or does not know is an error."""
    from transformers import AutoModelForCausalLM

    with errors_of_transformers(folder):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if wrong := [f"{what}: {name}" for what in ("missing_keys", "unexpected_keys") for name in sorted(info[what])]:
        raise BraidError(f"transformers does not read these weights as they are:{bullet_list(wrong)}", str(folder))
    # Transformers needs twice the memory to load weights in another type than the file's.
    return model.float().eval()(ids).logits  # type: ignore[no-any-return]
