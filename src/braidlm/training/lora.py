"""LoRA in the training loop: adapters on a frozen Braid model or decoder of transformers, in peft's own format.

A checkpoint of a Braid model has the adapter merged into its matrices, an ordinary model folder; the adapter alone is
beside it, in CHECKPOINT/adapter. A checkpoint of a decoder is the adapters alone, in a folder that names its base.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from braidlm.core.differences import listed
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.adapters import adaptable, choose_names, lora, matrices, split_stacks
from braidlm.core.models.folders import load_lineage
from braidlm.opening.gating import find_parts
from braidlm.training.recipe import LoraTrainingConfig

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

ADAPTER = "adapter"
"""A folder in the model's: beside its files, peft's configuration would make transformers load the base."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name of a model's only adapter
TARGETS = "training.lora.targets"


class Lora:
    """LoRA adapters on named matrices of a model, whose modules they wrap."""

    def __init__(self, model: Any, names: list[str], config: LoraTrainingConfig, **options: Any):
        self.model, self.names, self.config = model, names, config
        alpha = 2 * config.rank if config.alpha is None else config.alpha
        self.peft = lora(model, names, config.rank, alpha, config.dropout, task_type="CAUSAL_LM", **options)

    def write(self, folder: Path) -> None:
        """Write the adapters alone, as peft does."""
        self.peft.save_pretrained(folder, save_embedding_layers=self.config.embedding == "trained")

    def read(self, folder: Path) -> None:
        """Take the weights of adapters that `write` wrote."""
        from peft import set_peft_model_state_dict

        tensors = load_file(folder / ADAPTER_WEIGHTS)
        found: Any = set_peft_model_state_dict(self.peft, tensors)
        if found.unexpected_keys or sum(".lora_" in name for name in tensors) != 2 * len(self.names):
            raise BraidError("these adapters are of other matrices", str(folder), "Begin a new run.")


class Adapter(Lora):
    """An adapter on a Braid model, which alone is trained from then on."""

    model: "BraidForCausalLM"

    def __init__(self, model: "BraidForCausalLM", config: LoraTrainingConfig, base: dict[str, Any]):
        self.base = base  # which model it is, as in a lineage
        self.base_weights = model.state_dict()
        """The model's own weights, in the same memory, under the names that they have without adapters."""
        names = _chosen(model, config)
        single, stacked = split_stacks(model, names)
        self.has_banks = bool(stacked)
        self.adapted = f"matrices: {len(single)}, banks: {len(stacked)}"
        if self.has_banks and config.dropout:
            what = "adapters of banks (experts, parallel paths) cannot have dropout: peft adds them to the weights"
            todo = "Leave it at 0, or choose other matrices with training.lora.targets."
            raise BraidError(what, "training.lora.dropout", todo)
        super().__init__(model, names, config)
        if config.embedding == "trained":  # peft has frozen it
            model.get_input_embeddings().requires_grad_(True)

    def summary(self) -> str:
        """How much is trained."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.model.parameters()) - trained
        made = f"LoRA of rank {self.config.rank} ({self.adapted})"
        made += " with the embedding" if self.config.embedding == "trained" else ""
        return f"{made} trains {trained:,} parameters; {frozen:,} are frozen."

    @torch.no_grad()
    def merged(self) -> "BraidForCausalLM":
        """A model with the adapter in its matrices; the trained model's weights and its adapter stay as they are."""
        weights = dict(self.base_weights)
        for name in self.names:
            layer: Any = self.model.get_submodule(name)
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(NAME)
        model = skeleton(self.model.config)
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        return model

    def write(self, folder: Path) -> None:
        super().write(folder / ADAPTER)

    def read(self, folder: Path) -> None:
        check_same_base(folder, self.base)
        super().read(folder / ADAPTER)


class DecoderLora(Lora):
    """Adapters on the matrices of a decoder's layers; from then on these are trained, and all that was."""

    def __init__(self, model: "transformers.PreTrainedModel", config: LoraTrainingConfig, base: str):
        """`base` is the name that the decoder is opened by without the adapters."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = layer_matrices(model)
        names = list(found)
        if config.targets is not None:
            with errors_at(TARGETS):
                names = choose_names(names, config.targets)
        super().__init__(model, names, config, fan_in_fan_out=any(isinstance(found[name], Conv1D) for name in names))
        self.peft.peft_config[NAME].base_model_name_or_path = base
        for parameter in trained:  # peft freezes it
            parameter.requires_grad_(True)


def check_same_base(folder: Path, base: dict[str, Any]) -> None:
    """Refuse adapters or gates of a folder that were trained on another model than this one, as in a lineage."""
    sources = (load_lineage(folder) or {}).get("sources") or []
    if sources and base not in sources:
        todo = "Go on with the model that it was, or begin a new run with another folder (out=DIR)."
        raise BraidError("the model that these adapters were trained on has changed since", str(folder), todo)


def layer_matrices(model: "transformers.PreTrainedModel") -> dict[str, nn.Module]:
    """The matrices in the layers of a decoder by name; gates are trained themselves."""
    prefix = f"{find_parts(model).layers_name}."
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and isinstance(module, (nn.Linear, Conv1D))
    }


def _chosen(model: "BraidForCausalLM", config: LoraTrainingConfig) -> list[str]:
    """The matrices that get adapters: those that are not frozen, and those of routers only if they are named. A matrix
    that layers share gets none, since what one layer adds could not be merged into it."""
    shared = {name.rpartition(".")[0] for both in model.tied.items() for name in both}
    if config.targets is None:
        names = [name for name in adaptable(model) if name not in shared]
    else:
        with errors_at(TARGETS):
            names = choose_names(list(matrices(model)), config.targets)
        if taken := [name for name in names if name in shared]:
            what = f"layers share these matrices, and no adapter of one layer can be merged into them: {listed(taken)}"
            todo = "Choose others, or let layers share with a LoRA of each: `braid edit share MODEL --lora 8`."
            raise BraidError(what, TARGETS, todo)
    trained = [name for name in names if model.get_submodule(name).weight.requires_grad]
    if not trained:
        what = "every matrix that could have an adapter is frozen, by training.freeze or by the model's own `frozen`"
        raise BraidError(what, TARGETS, "Take parts out of training.freeze, or choose other matrices.")
    return trained
