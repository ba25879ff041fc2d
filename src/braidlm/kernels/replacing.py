"""Faster modules in the place of a model's own, for passes that loop over no lowerings: those of a CPU, of torch's
compiler and of other libraries' models.

A form is a subclass that computes the same function sooner. It takes over the state of the module that it replaces, so
that nothing changes in what is saved, and it is chosen by exact class. The forms in plain torch follow; a gate's, which
has a kernel, stands beside the gate's lowering.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braidlm.model.attention.attention import SoftmaxAttention
from braidlm.model.compiling import uncompiled
from braidlm.model.feed.feeds import SwiGLU
from braidlm.model.heads.ends import LinearHead
from braidlm.model.heads.losses import IGNORED
from braidlm.model.layer_skip import LayerDropout
from braidlm.model.norms import RMSNorm
from braidlm.model.routing.dispatch import Groups, Permutation, compute_dtype
from braidlm.model.routing.routing import Routings
from braidlm.model.routing.stacked import StackedLinear, expand_vector
from braidlm.model.span import Span

CHUNK = 64
"""Number of queries computed at once: their scores fit in the processor's cache, and later keys are left out."""
MIN_LENGTH = 128
"""In shorter sequences there is little to leave out, and one call for all queries is faster."""
Form = TypeVar("Form", bound=type[nn.Module])
FORMS: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {}
"""By the type of the device and the exact class of a part."""
_REPLACED: dict[type[nn.Module], type[nn.Module]] = {}


def replaces(*kinds: type[nn.Module], on: tuple[str, ...]) -> Callable[[Form], Form]:
    """Decorator of a form that names the classes which it replaces, on which devices."""

    def add(form: Form) -> Form:
        FORMS.update({(device, kind): form for device in on for kind in kinds})
        _REPLACED[form] = kinds[0]
        return form

    return add


def kind_of(part: nn.Module) -> type[nn.Module]:
    """The exact class of a part, or of the part whose place it took."""
    return _REPLACED.get(type(part), type(part))


@contextlib.contextmanager
def plain_parts(model: nn.Module) -> Iterator[None]:
    """Inside of the block the parts whose place forms have taken run their own code, as transforms of torch.func need:
    they do not know gradients that are written by hand."""
    forms = {part: type(part) for part in model.modules() if type(part) in _REPLACED}
    for part in forms:
        part.__class__ = _REPLACED[type(part)]
    try:
        yield
    finally:
        for part, form in forms.items():
            part.__class__ = form


def is_eager_cpu(x: Tensor) -> bool:
    """Whether `x` is in a pass on a CPU that torch runs operation by operation."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_eager_cpu_training(x: Tensor) -> bool:
    """Whether `x` is in an eager pass on a CPU that will be differentiated."""
    return is_eager_cpu(x) and torch.is_grad_enabled()


@replaces(LayerDropout, on=("cpu",))
class CpuLayerDropout(LayerDropout):
    """In training the texts that pass by a layer at random cost nothing."""

    def run_kept(self, kept: Tensor, layer: Callable[..., Any], hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        # Where no text is kept, the layer's gradients should still be zero and not missing.
        if self.can_skip_rows and span.is_same_for_all_texts and is_eager_cpu_training(hidden) and bool(kept.any()):
            rows = kept.nonzero()[:, 0]
            output, routings = layer(hidden[rows], span)
            return hidden.index_copy(0, rows, output), routings
        return super().run_kept(kept, layer, hidden, span)


@replaces(RMSNorm, on=("cpu",))
class CpuRMSNorm(RMSNorm):
    """In training, with a gradient that is written by hand."""

    def forward(self, x: Tensor, groups: Groups | None = None) -> Tensor:
        x = x.to(self.weight.dtype)
        if groups is None and is_eager_cpu_training(x):
            return RMSNormFunction.apply(x, expand_vector(self.weight, x), self.eps)
        return super().forward(x, groups)


class RMSNormFunction(torch.autograd.Function):
    """`F.rms_norm(x, weight)`: torch's own gradient on a CPU costs six times a LayerNorm's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        weight_gradient = (upstream * normed).sum_to_size(weight.shape)
        gradient = (upstream * weight).sum_to_size(normed.shape)  # the members of a stack may share their input
        projection = (gradient * normed).mean(-1, keepdim=True)
        return gradient.addcmul_(normed, projection, value=-1).mul_(scale), weight_gradient, None


@replaces(SwiGLU, on=("cpu",))
class CpuSwiGLU(SwiGLU):
    """In training, with a gradient that is written by hand."""

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        if self.beta is None and is_eager_cpu_training(gate_up):
            return SiluProductFunction.apply(gate_up)  # type: ignore[no-any-return]
        return super().activate(gate_up, groups)


