"""One optimizer step: forward and backward over the micro-batches, clipping, update; eager or as a replayed graph."""

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from braidlm.data.loading.batches import Batch
from braidlm.kernels.optimizers.fused_step import FusedStep
from braidlm.kernels.optional_triton import HAS_TRITON
from braidlm.kernels.side_stream import SideStream
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.feature import Feature, Setup, make_features
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.compute import autocast
from braidlm.training.step.layout import choose_layout
from braidlm.training.step.objective import BatchLosses
from braidlm.training.step.optimizers.contract import Optimizer, optimizers
from braidlm.training.step.parallel import Rank, take_from_main
from braidlm.training.step.sharding import shard, synchronize_copies, total_norm
from braidlm.training.step.spread import local, whole_view
from braidlm.training.trainable import Trainable

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel

EAGER_STEPS_BEFORE_CAPTURE = 3
"""Kernels are chosen, compiled code is built and optimizer state is made in these; a capture must not contain that."""


@dataclass
class StepReport:
    """Numbers of one step, still on the device; each process has its share of the losses."""

    loss: Tensor  # the loss of the text
    gradient_norm: Tensor
    routing_loss: Tensor  # what routers add to the loss, 0 where there are none
    usage: dict[str, Tensor]
    """For each router, the share of the weight that each of its choices had in the last forward pass."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """The recipe's extra losses by name, without their weights."""

    def packed(self) -> Tensor:
        """All numbers one after the other, so that they are copied at once."""
        return torch.cat([number.view(-1) for number in self._numbers()])

    def unpacked(self, numbers: Tensor) -> "StepReport":
        """A report like this one, of other numbers that were packed."""
        parts = iter(numbers.split([number.numel() for number in self._numbers()]))
        loss, norm, routing_loss = (next(parts)[0] for _ in range(3))
        usage = {name: next(parts) for name in self.usage}
        return StepReport(loss, norm, routing_loss, usage, {name: next(parts)[0] for name in self.extra})

    def _numbers(self) -> list[Tensor]:
        return [self.loss, self.gradient_norm, self.routing_loss, *self.usage.values(), *self.extra.values()]


