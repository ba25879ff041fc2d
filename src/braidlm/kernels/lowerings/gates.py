"""Gates around layers, in the pass and in other libraries' models.

The sum of a layer's output with a gate that is a factor is one pass over memory, for which torch has no vectorised
kernel: on an H200 its own takes two to three times as long as the traffic needs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.context import LayerOutput, PassContext, PendingAdd, Stream, add_pending, combined
from braidlm.kernels.lowerings.lowering import LayerLowering, Lowering, lowering_of, lowers, lowers_mixin, refusal
from braidlm.kernels.optional_triton import HAS_TRITON, tl, triton
from braidlm.kernels.replacing import replaces
from braidlm.model.gates import GatedLayer, MatrixGate, ScalarGate, VectorGate

ELEMENTS, WARPS = 4096, 8
"""Elements of a program's block, and its warps."""
MIN_SIZE = 2**23
"""Elements of a stream from which on a layer takes longer than Triton's launch, which costs the host more than torch's.

In a graph launches cost nothing."""


@triton.jit
def _add_scaled(output, hidden, weight, out, size, width, ELEMENTS: tl.constexpr, SCALAR: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < size
    factor = tl.load(weight) if SCALAR else tl.load(weight + offsets % width, mask=mask, other=0.0)
    x = tl.load(hidden + offsets, mask=mask, other=0.0).to(tl.float32) * factor.to(tl.float32)
    x += tl.load(output + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, x.to(out.dtype.element_ty), mask=mask)


def add_scaled(output: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """output [..., width], hidden of that shape, weight [width] or [1] -> output + weight * hidden."""
    output, size = output.contiguous(), output.numel()
    out = torch.empty_like(output)
    _add_scaled[(triton.cdiv(size, ELEMENTS),)](
        output, hidden.contiguous(), weight, out, size, output.shape[-1], ELEMENTS, len(weight) == 1, num_warps=WARPS
    )
    return out


class AddScaled(torch.autograd.Function):
    """`add_scaled` with gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return add_scaled(output, hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = None
        if ctx.needs_input_grad[1]:
            of_hidden = (gradient * weight.to(gradient.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            of_weight = (gradient.float() * hidden.float()).flatten(0, -2).sum(0)
            of_weight = (of_weight if len(weight) > 1 else of_weight.sum(0, keepdim=True)).to(weight.dtype)
        return gradient, of_hidden, of_weight


@lowers(MatrixGate)
class GateLowering(Lowering):
    """What a gate adds to the output of its layer; a matrix is one product already."""

    honours = {"bias", "rank"}

    def add(self, gate: Any, hidden: Tensor, output: Tensor) -> Tensor:
        """The layer's `output` [rows, width] plus what the gate makes of the layer's input."""
        return gate.add(hidden, output)  # type: ignore[no-any-return]


@lowers(VectorGate, ScalarGate)
class FactorLowering(GateLowering):
    honours = set[str]()

    def add(self, gate: VectorGate, hidden: Tensor, output: Tensor) -> Tensor:
        return AddScaled.apply(output, hidden, gate.weight)  # type: ignore[no-any-return]


@lowers_mixin(GatedLayer)
class GatedLowering(LayerLowering):
    """Mixed into the lowering of a layer: what that leaves of the stream, plus what the gate makes of the input."""

    def reject(self, part: Any, body: Any) -> str | None:
        reason = refusal(part.gate, body)
        return super().reject(part, body) if reason is None else f"gate: {reason}"

    def run(self, stream: Stream, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        hidden = add_pending(combined(stream), pending)
        output, pending, routings = super().run(hidden, None, layer, context)
        if not layer.gate.is_off:
            output = lowering_of(layer.gate).add(layer.gate, hidden, combined(output))
        return output, pending, routings


@replaces(VectorGate, ScalarGate, on=("cuda",))
class LoweredVectorGate(VectorGate):
    """A factor for each channel, or one for all, by a kernel where the stream is large."""

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        small = output.numel() < MIN_SIZE and not torch.cuda.is_current_stream_capturing()
        if not HAS_TRITON or not output.is_cuda or small or torch.compiler.is_compiling():
            return super().add(hidden, output)
        add: Any = AddScaled.apply if torch.is_grad_enabled() else add_scaled
        return add(output, hidden, self.weight)  # type: ignore[no-any-return]
