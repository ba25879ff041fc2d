"""Comparisons of kernels with their references in float64: outputs and every gradient."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.ops.dropout import DropoutUse, dropout_into
from braidlm.kernels.ops.norm import plain_add_norm
from braidlm.kernels.routed.router import plain_route
from braidlm.kernels.side_stream import DeferredGradient, SideStream

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
"""Of a relative error."""


def relative_error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(floor)).item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str, floor: float = 1e-30) -> None:
    """`floor`: a norm below which the expected tensor counts as zero."""
    error = relative_error(actual, expected, floor)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_equal_with_gradients(
    fused: Callable[..., Any],
    plain: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    roundings: int = 1,
) -> None:
    """Both functions on the same inputs; floating inputs are differentiated. `roundings` happen one after another."""
    tolerance = TOLERANCES[dtype] * roundings
    ours = [x if x is None or not x.is_floating_point() else x.detach().requires_grad_() for x in inputs]
    theirs = [x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_() for x in inputs]
    actual, expected = fused(*ours), plain(*theirs)
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    upstream = [torch.randn(x.shape, device=x.device).to(x.dtype) for x in actual]
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, e, tolerance, f"output {index}")
    leaves = [index for index, x in enumerate(ours) if x is not None and x.requires_grad]
    our_gradients = torch.autograd.grad(actual, [ours[i] for i in leaves], upstream)
    their_gradients = torch.autograd.grad(expected, [theirs[i] for i in leaves], [u.double() for u in upstream])
    for index, a, e in zip(leaves, our_gradients, their_gradients, strict=True):
        assert a.dtype == ours[index].dtype
        assert_close(a, e, tolerance, f"gradient of input {index}")


def dropout_factors(dropout: DropoutUse, rows: int, width: int) -> Tensor | None:
    """What dropout multiplies the elements of rows by; None where there is none."""
    if dropout.seed is None:
        return None
    ones = torch.ones(rows, width, device=dropout.seed.device)
    return dropout_into(ones, dropout, torch.empty_like(ones))


def plain_add_norm_route(
    stream: Tensor, delta: Any, delta_bias: Any, weight: Tensor, bias: Any, router: Tensor, router_bias: Any,
    balance: Any, eps: float, centred: bool, reads_normed: bool, top_k: int, renormalise: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The reference of a norm and a router in one kernel: those of both, one after the other."""
    summed, normed = plain_add_norm(stream, delta, delta_bias, weight, bias, eps, centred)
    read = normed if reads_normed else summed
    return summed, normed, *plain_route(read, router, router_bias, balance, top_k, renormalise)[1:]


class InlineSideStream:
    """A side stream for the CPU: its work is done at once, and its inputs are held, as on a device."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def work(self, *inputs: Tensor, priority: bool = False) -> nullcontext[None]:
        self.held += inputs
        return nullcontext()

    def last_event(self) -> str:
        return "done"

    def wait_event(self, event: str) -> None:
        assert event == "done"

    def synchronize(self) -> None:
        pass


def side_stream(device: str) -> Any:
    return SideStream(torch.device(device)) if device == "cuda" else InlineSideStream()


class ReadDeferred(torch.autograd.Function):
    """A tensor whose gradient is deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deferred: DeferredGradient) -> Tensor:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None]:
        assert gradient is None
        return ctx.deferred.read(), None


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """New memory is full of NaN, so that elements which a kernel does not write show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of some work, and the tensors that its replays fill."""
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(2):  # kernels are compiled, which a capture must not contain
            work()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    return graph, outputs
