"""LoRA in the training loop: an adapter on the frozen model to start from, in peft's own format.

A checkpoint is the model with the adapter merged into its matrices, an ordinary model folder; the adapter alone is
beside it, in CHECKPOINT/adapter.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from braidlm.core.differences import listed
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.adapters import adaptable, choose_matrices, lora, split_stacks
from braidlm.core.models.folders import load_lineage
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.config import LoraTrainingConfig

ADAPTER = "adapter"
"""In the model folder: beside its files, peft's configuration would make transformers load the base."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"
"""peft's name of a model's only adapter."""
TARGETS = "training.lora.targets"


class Adapter:
    """A LoRA adapter on a model, whose modules it wraps; from then on the adapter alone is trained."""

    def __init__(self, model: BraidForCausalLM, config: LoraTrainingConfig, base: dict[str, Any]):
        self.base = base
        """Which model it is, as in a lineage."""
        self.model, self.config = model, config
        self.base_weights = model.state_dict()
        """In the same memory as those of the model, under the names that they have without adapters."""
        self.names = _chosen(model, config)
        single, stacked = split_stacks(model, self.names)
        self.has_banks = bool(stacked)
        self.adapted = f"matrices: {len(single)}, banks: {len(stacked)}"
        if self.has_banks and config.dropout:
            raise BraidError(
                "adapters of banks (experts, parallel paths) cannot have dropout: peft adds them to the weights",
                "training.lora.dropout",
                "Leave it at 0, or choose other matrices with training.lora.targets.",
            )
        alpha = config.scale * config.rank
        self.peft = lora(model, self.names, config.rank, alpha, config.dropout, task_type="CAUSAL_LM")

    def summary(self) -> str:
        """How much is trained."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        rank = self.config.rank
        return f"LoRA of rank {rank} ({self.adapted}) trains {trained:,} parameters; {frozen:,} are frozen."

    @torch.no_grad()
    def merged(self) -> BraidForCausalLM:
        """A model with the adapter in its matrices; frozen weights and adapter stay as they are."""
        weights = dict(self.base_weights)
        for name in self.names:
            layer: Any = self.model.get_submodule(name)
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(NAME)
        model = skeleton(self.model.config)
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        return model

    def write(self, checkpoint: Path) -> None:
        """Write the adapter alone, as peft does."""
        self.peft.save_pretrained(checkpoint / ADAPTER, save_embedding_layers=False)

    def read(self, checkpoint: Path) -> None:
        """Take the weights of an adapter that `write` wrote."""
        from peft import set_peft_model_state_dict

        sources = (load_lineage(checkpoint) or {}).get("sources") or []
        if sources and self.base not in sources:
            raise BraidError(
                "the model that this adapter was trained on has changed since",
                str(checkpoint),
                "Go on with the model that it was, or begin a new run with another folder (out=DIR).",
            )
        tensors = load_file(checkpoint / ADAPTER / ADAPTER_WEIGHTS)
        found: Any = set_peft_model_state_dict(self.peft, tensors)
        if found.unexpected_keys or len(tensors) != 2 * len(self.names):
            raise BraidError("this adapter is of other matrices", str(checkpoint / ADAPTER), "Begin a new run.")


def _chosen(model: BraidForCausalLM, config: LoraTrainingConfig) -> list[str]:
    """The matrices that get adapters: those that are not frozen, and those of routers only if they are named.

    A matrix that layers share gets none, since what one layer adds could not be merged into it.
    """
    shared = {name.rpartition(".")[0] for both in model.tied.items() for name in both}
    if config.targets is None:
        names = [name for name in adaptable(model) if name not in shared]
    else:
        with errors_at(TARGETS):
            names = choose_matrices(model, config.targets)
        if taken := [name for name in names if name in shared]:
            raise BraidError(
                f"layers share these matrices, and no adapter of one layer can be merged into them: {listed(taken)}",
                TARGETS,
                "Choose others, or let layers share with a LoRA of each: `braid edit share MODEL --lora 8`.",
            )
    trained = [name for name in names if model.get_submodule(name).weight.requires_grad]
    if not trained:
        raise BraidError(
            "every matrix that could have an adapter is frozen, by training.freeze or by the model's own `frozen`",
            TARGETS,
            "Take parts out of training.freeze, or choose other matrices.",
        )
    return trained
