"""The entrance to this floor: a model in, its lowered form out, or None where kernels cannot serve it."""

from typing import Any

import torch
from torch import nn

from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.optional_triton import HAS_TRITON
from braidlm.kernels.replacing import FORMS
from braidlm.kernels.side_stream import SideStream
from braidlm.model.language_model import LanguageModel


def lower(
    model: LanguageModel, dtype: torch.dtype, side: SideStream | None = None, compile_plain: bool = True
) -> LoweredModel | None:
    """The model for training in `dtype`; None without a GPU, without Triton, or where no layer has kernels.

    Parts that kernels do not serve are compiled by torch, unless `compile_plain` is false.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    return _lowered(model, (torch.float32,), side, compile_plain)


def lower_forward(model: LanguageModel, dtype: torch.dtype) -> LoweredModel | None:
    """The model for forward passes in bf16, of whole sequences without padding; None where kernels cannot serve it.

    In float32 the plain forward is as fast, and evaluation should give exactly its numbers. On a CPU the plain forward
    gets the modules of a CPU.
    """
    if model.device.type == "cpu":
        replace_parts(model)
    if dtype != torch.bfloat16 or model.training:
        return None
    return _lowered(model, (torch.float32, torch.bfloat16))


def _lowered(model: LanguageModel, dtypes: tuple[torch.dtype, ...], *options: Any) -> LoweredModel | None:
    if not (HAS_TRITON and all(p.is_cuda and p.dtype in dtypes for p in model.parameters())):
        return None
    lowered = LoweredModel(model, *options)
    return lowered if lowered.lowered.serves_layers else None


def replace_parts(model: nn.Module) -> None:
    """Put faster modules in the place of any model's own, where there are some for its device.

    They take over its state, so that nothing changes in what is saved.
    """
    device = next(model.parameters()).device.type
    replaced: dict[nn.Module, nn.Module] = {}  # a module may be used several times
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            form = None if child is None else FORMS.get((device, type(child)))
            if form is not None and child is not None:
                if child not in replaced:
                    replaced[child] = object.__new__(form)
                    replaced[child].__dict__ = child.__dict__
                parent._modules[name] = replaced[child]
