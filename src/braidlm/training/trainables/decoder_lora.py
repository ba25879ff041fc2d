"""LoRA on a decoder of transformers: peft's adapters, saved as peft saves them, in a folder that names its base."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.adapters import choose_names, lora
from braidlm.opening.structure import find_parts
from braidlm.training.config import LoraTrainingConfig
from braidlm.training.lora import ADAPTER_WEIGHTS, NAME, TARGETS


class DecoderLora:
    """Adapters on the matrices of a decoder's layers; from then on these are trained, and all that was."""

    def __init__(self, model: PreTrainedModel, config: LoraTrainingConfig, base: str):
        """`base` is the name that the decoder is opened by without the adapters."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = layer_matrices(model)
        names = list(found)
        if config.targets is not None:
            with errors_at(TARGETS):
                names = choose_names(names, config.targets)
        transposed = any(isinstance(found[name], Conv1D) for name in names)
        self.model, self.count = model, len(names)
        self.peft = lora(
            model,
            names,
            config.rank,
            config.scale * config.rank,
            config.dropout,
            task_type="CAUSAL_LM",
            fan_in_fan_out=transposed,
        )
        self.peft.peft_config[NAME].base_model_name_or_path = base
        for parameter in trained:  # peft freezes it
            parameter.requires_grad_(True)

    def write(self, folder: Path) -> None:
        self.peft.save_pretrained(folder, save_embedding_layers=False)

    def read(self, folder: Path) -> None:
        """Take the weights of adapters that `write` wrote."""
        from peft import set_peft_model_state_dict

        tensors = load_file(folder / ADAPTER_WEIGHTS)
        found: Any = set_peft_model_state_dict(self.peft, tensors)
        if found.unexpected_keys or len(tensors) != 2 * self.count:
            raise BraidError("these adapters are of other matrices", str(folder), "Begin a new run.")


def layer_matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The matrices in the layers of a decoder by name; gates are trained themselves."""
    prefix = f"{find_parts(model).layers_name}."
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and isinstance(module, (nn.Linear, Conv1D))
    }
