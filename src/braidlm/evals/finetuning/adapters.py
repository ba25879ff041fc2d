"""LoRA through peft: which matrices of a model get adapters."""

from typing import Any

from torch import nn

from braidlm.core.errors import BraidError
from braidlm.evals.finetuning.classifier import HEAD
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.model.modeling_braid import BraidPreTrainedModel
from braidlm.model.routing.stacked import StackedLinear

TARGETS = ("qkv", "out", "up", "gate_up")
"""Braid's names of the matrices of attention and feed-forward."""


def check_peft() -> None:
    """Raise an error early if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise BraidError(
            "peft, which trains adapters, is not installed",
            todo="pip install 'braidlm[eval]', or train all parameters with `--finetune full`.",
        ) from None


def targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of single matrices, and of all parameters that hold a stack of them, whatever they are called."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    stacked = [f"{name}.weight" for name, module in modules.items() if isinstance(module, StackedLinear)]
    return [name for name in linear if name.rsplit(".", 1)[-1] in TARGETS], stacked


def add_adapters(model: Any, hyperparameters: Hyperparameters) -> Any:
    """peft's model around a classifier: only adapters and the new head are trained."""
    from peft import LoraConfig, get_peft_model

    dropout = hyperparameters.adapter_dropout
    # GPT-2's layers in transformers hold transposed matrices.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    chosen: dict[str, Any] = {"target_modules": "all-linear", "fan_in_fan_out": transposed}
    if isinstance(model, BraidPreTrainedModel):
        single, stacked = targets(model)
        chosen = {"target_modules": single, "target_parameters": stacked or None}
        if stacked:
            dropout = 0.0  # peft adds the adapters of a stack to its weights, where dropout of the input is impossible
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=hyperparameters.rank,
        lora_alpha=hyperparameters.alpha,
        lora_dropout=dropout,
        modules_to_save=[HEAD],
        **chosen,
    )
    return get_peft_model(model, config)