class SiluProductFunction(torch.autograd.Function):
    """`silu(gate) * up` of the two halves of one tensor; both gradients are written into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        swish = F.silu(gate)
        ctx.save_for_backward(gate_up, swish)
        return swish * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        gate_up, swish = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        gate_gradient, up_gradient = gradient.chunk(2, dim=-1)
        torch.mul(upstream, swish, out=up_gradient)
        torch.mul(upstream, up, out=gate_gradient)
        torch.ops.aten.silu_backward.grad_input(gate_gradient, gate, grad_input=gate_gradient)
        return gradient


@replaces(StackedLinear, on=("cpu",))
class CpuStackedLinear(StackedLinear):
    """Every member writes into its slice of one output."""

    def grouped(self, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        if is_eager_cpu(rows) and not torch.is_autocast_enabled("cpu"):
            return GroupedLinearFunction.apply(rows, weight, bias, groups.counts_E.tolist())  # type: ignore[no-any-return]
        return super().grouped(rows, weight, bias, groups)


class GroupedLinearFunction(torch.autograd.Function):
    """Multiply rows sorted by expert by their expert's matrix; every expert writes into its slice of one output."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight_EIO)
        ctx.counts = counts
        outputs = rows.new_empty(len(rows), weight_EIO.shape[2])
        for expert, (own_rows, out) in enumerate(zip(rows.split(counts), outputs.split(counts), strict=True)):
            if bias_EO is None:
                torch.mm(own_rows, weight_EIO[expert], out=out)
            else:
                torch.addmm(bias_EO[expert], own_rows, weight_EIO[expert], out=out)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight_EIO = ctx.saved_tensors
        upstreams = upstream.split(ctx.counts)
        rows_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = torch.empty_like(rows)
            for own_upstream, weight, out in zip(upstreams, weight_EIO, rows_gradient.split(ctx.counts), strict=True):
                torch.mm(own_upstream, weight.T, out=out)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EIO, memory_format=torch.contiguous_format)
            for own_upstream, own_rows, out in zip(upstreams, rows.split(ctx.counts), weight_gradient, strict=True):
                torch.mm(own_rows.T, own_upstream, out=out)
        if ctx.needs_input_grad[2]:
            bias_gradient = torch.stack([own_upstream.sum(0) for own_upstream in upstreams])
        return rows_gradient, weight_gradient, bias_gradient, None