class Stepper:
    """Runs optimizer steps for one model; nothing in a step waits for the device."""

    def __init__(
        self,
        trained: Trainable,
        config: TrainingConfig,
        rank: Rank,
        dtype: torch.dtype,
        features: Sequence[Feature] | None = None,
    ):
        """The features are by default those that the config asks for and that need no data."""
        model = trained.model
        self.model, self.config, self.rank, self.dtype = model.train(), config, rank, dtype
        self.layout = choose_layout(config.parallel, model, rank)  # None: this process has all weights, alone
        on_gpu = rank.device.type == "cuda"
        self.features = make_features(Setup(model, config, rank, dtype)) if features is None else list(features)
        self.extra = {one.kind: one for one in self.features if isinstance(one, ExtraLoss)}
        for loss in self.extra.values():
            take_from_main(loss, rank)  # each process has drawn first values of its own
        self.use_graph = on_gpu and self.layout is None and config.graph is not False
        self.use_graph = self.use_graph and trained.capturable and all(one.capturable for one in self.features)
        if config.activation_checkpointing:
            trained.checkpoint_activations()
        self.lowered = self._lower(trained)
        by_default = on_gpu and self.lowered is None and trained.compiled_by_default
        self.use_compile = by_default if config.compile is None else config.compile
        self.objective = trained.objective(self.lowered, self.extra)
        self.run: Callable[..., BatchLosses] = self.objective
        if self.layout is not None:
            shard(self.objective, trained.units(), self.layout, rank, dtype, self.use_compile)
        elif self.use_compile:
            self.run = torch.compile(self.objective, dynamic=False)
        for one in self.features:
            one.find_parameters()
        self.optimizer: Optimizer = optimizers.build(
            config.optimizer, self.objective, trained.matrices(), self.use_graph
        )
        is_fused = self.use_graph and HAS_TRITON and FusedStep.serves(self.optimizer.parts)
        self.fused = FusedStep(self.optimizer.parts, self.optimizer.decay_factors) if is_fused else None
        self.nothing = torch.zeros((), device=rank.device)
        self.parameters = [p for p in self.objective.parameters() if p.requires_grad]
        self.shape: tuple[int, ...] | None = None  # [rows, time] of the last step
        self.draws_rows = any(one.draws_rows for one in self.features)
        self.steps = 0
        self.graph: CapturedStep | None = None

    def _lower(self, trained: Trainable) -> "LoweredModel | None":
        """The model by kernels, where the step is a graph: launched one by one they would wait for the host."""
        if self.config.compile or not self.use_graph or any(one.plain_pass for one in self.features):
            return None
        # Gradients that are added to others are read before the side stream is waited for.
        side = SideStream(self.rank.device) if self.config.accumulation == 1 else None
        lowered = trained.lower(self.dtype, side, compile_plain=self.config.compile is not False)
        return None if lowered is None or (self.extra and not lowered.serves_head) else lowered

    def begin_step(self, step: int, share: float) -> None:
        """Tell the features which step comes; a captured step is recorded again where they change what it computes."""
        self.optimizer.begin_step(share)
        changed = [one.begin_step(step, share) for one in self.features]
        if any(changed):
            self._record_again()

    def read_batch(self, batch: Batch, share: float) -> Batch:
        """The batch as it is trained; `share` of the training is done with it."""
        for one in self.features:
            batch = one.read_batch(batch, share)
        return batch

    def step(self, inputs: np.ndarray, labels: np.ndarray, count: int, rate: float, share: float = 0.0) -> StepReport:
        """Train on this process's rows; `count` labels are in the batch of all processes. `share` of the training is
        done with the step."""
        self.optimizer.set_rate(rate)
        if self.shape not in (None, inputs.shape) and not self.draws_rows:
            self._record_again()
        self.shape = inputs.shape
        self.steps += 1
        if self.use_graph and self.steps > EAGER_STEPS_BEFORE_CAPTURE:
            report = self._replay(inputs, labels, count)
        else:
            # The count is made on the device: a copy from the host would wait for it.
            number = torch.full((), float(count), device=self.rank.device)
            report = self._train(self._load(inputs), self._load(labels), number)
        for one in self.features:
            one.end_step(share)
        return report

    def _record_again(self) -> None:
        self.graph, self.steps = None, 0
        if self.use_compile:
            torch.compiler.reset()  # after eight versions of one function torch would give up and run it eagerly

    def _load(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.rank.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.rank.device, non_blocking=True)

    def _train(self, inputs: Tensor, labels: Tensor, count: Tensor) -> StepReport:
        losses, additions, usage = [], [], {}
        extra: dict[str, list[Tensor]] = {name: [] for name in self.extra}
        parts = self.config.accumulation
        if self.draws_rows:
            parts = max(-(-len(inputs) // self.config.batch), 1)
        for index, (tokens, targets) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True)):
            synchronize_copies(self.objective, index + 1 == parts)
            found = self._pass(index, tokens, targets, count)
            for one in self.features:
                one.read_pass(found)
            losses.append(found.text.detach())
            additions += [] if found.routing is None else [found.routing.detach()]
            usage = found.usage
            for name, other in found.extra.items():
                extra[name].append(other.detach())
        for one in self.features:
            one.end_gradients()
        norm = self._update()
        for one in self.features:
            one.end_update()
        self.optimizer.zero_grad()
        summed = {name: self._sum(each) for name, each in extra.items()}
        return StepReport(self._sum(losses), norm, self._sum(additions), usage, summed)

    def _pass(self, index: int, tokens: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        """One forward and backward pass over a micro-batch."""
        with autocast(self.rank.device, self.dtype):
            own = (one.own_pass(self.run, tokens, labels, count) for one in self.features)
            if (found := next((each for each in own if each is not None), None)) is not None:
                return found
            parts = self.config.accumulation
            beside = {name: value for one in self.features for name, value in one.inputs(index, parts).items()}
            found = self.run(tokens, labels, count, **beside)
        self._whole(found).backward()
        if self.lowered is not None:
            self.lowered.synchronize()
        return found

    def _whole(self, found: BatchLosses) -> Tensor:
        """What is minimised."""
        whole = found.text
        if found.weighted is not None:
            whole = found.weighted
        elif self.extra:
            whole = whole * math.prod(loss.text_weight for loss in self.extra.values())
        if found.routing is not None:
            whole = whole + found.routing
        if found.weighted is None:
            for name, other in found.extra.items():
                whole = whole + self.extra[name].factor * other
        return whole

    def _sum(self, numbers: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add, numbers) if numbers else self.nothing

    def _update(self) -> Tensor:
        """Shorten the gradients to `clip` and let the optimizer step; gives their length before."""
        longest = self.config.clip
        if self.fused is not None and self.fused.ready:
            return self.fused.step(longest)
        gradients = [whole_view(p.grad, p) for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients)
        # On a GPU the comparison would wait for the device, so there the product with 1 is simply computed.
        if longest is not None and (norm.is_cuda or bool(norm > longest)):
            torch._foreach_mul_([local(each) for each in gradients], (longest / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return norm

    def _replay(self, inputs: np.ndarray, labels: np.ndarray, count: int) -> StepReport:
        batch = packed_batch(inputs, labels, count).pin_memory()
        if self.graph is None:
            self.graph = CapturedStep(self._train, batch, inputs.shape, self.rank.device)
            if self.fused is not None:
                self.fused.write_addresses()
        return self.graph.replay(batch)


class CapturedStep:
    """A step as a CUDA graph. It reads its rows from one buffer and leaves its numbers in one tensor."""

    def __init__(
        self,
        train: Callable[[Tensor, Tensor, Tensor], StepReport],
        batch: Tensor,
        shape: tuple[int, ...],
        device: torch.device,
    ):
        """Record `train` without running it; gradients get their fixed addresses inside the graph's memory. `batch` is
        packed and its rows have this shape."""
        self.buffer = batch.to(device)
        inputs, labels, count = self.buffer.split((math.prod(shape), math.prod(shape), 1))
        # What compiled code leaves in reference cycles may hold the autograd graph of an eager step, whose nodes belong
        # to another stream and would break the capture.
        gc.collect()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What the loss waits for goes before what only the optimizer waits for.
        first = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.graph(self.graph, stream=first):
            count = count.view(torch.float32)[0]
            self.results = train(inputs.view(shape), labels.view(shape), count)
            self.numbers = self.results.packed()

    def replay(self, batch: Tensor) -> StepReport:
        """Train on a packed batch."""
        self.buffer.copy_(batch, non_blocking=True)
        self.graph.replay()
        return self.results.unpacked(self.numbers.clone())


def packed_batch(inputs: np.ndarray, labels: np.ndarray, count: int) -> Tensor:
    """All that a replayed step reads, so that it is sent at once; the count, which is last, as a float32."""
    packed = np.concatenate((inputs.ravel(), labels.ravel(), np.zeros(1, np.int64)))
    packed[-1:].view(np.float32)[0] = count
    return torch.from_numpy(packed)
