"""Copies of parameters in the type of the matrix products: one pass over all of them, by as many programs as they need.

The reference is `parameter.to(dtype)`.
"""

import torch
from torch import Tensor

from braidlm.kernels.ops.addresses import addresses
from braidlm.kernels.ops.linear import Casts

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

BLOCK, WARPS = 4096, 4
"""Numbers that a program copies."""
COLUMNS = 3
"""Of the table, for each program: the address to read from, config many numbers are left there, where they go."""
APART = 64
"""Copies begin at multiples of so many numbers, as products want them."""


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    table, copies, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    table += tl.program_id(0) * COLUMNS
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    left, to = tl.load(table + 1), tl.load(table + 2)
    if ALIGNED:
        source, left = tl.multiple_of(source, 16), tl.multiple_of(left, 4)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(source + offsets, mask=offsets < left)
    tl.store(copies + tl.multiple_of(to, 16) + offsets, x.to(copies.dtype.element_ty), mask=offsets < left)


@torch.no_grad()
def cast_all(parameters: list[Tensor], dtype: torch.dtype) -> Casts:
    """Copies of float32 parameters."""
    if not parameters:
        return {}
    assert all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    begins, end, table = [], 0, []
    for parameter in parameters:
        begins.append(end)
        for done in range(0, parameter.numel(), BLOCK):
            table += [parameter.data_ptr() + 4 * done, parameter.numel() - done, end + done]
        end += triton.cdiv(parameter.numel(), APART) * APART
    copies = torch.empty(end, dtype=dtype, device=parameters[0].device)
    aligned = all(p.data_ptr() % 16 == 0 and p.numel() % 4 == 0 for p in parameters)
    where = addresses(tuple(table), copies.device)
    _narrow[(len(table) // COLUMNS,)](where, copies, aligned, COLUMNS, BLOCK, num_warps=WARPS)
    return {p: copies[begin : begin + p.numel()].view(p.shape) for p, begin in zip(parameters, begins, strict=True)}
