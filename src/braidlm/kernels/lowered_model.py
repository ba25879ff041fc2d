"""A model in training on a GPU: what `BraidModel.stream`, the head's loss and the routing loss compute, by kernels.

This pass loops over lowerings and knows no part: each part that kernels serve runs as its lowering says, and any other
runs its own plain forward inside the same pass.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from braidlm.kernels import lowered_parts
from braidlm.kernels.context import LayerOutput, PassContext, PendingAdd, Stream, Sublayer, add_pending, combined
from braidlm.kernels.lowered_parts import Lowered
from braidlm.kernels.lowerings.ends import positions_of
from braidlm.kernels.lowerings.lowering import LOWERINGS, lowering_of
from braidlm.kernels.lowerings.norms import add_norm
from braidlm.kernels.ops.linear import cast_all
from braidlm.kernels.ops.soft_head_loss import SoftTargets
from braidlm.kernels.routed.routing_measures import evaluate_means, routing_loss_on_side
from braidlm.kernels.side_stream import DeferredGradient, SideStream, current_side_stream, on_side, use_side_stream
from braidlm.model.dropout import Dropout
from braidlm.model.heads.losses import IGNORED
from braidlm.model.language_model import LanguageModel
from braidlm.model.routing.losses import Evaluator
from braidlm.model.routing.routing import Routings
from braidlm.model.span import TextPass, make_masks

USES_OF_DROPOUT = 2
"""A block drops what its attention and what its feed-forward part add, each with a seed of its own."""

T = TypeVar("T")


class LoweredModel:
    """The training losses of a model by kernels. Gradients of parameters are complete once it is synchronized."""

    def __init__(self, model: LanguageModel, side: SideStream | None = None, compile_plain: bool = False):
        self.model, self.body = model, model.model
        # The gradient of a tensor that is frozen in part is cut as soon as it is there: no other stream may compute it.
        partly = any(getattr(module, "trained_rows", None) is not None for module in model.modules())
        self.side = None if partly else side
        self.lowered, self.plain = Lowered(model), PlainForward(model.model, compile_plain)
        parts = self.body.stages.modules()
        parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
        self.shares_weights = len({id(p) for p in parameters}) < len(parameters)
        self.stacks_gradients = all(p.requires_grad for p in parameters)

    @property
    def serves_head(self) -> bool:
        """Whether the head's loss is computed by kernels, which soft targets need."""
        return self.model.head in self.lowered.parts

    @property
    def is_whole(self) -> bool:
        """Whether no part runs its plain forward, which may wait for the device."""
        return not self.lowered.refusals and all(lowered_parts.is_served_now(layer) for _, layer in self.lowered.layers)

    def losses(
        self, inputs: Tensor, targets: Tensor, count: Tensor | float | None = None, soft: SoftTargets | None = None
    ) -> tuple[Any, Tensor | None, Routings]:
        """The loss of targets at the position predicting them, what routers add to it, and their routings.

        Where the head, which kernels then serve, learns soft targets beside the others, the loss is `TaughtLosses`.
        """
        head, real, body = self.model.head, targets != IGNORED, self.body
        tied, late, lowering = None, [], lowering_of(self.model.head)
        if self.serves_head and self.side is not None:
            shared = body.embedding in self.lowered.parts and lowering.is_tied(head, body.embedding)
            tied = DeferredGradient() if shared else None
            late = [weight for weight in lowering.reads_late(head) if weight.dtype != self._dtype(inputs.device)]
        with use_side_stream(self.side):
            hidden, routings, context = self.stream(inputs, tied, late)
            self.synchronize()  # the cast of the head, if there was but one block
            added = routing_loss_on_side(routings, real, count) if routings else None
            if self.serves_head:
                total = real.sum() if count is None else count
                total = torch.as_tensor(total, dtype=torch.float32, device=hidden.device)
                casts = [context.casts[weight] for weight in late]
                with torch.autocast(inputs.device.type, enabled=False):
                    rows = hidden.flatten(0, 1)
                    text = lowering.loss(head, rows, casts, targets.flatten(), total, tied, soft)
            else:
                text = head.loss(hidden, targets, count, **self.read(hidden, inputs))
            self.synchronize()  # the routing loss is to be added
        return text, added, routings

    @torch.no_grad()
    def logits(self, inputs: Tensor, start: int = 0) -> Tensor:
        """The logits after each position from `start` on of token ids [batch, time], without what a backward pass
        would need."""
        done, head = self.run(inputs).at((slice(None), slice(start, None))), self.model.head
        if self.serves_head:
            return lowering_of(head).logits(head, done.hidden)
        return head(done.hidden, **done.read)  # type: ignore[no-any-return]

    def on_side(self, read: Callable[[Evaluator], T], routings: Routings, *inputs: Tensor) -> T:
        """What `read` computes of routings and other tensors, on the side stream: complete once it is synchronized."""
        parts = [part for r in routings for part in (r.probabilities_BTN, r.chosen_BTK, r.weights_BTK)]
        with on_side(self.side, *inputs, *parts, priority=True):
            return read(evaluate_means)

    def synchronize(self) -> None:
        """Make the main stream wait for the side stream."""
        if self.side is not None:
            self.side.synchronize()

    def stream(
        self, ids: Tensor, tied: DeferredGradient | None = None, late: list[Tensor] | None = None
    ) -> tuple[Tensor, Routings, PassContext]:
        """The normalised stream [batch, time, width] of token ids [batch, time], and the routings on the way.

        With `tied`, the embedding adds its gradient to the head's. `late` are matrices to cast that are read after all
        layers.
        """
        body, dtype = self.body, self._dtype(ids.device)
        body.check_length(ids.shape[1])
        with torch.autocast(ids.device.type, enabled=False), use_side_stream(self.side):
            stream: Stream = body.drop(self._embed(ids, dtype, tied))
            # Autograd adds up the gradients of a shared weight at once, before the side stream is synchronized.
            with use_side_stream(None if self.shares_weights else self.side):
                context = self._prepare(ids, dtype, late or [])
                pending: PendingAdd | None = None
                routings: Routings = ()
                waits = True
                for index, (stage, layer) in enumerate(self.lowered.layers):
                    if waits and (index or not self._is_dense(layer)):
                        context.synchronize()  # the first block's own casts are ready: those of the others may wait
                        waits = False  # for later work on the side stream its readers wait
                    run = stage.run if stage is not layer or layer in self.lowered.parts else operator.call
                    if getattr(stage, "gradient_checkpointing", False):
                        stream = combined(stream)  # a tensor, whose device's random state is kept for the second pass
                    stream, pending, chosen = run(self._layer, stream, pending, layer, context)
                    routings += chosen
                context.synchronize()
                hidden = self._last_norm(combined(stream), pending, context)
        return context.unflattened(hidden), routings, context

    def read(self, hidden: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """What the head reads in the text beside the stream [batch, time, width], by the names of its arguments."""
        reader = self.model.reader
        return {} if reader is None else reader.read(hidden, self.body.span(hidden, tokens=ids))

    def run(self, ids: Tensor) -> TextPass:
        """One pass over token ids [batch, time] up to the head, as the plain model's `run`."""
        hidden, routings, _ = self.stream(ids)
        return TextPass(hidden, routings, self.read(hidden, ids))

    def _dtype(self, device: torch.device) -> torch.dtype:
        """The type of the stream and the products: autocast's, or else the parameters' own."""
        autocast = torch.is_autocast_enabled(device.type)
        return torch.get_autocast_dtype(device.type) if autocast else next(self.body.parameters()).dtype

    def _embed(self, ids: Tensor, dtype: torch.dtype, tied: DeferredGradient | None) -> Tensor:
        body = self.body
        if body.embedding in self.lowered.parts:
            return lowering_of(body.embedding).embed(ids, body, dtype, tied)  # type: ignore[no-any-return]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return body.positions.embed(body.embedding(ids), positions).to(dtype).flatten(0, 1)

    def _layer(self, stream: Stream, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        """The stream after a layer; what the layer added last is pending."""
        with use_side_stream(context.side):  # with activation checkpointing a thread of autograd's runs this again
            if layer in self.lowered.parts and lowered_parts.is_served_now(layer):
                return lowering_of(layer).run(stream, pending, layer, context)  # type: ignore[no-any-return]
            return self.plain.layer(combined(stream), pending, layer, context)

    def _last_norm(self, stream: Tensor, pending: PendingAdd | None, context: PassContext) -> Tensor:
        if self.body.norm in self.lowered.parts:
            return add_norm(stream, pending, self.body.norm, None, context)[1]
        return self.body.norm(add_pending(stream, pending)).to(stream.dtype)

    def _is_dense(self, layer: nn.Module) -> bool:
        """Whether kernels serve all sublayers of a layer and no router is among them."""
        parts = [part for *_, part in lowered_parts.sublayers(layer)]
        return bool(parts) and all(part in self.lowered.parts and not lowering_of(part).routed for part in parts)

    def _prepare(self, ids: Tensor, dtype: torch.dtype, late: list[Tensor]) -> PassContext:
        (batch, time), device, side, body = ids.shape, ids.device, current_side_stream(), self.body
        groups = lowered_parts.row_groups([layer for _, layer in self.lowered.layers], self.lowered.parts, batch, time)
        layers = [layer for _, some in groups for layer in some]
        checkpointing = any(getattr(stage, "gradient_checkpointing", False) for stage in body.stages)
        delivers = side is not None and not checkpointing and self.stacks_gradients  # every layer, or none has a slot
        stacked = groups if delivers else []
        blocks = [layer for layer in layers if lowered_parts.sublayers(layer[0])]
        others = [layer for layer in layers if layer not in blocks[:1]]
        casts = cast_all(lowered_parts.read_parameters(blocks[:1]), dtype)
        with on_side(side):
            casts |= cast_all(lowered_parts.read_parameters(others), dtype)
        rotations, interleaved = positions_of(body).rotations(body.positions, body.head_dims, time, device)
        return PassContext(
            batch=batch,
            time=time,
            dtype=dtype,
            device=device,
            masks=make_masks(body.windows, time, 0, None, device),
            rotations=rotations,
            interleaved=interleaved,
            casts=casts,
            parts=self.lowered.parts,
            plain=self.plain,
            slots=lowered_parts.gradient_slots(stacked, dtype),
            sums=lowered_parts.column_sums(stacked),
            foldings=lowered_parts.fold_all(layers, dtype),
            seeds=self._seeds(device),
            late_casts=partial(cast_all, late, dtype),
        )

    def _seeds(self, device: torch.device) -> dict[nn.Module, Tensor]:
        """For dropout inside kernels; the dropout of experts and of their outputs draws numbers of its own."""
        drops = [module for module in self.body.modules() if isinstance(module, Dropout)]
        if not any(drop.probability for drop in drops if drop.kind not in ("experts", "expert_outputs")):
            return {}
        kinds = tuple(kind for kind, lowering in LOWERINGS.items() if lowering.has_seeds)
        parts = [module for module in self.body.modules() if isinstance(module, kinds)]
        seeds = torch.randint(2**31, (len(parts), USES_OF_DROPOUT, 1), device=device)
        return dict(zip(parts, seeds, strict=True))


class PlainForward:
    """The forward of layers, attentions and feed-forward parts. A compiled one makes its own span of the pass."""

    def __init__(self, body: Any, compiled: bool):
        self.body, self.compiled = body, compiled
        self.routers: dict[nn.Module, dict[str, Any]] = {}
        """The routers of each part that is compiled, by their names inside it."""
        self.forwards: dict[str, Any] = {"layer": self._layer, "attention": self._attention, "feed": self._feed}
        if compiled:
            self.forwards = {kind: torch.compile(run, dynamic=False) for kind, run in self.forwards.items()}

    def layer(
        self, stream: Tensor, pending: PendingAdd | None, layer: Any, context: PassContext
    ) -> tuple[Tensor, None, Routings]:
        """A whole layer."""
        with context.autocast():
            hidden, routings = self._run("layer", layer, context.unflattened(add_pending(stream, pending)))
        return hidden.flatten(0, 1).to(context.dtype), None, routings

    def sublayer(
        self, kind: str, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
    ) -> Sublayer:
        """The `attention` or `feed` of a block with its norm."""
        stream = add_pending(stream, pending)
        with context.autocast():
            delta, routings = self._run(kind, part, context.unflattened(stream), norm)
        return stream, PendingAdd(delta.flatten(0, 1).to(stream.dtype)), routings

    def _run(self, kind: str, part: nn.Module, *inputs: Any) -> tuple[Tensor, Routings]:
        """A compiled part's routers have the names that they have inside it, which those of other layers have too:
        routings carry names, and torch compiles a layer anew for every name, eight times at most.
        """
        if not self.compiled:
            return self.forwards[kind](part, *inputs)  # type: ignore[no-any-return]
        if part not in self.routers:
            self.routers[part] = {n: module for n, module in part.named_modules() if hasattr(module, "address")}
        addresses = {name: router.address for name, router in self.routers[part].items()}
        try:
            for name, router in self.routers[part].items():
                router.address = name
            hidden, routings = self.forwards[kind](part, *inputs)
        finally:
            for name, router in self.routers[part].items():
                router.address = addresses[name]
        return hidden, tuple(replace(routing, name=addresses.get(routing.name, routing.name)) for routing in routings)

    def _layer(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Routings]:
        return layer(hidden, self.body.span(hidden))

    def _attention(self, part: Any, hidden: Tensor, norm: Any) -> tuple[Tensor, Routings]:
        return part(norm(hidden), self.body.span(hidden))

    def _feed(self, part: Any, hidden: Tensor, norm: Any) -> tuple[Tensor, Routings]:
        return part(norm(hidden))