@replaces(SoftmaxAttention, on=("cpu",))
class CpuSoftmaxAttention(SoftmaxAttention):
    """In long sequences the queries of tokens that chose no member cost nothing."""

    def _attend_rows(self, query_RW: Tensor, kv_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        plain = span.causal and span.cache is None and span.masks[self.window] is None and not self.drop.probability
        compact = not (span.eager or span.two_way) and supports_compact_attention(query_RW, span.time)
        if not (plain and compact and self.kv_heads == self.heads):
            return super()._attend_rows(query_RW, kv_MBTW, permutation, span)
        key, value = kv_MBTW.flatten(0, 1).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            key = rotate(key)
            query_STNH = rotate(permutation.scatter_per_expert(query_RW).view_as(key))
            query_RW = permutation.gather_per_expert(query_STNH.reshape(len(kv_MBTW), -1, query_RW.shape[1]))
        return compact_attention(query_RW.unflatten(1, (self.heads, -1)), key, value, permutation).flatten(1)


class QueryChunk(NamedTuple):
    """Rows of one sequence of one member that are computed at once."""

    sequence: int
    """Index of the sequence: those of the first member come first, then those of the second."""
    rows: slice
    first: int
    """Position of the first row in its sequence."""
    last: int
    """Position of the last row in its sequence."""


def supports_compact_attention(query: Tensor, time: int) -> bool:
    """Whether compact attention is faster than the reference and as exact."""
    wide = query.dtype in (torch.float32, torch.float64)
    return wide and time >= MIN_LENGTH and is_eager_cpu(query)


def compact_attention(query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
    """Attention of each row's query [row, head, dim] to the tokens up to its own in its sequence S."""
    output: Tensor = CompactAttention.apply(query_RNH * query_RNH.shape[-1] ** -0.5, key_STNH, value_STNH, permutation)
    return output


class CompactAttention(torch.autograd.Function):
    """The backward pass computes the attention weights again."""

    @staticmethod
    def forward(ctx: Any, query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
        ctx.positions_R = permutation.source_R % key_STNH.shape[1]
        ctx.chunks = list(_query_chunks(permutation, ctx.positions_R, key_STNH))
        output_RNH = torch.empty_like(query_RNH)
        for chunk in ctx.chunks:
            weights = _attention_weights(chunk, ctx.positions_R, query_RNH, key_STNH)
            value = value_STNH[chunk.sequence, : chunk.last + 1].transpose(0, 1)
            output_RNH[chunk.rows] = (weights @ value).transpose(0, 1)
        ctx.save_for_backward(query_RNH, key_STNH, value_STNH, output_RNH)
        return output_RNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_RNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_RNH, key_STNH, value_STNH, output_RNH = ctx.saved_tensors
        delta_NR = (upstream_RNH * output_RNH).sum(-1, keepdim=True).transpose(0, 1)
        query_gradient = torch.empty_like(query_RNH)
        key_gradient, value_gradient = (torch.zeros_like(key_STNH.transpose(1, 2)).contiguous() for _ in range(2))
        for chunk in ctx.chunks:
            seen = slice(chunk.last + 1)
            weights = _attention_weights(chunk, ctx.positions_R, query_RNH, key_STNH)
            upstream = upstream_RNH[chunk.rows].transpose(0, 1)
            key, value = (x[chunk.sequence, seen].transpose(0, 1) for x in (key_STNH, value_STNH))
            value_gradient[chunk.sequence, :, seen].baddbmm_(weights.mT, upstream)
            score_gradient = (upstream @ value.mT).sub_(delta_NR[:, chunk.rows]).mul_(weights)
            query_gradient[chunk.rows] = (score_gradient @ key).transpose(0, 1)
            query = query_RNH[chunk.rows].transpose(0, 1)
            key_gradient[chunk.sequence, :, seen].baddbmm_(score_gradient.mT, query)
        return query_gradient, key_gradient.transpose(1, 2), value_gradient.transpose(1, 2), None


def _query_chunks(permutation: Permutation, positions_R: Tensor, key_STNH: Tensor) -> Iterator[QueryChunk]:
    """Rows are sorted by member and then by token, so those of one sequence are contiguous."""
    sequences, time = key_STNH.shape[:2]
    batch = sequences // len(permutation.groups.counts_E)
    sequence_R = permutation.expert_R * batch + permutation.source_R // time
    counts = torch.bincount(sequence_R, minlength=sequences).tolist()
    positions, begin = positions_R.tolist(), 0
    for sequence, count in enumerate(counts):
        for start in range(begin, begin + count, CHUNK):
            end = min(start + CHUNK, begin + count)
            yield QueryChunk(sequence, slice(start, end), positions[start], positions[end - 1])
        begin += count


def _attention_weights(chunk: QueryChunk, positions_R: Tensor, query_RNH: Tensor, key_STNH: Tensor) -> Tensor:
    """The attention weights [head, row, key] of a chunk for the keys up to its last query; 0 for later keys."""
    scores = query_RNH[chunk.rows].transpose(0, 1) @ key_STNH[chunk.sequence, : chunk.last + 1].permute(1, 2, 0)
    later = torch.arange(chunk.first + 1, chunk.last + 1) > positions_R[chunk.rows, None]
    scores[..., chunk.first + 1 :].masked_fill_(later, -torch.inf)
    return scores.softmax(-1)


@replaces(LinearHead, on=("cpu", "cuda"))
class LeanLinearHead(LinearHead):
    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        # Without gradients this saves no memory, and evaluation should give exactly the reference's numbers.
        if logits is not None or not torch.is_grad_enabled() or self.bias is not None:
            return super().loss(hidden, targets, count, logits)
        total = (targets != IGNORED).sum() if count is None else count
        total = torch.as_tensor(total, dtype=torch.float32, device=hidden.device)
        return _head_loss(hidden.flatten(0, -2).to(compute_dtype(hidden)), self.weight, targets.flatten(), total)


@uncompiled  # eager was faster than traced in a trial (LOG.md)
def _head_loss(rows: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return HeadLoss.apply(rows, weight, labels, count)


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count.

    The logits are overwritten by their gradient: autograd would keep logits and probabilities and allocate a third
    tensor of that size. The product is computed in the type of `hidden`; the weight may be wider. The reference is
    `next_token_loss` of the head's output.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        cast = weight.to(hidden.dtype)
        logits = hidden @ cast.t()
        losses = logits_to_gradient_(logits, labels)
        ctx.save_for_backward(logits, hidden, cast, count)
        ctx.weight_dtype = weight.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, cast, count = ctx.saved_tensors
        factor, (needs_hidden, needs_weight) = upstream / count, ctx.needs_input_grad[:2]
        hidden_gradient = (gradient @ cast).mul_(factor) if needs_hidden else None
        weight_gradient = (gradient.t() @ hidden).to(ctx.weight_dtype).mul_(factor) if needs_weight else None
        return hidden_gradient, weight_gradient, None, None


def logits_to_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses [rows] of logits [rows, vocabulary], and overwrite the logits by the gradient of their sum."""
    trained = labels != IGNORED
    targets = torch.where(trained, labels, 0)[:, None]
    target_logits = logits.gather(1, targets)
    max_logits = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=logits)
    # The largest probability never underflows, so that its logarithm is finite.
    log_sum_exp = max_logits - logits.amax(-1, keepdim=True).log()
    logits.scatter_add_(1, targets, torch.full_like(target_logits, -1.0))
    if logits.is_cuda or not bool(trained.all()):  # on a GPU this test would wait for the device
        logits.masked_fill_(~trained[:, None], 0.0)
    return torch.where(trained, (log_sum_exp - target_logits)[:, 0], 0.0)
