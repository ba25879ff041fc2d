"""The entrance to this floor: a model in, its lowered form out, or None where kernels cannot serve it."""

import contextlib
from typing import TYPE_CHECKING

import torch

from braidlm.kernels.side_stream import SideStream
from braidlm.model.modeling_braid import BraidForCausalLM

if TYPE_CHECKING:
    from braidlm.kernels.planned_pass import LoweredModel

HAS_TRITON = False
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

    HAS_TRITON = True


def lower(
    model: BraidForCausalLM, dtype: torch.dtype, side: SideStream | None = None, compile_plain: bool = True
) -> "LoweredModel | None":
    """The model for training in `dtype`; None without a GPU, without Triton, or where no layer has kernels.

    Parts that kernels do not serve are compiled by torch, unless `compile_plain` is false.
    """
    parameters = list(model.parameters())
    on_gpu = all(p.is_cuda and p.dtype == torch.float32 for p in parameters)
    if not (HAS_TRITON and on_gpu and dtype in (torch.float32, torch.bfloat16)):
        return None
    from braidlm.kernels.planned_pass import LoweredModel  # which needs Triton

    lowered = LoweredModel(model, side, compile_plain)
    return lowered if lowered.lowered.serves_layers else None


def lower_forward(model: BraidForCausalLM, dtype: torch.dtype) -> "LoweredModel | None":
    """The model for forward passes in bf16, of whole sequences without padding; None where kernels cannot serve it.

    In float32 the plain forward is as fast, and evaluation should give exactly its numbers.
    """
    if not HAS_TRITON or dtype != torch.bfloat16 or model.training:
        return None
    if not all(p.is_cuda and p.dtype in (torch.float32, torch.bfloat16) for p in model.parameters()):
        return None
    from braidlm.kernels.planned_pass import LoweredModel  # which needs Triton

    lowered = LoweredModel(model)
    return lowered if lowered.lowered.serves_layers else None
