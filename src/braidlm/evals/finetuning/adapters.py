"""LoRA on a classifier: only adapters and the new head are trained."""

from typing import Any

from braidlm.core.models.adapters import adaptable, lora, split_stacks
from braidlm.evals.finetuning.classifier import HEAD
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.model.pretrained import BraidPreTrainedModel


def add_adapters(model: Any, hyperparameters: Hyperparameters) -> Any:
    """peft's model around a classifier."""
    rank, alpha, dropout = hyperparameters.rank, hyperparameters.alpha, hyperparameters.adapter_dropout
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": [HEAD]}
    if isinstance(model, BraidPreTrainedModel):
        names = adaptable(model)
        has_stacks = bool(split_stacks(model, names)[1])
        return lora(model, names, rank, alpha, 0.0 if has_stacks else dropout, **options)
    from peft import LoraConfig, get_peft_model

    # GPT-2's layers in transformers hold transposed matrices.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    options |= {"target_modules": "all-linear", "fan_in_fan_out": transposed}
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, **options)
    return get_peft_model(model, config)
