"""Low-precision copies of parameters: one launch for all of them.

The reference is `parameter.to(dtype)`.
"""

import torch
from torch import Tensor

from braidlm.kernels.ops.launch import addresses
from braidlm.kernels.ops.linear import Casts
from braidlm.kernels.optional_triton import tl, triton

BLOCK, WARPS = 4096, 4
"""Elements that a program copies."""
COLUMNS = 3
"""Of the table, for each program: the address to read from, the elements left there, the offset to write to."""
ALIGNMENT = 64
"""Copies begin at multiples of so many elements, as matrix products require."""


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    table, casts, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    table += tl.program_id(0) * COLUMNS
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    count, target = tl.load(table + 1), tl.load(table + 2)
    if ALIGNED:
        source, count = tl.multiple_of(source, 16), tl.multiple_of(count, 4)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(source + offsets, mask=offsets < count)
    tl.store(casts + tl.multiple_of(target, 16) + offsets, x.to(casts.dtype.element_ty), mask=offsets < count)


@torch.no_grad()
def cast_all(parameters: list[Tensor], dtype: torch.dtype) -> Casts:
    """Copies of float32 parameters in another type; parameters that have it already are not copied."""
    there = {parameter: parameter.detach() for parameter in parameters if parameter.dtype == dtype}
    parameters = [parameter for parameter in parameters if parameter not in there]
    if not parameters:
        return there
    assert all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    starts, end, table = [], 0, []
    for parameter in parameters:
        starts.append(end)
        for start in range(0, parameter.numel(), BLOCK):
            table += [parameter.data_ptr() + 4 * start, parameter.numel() - start, end + start]
        end += triton.cdiv(parameter.numel(), ALIGNMENT) * ALIGNMENT
    casts = torch.empty(end, dtype=dtype, device=parameters[0].device)
    aligned = all(p.data_ptr() % 16 == 0 and p.numel() % 4 == 0 for p in parameters)
    device_table = addresses(tuple(table), casts.device)
    _cast[(len(table) // COLUMNS,)](device_table, casts, aligned, COLUMNS, BLOCK, num_warps=WARPS)
    return there | {
        p: casts[begin : begin + p.numel()].view(p.shape) for p, begin in zip(parameters, starts, strict=True)
    }
