"""Muon as torch.optim.Muon computes it, for all matrices of one shape at once, and by kernels for those of all shapes.

One after another the small matrices of a small model would leave a GPU idle. A parameter [rows, columns] is a matrix,
and a bank [member, inputs, outputs] a matrix for each member. The kernels clip gradients and update the momentum in
place in a pass before the products, and the weights in a pass after them; their reference is
`clip_grads_with_norm_`, a product of the weights with their factors, and the step of BatchedMuon.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from braidlm.kernels.optimizers.gradient_norm import AddressTable, address, clip_factor, factors_of, number
from braidlm.kernels.optimizers.newton_schulz import SMALLEST_NORM, NewtonSchulz, orthogonalized
from braidlm.kernels.optional_triton import tl, triton

TILE, WARPS = 64, 4
"""Rows and columns that a program reads; blocks of the products are made of whole tiles."""
COLUMNS = 9
"""Columns of the table: addresses of weight, gradient, momentum and learning rate, rows and columns, in the stack of
all matrices the offset and the length of rows, negative for a matrix that is stored transposed, and the address of the
weight's factor."""


class BatchedMuon(optim.Optimizer):
    """The options are those of torch.optim.Muon; a learning rate that is a tensor stays on the device."""

    state_keys = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
    ):
        """`dtype` is that of the products; the momentum and the weights keep their own."""
        self.dtype = dtype
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**options, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; nothing waits for the device."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for (*shape, ratio), parameters in in_batches(trained, group["adjust_lr_fn"]).items():
                self._update(shape, ratio, parameters, group)

    def _update(self, shape: list[int], ratio: float, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        gradients: list[Any] = [self.held(p.grad) for p in parameters]
        averages = [self.held(self._momentum_buffer(p)) for p in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, averages, momentum) if group["nesterov"] else averages
        whole = [self.whole(each, p) for each, p in zip(directions, parameters, strict=True)]
        steps = self.orthogonalize(torch.cat([each.reshape(-1, *shape) for each in whole]), group["ns_steps"])
        steps = steps.to(torch.float32, memory_format=torch.contiguous_format).mul_(-rate * ratio)
        weights = [self.held(p) for p in parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        split = steps.split([each.numel() // steps[0].numel() for each in whole])
        parts = [self.part(each.view_as(w), p) for each, w, p in zip(split, whole, parameters, strict=True)]
        torch._foreach_add_(weights, parts)

    def held(self, tensor: Any) -> Any:
        """What this process holds of a tensor: all of it, unless a subclass knows of other processes."""
        return tensor

    def whole(self, held: Tensor, parameter: Tensor) -> Tensor:
        """The whole of what processes hold of a tensor that lies as a parameter does."""
        return held

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """What this process holds of a whole tensor that lies as a parameter does."""
        return whole

    def orthogonalize(self, matrices: Tensor, ns_steps: int) -> Tensor:
        """The directions of steps from whole matrices [matrix, rows, columns]."""
        return orthogonalized(matrices.to(self.dtype), ns_steps)

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return state["momentum_buffer"]


def in_batches(parameters: Iterable[Tensor], adjust_lr_fn: str) -> dict[tuple[int, int, float], list[Tensor]]:
    """The parameters by the shape of their matrices and the ratio of their learning rate, in order."""
    batches: dict[tuple[int, int, float], list[Tensor]] = {}
    for parameter in parameters:
        rows, columns = parameter.shape[-2:]
        batches.setdefault((rows, columns, lr_ratio(parameter, adjust_lr_fn)), []).append(parameter)
    return batches


def lr_ratio(parameter: Tensor, adjust_lr_fn: str) -> float:
    """The factor of the learning rate for the matrices of a parameter."""
    rows, columns = parameter.shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))  # steps of the size that AdamW's have
    outputs, inputs = (columns, rows) if parameter.ndim == 3 else (rows, columns)
    return math.sqrt(max(1, outputs / inputs))


@triton.jit
def _tile(table, tiles, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's entry of the table, and its elements: offsets and mask in the parameter, offsets in the stack."""
    tiles += tl.program_id(0) * 3
    index = tl.load(tiles)
    row = tl.multiple_of(tl.load(tiles + 1), TILE) + tl.arange(0, TILE)
    column = tl.multiple_of(tl.load(tiles + 2), TILE) + tl.arange(0, TILE)
    entry = table + index * COLUMNS
    rows, columns = tl.load(entry + 4), tl.load(entry + 5)
    if ALIGNED:
        columns = tl.multiple_of(columns, 4)
    begin, stride = tl.multiple_of(tl.load(entry + 6), 64), tl.multiple_of(tl.load(entry + 7), 64)
    offsets = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return index, entry, row, column, offsets, mask, begin, stride


@triton.jit
def _directions(  # type: ignore[no-untyped-def]
    table, tiles, norm, clip, stack, sums,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, CLIPS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Update the momentum; write the directions into the stack, padded with zeros, and the sums of their squares."""
    _, entry, row, column, offsets, mask, begin, stride = _tile(table, tiles, ALIGNED, COLUMNS, TILE)
    averages = address(entry + 2, ALIGNED) + offsets
    gradient = tl.load(address(entry + 1, ALIGNED) + offsets, mask=mask, other=0.0)
    average = tl.load(averages, mask=mask, other=0.0)
    if CLIPS:
        gradient *= clip_factor(norm, clip)
    average += (1.0 - MOMENTUM) * (gradient - average)
    tl.store(averages, average, mask=mask)
    direction = average + (1.0 - MOMENTUM) * (gradient - average) if NESTEROV else average
    direction = direction.to(stack.dtype.element_ty)
    if stride < 0:
        tl.store(stack + begin - column[:, None] * stride + row[None, :], tl.trans(direction))
    else:
        tl.store(stack + begin + row[:, None] * stride + column[None, :], direction)
    rounded = direction.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(rounded * rounded))


@triton.jit
def _scales(sums, ends, scales, smallest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """By what each matrix is multiplied to have the norm 1."""
    matrix = tl.program_id(0)
    first, end = tl.load(ends + matrix), tl.load(ends + matrix + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(first, end, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, mask=offsets < end, other=0.0)
    tl.store(scales + matrix, 1.0 / tl.maximum(tl.sqrt(tl.sum(total)), smallest))


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table, tiles, ratios, stack, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Weights take a step in the direction that the stack holds, and decay; `ratios` of the rate: step, decay."""
    index, entry, row, column, offsets, mask, begin, stride = _tile(table, tiles, ALIGNED, COLUMNS, TILE)
    weights = address(entry, ALIGNED) + offsets
    lr = number(entry + 3)
    ratio, decay = tl.load(ratios + 2 * index), tl.load(ratios + 2 * index + 1)
    factor = number(entry + 8)
    weight = tl.load(weights, mask=mask, other=0.0)
    if stride < 0:
        direction = tl.trans(tl.load(stack + begin - column[:, None] * stride + row[None, :]))
    else:
        direction = tl.load(stack + begin + row[:, None] * stride + column[None, :])
    weight = weight * ((1.0 - lr * decay) * factor) - lr * ratio * direction.to(tl.float32)
    tl.store(weights, weight, mask=mask)


class FusedMuon:
    """The steps of one optimizer whose learning rates are tensors on the device."""

    def __init__(self, optimizer: BatchedMuon, factors: Mapping[Tensor, Tensor]):
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.matrices = [
            (parameter, group, first)
            for group in optimizer.param_groups
            for parameter in group["params"]
            for first in range(0, parameter.numel(), math.prod(parameter.shape[-2:]))
        ]
        """For each matrix its parameter, its group, and the index of the matrix's first element in the parameter."""
        device = self.parameters[0].device
        self.newton_schulz = NewtonSchulz([tuple(p.shape[-2:]) for p, *_ in self.matrices], device)
        self.table = AddressTable(len(self.matrices), COLUMNS, device)
        ratios = [(lr_ratio(p, group["adjust_lr_fn"]), group["weight_decay"]) for p, group, _ in self.matrices]
        self.ratios = torch.tensor(ratios, dtype=torch.float32, device=device)
        self.factors = factors_of([p for p, *_ in self.matrices], factors)
        tiles, ends = self._tiles()
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)

    def _tiles(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """For each tile its matrix, first row and first column, padding included; and how many precede each matrix."""
        tiles: list[tuple[int, int, int]] = []
        ends = [0]
        for index, place in enumerate(self.newton_schulz.places):
            rows, columns = (place.columns, place.rows) if place.transposed else (place.rows, place.columns)
            tiles += [(index, row, column) for row in range(0, rows, TILE) for column in range(0, columns, TILE)]
            ends.append(len(tiles))
        return tiles, ends

    def counts(self) -> list[Tensor | None]:
        """Muon counts no steps."""
        return [None] * len(self.parameters)

    def step(self, norm: Tensor, clip: float | None) -> None:
        """Update the parameters by gradients that are scaled down if the norm is above `clip`."""
        rows = self._rows()
        aligned = all(value % 16 == 0 for row in rows for value in row[:3]) and all(row[5] % 4 == 0 for row in rows)
        table, group = self.table.write(rows), self.optimizer.param_groups[0]
        stack = torch.empty(self.newton_schulz.elements, dtype=self.optimizer.dtype, device=table.device)
        sums = torch.empty(len(self.tiles), dtype=torch.float32, device=table.device)
        _directions[(len(self.tiles),)](
            table, self.tiles, norm, clip or 0.0, stack, sums,
            group["momentum"], group["nesterov"], clip is not None, aligned, COLUMNS, TILE, num_warps=WARPS,
        )  # fmt: skip
        scales = sums.new_empty(len(self.matrices))
        _scales[(len(scales),)](sums, self.ends, scales, SMALLEST_NORM, 128, num_warps=1)
        stack = self.newton_schulz.run(stack, scales, group["ns_steps"])
        _update[(len(self.tiles),)](
            table, self.tiles, self.ratios, stack, aligned, COLUMNS, TILE, num_warps=WARPS
        )  # fmt: skip

    def _rows(self) -> list[list[int]]:
        rows = []
        places = self.newton_schulz.places
        for (parameter, group, first), place, factor in zip(self.matrices, places, self.factors, strict=True):
            tensors = (parameter, parameter.grad, self.optimizer.state[parameter]["momentum_buffer"])
            addresses = [tensor.data_ptr() + first * tensor.element_size() for tensor in tensors]
            stride = -place.columns if place.transposed else place.columns
            shape = parameter.shape[-2:]
            rows.append([*addresses, group["lr"].data_ptr(), *shape, place.offset, stride, factor.data_ptr()])
        return rows
