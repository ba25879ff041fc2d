"""One optimizer step: forward and backward over the micro-batches, clipping, update; eager or as a replayed graph."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from braidlm.data.loading.batches import Batch
from braidlm.kernels.side_stream import SideStream
from braidlm.training.config import TrainingConfig
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.feature import Feature, Setup, make_features
from braidlm.training.step.captured_step import EAGER_STEPS_BEFORE_CAPTURE, CapturedStep, StepReport, packed_batch
from braidlm.training.step.compute import autocast
from braidlm.training.step.objective import BatchLosses
from braidlm.training.step.optimizers.contract import Optimizer, optimizers
from braidlm.training.step.parallel import Rank, data_parallel
from braidlm.training.trainables.trainable import Trainable

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel

FusedStep: Any = None
with contextlib.suppress(ImportError):  # without Triton the optimizers do it, in several passes
    from braidlm.kernels.optimizers.fused_step import FusedStep


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
        """By default with the features that the config asks for and that need no data."""
        model = trained.model
        self.model, self.config, self.rank, self.dtype = model.train(), config, rank, dtype
        on_gpu = rank.device.type == "cuda"
        self.features = make_features(Setup(model, config, rank, dtype)) if features is None else list(features)
        self.extra = {one.kind: one for one in self.features if isinstance(one, ExtraLoss)}
        """What is added to the text's loss."""
        self.use_graph = (on_gpu and rank.world_size == 1) if config.graph is None else config.graph and on_gpu
        self.use_graph = self.use_graph and trained.capturable and all(one.capturable for one in self.features)
        if config.activation_checkpointing:
            trained.checkpoint_activations()
        self.lowered = self._lower(trained)
        by_default = on_gpu and self.lowered is None and trained.compiled_by_default
        self.use_compile = by_default if config.compile is None else config.compile
        objective = trained.objective(self.lowered, self.extra)
        self.objective = data_parallel(objective, rank)
        self.run: Callable[..., BatchLosses] = self.objective
        if self.use_compile:
            self.run = torch.compile(self.objective, dynamic=False)
        self.optimizer: Optimizer = optimizers.build(config.optimizer, objective, trained.matrices(), self.use_graph)
        is_fused = self.use_graph and FusedStep is not None and FusedStep.serves(self.optimizer.parts)
        self.fused = FusedStep(self.optimizer.parts, self.optimizer.decay_factors) if is_fused else None
        self.nothing = torch.zeros((), device=rank.device)
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.shape: tuple[int, ...] | None = None
        """[rows, time] of the last step."""
        self.steps = 0
        self.graph: CapturedStep | None = None

    def _lower(self, trained: Trainable) -> "LoweredModel | None":
        """The model by kernels, where the step is a graph: launched one by one they would wait for the host."""
        if self.config.compile or not self.use_graph or any(one.plain_pass for one in self.features):
            return None
        # Gradients that are added to others, or sent to other processes, are read before the side stream is waited for.
        alone = self.rank.world_size == 1 and self.config.accumulation == 1
        side = SideStream(self.rank.device) if alone else None
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
        """Train on this process's rows; `count` labels are in the batch of all processes.

        `share` of the training is done with the step.
        """
        self.optimizer.set_rate(rate)
        if self.shape not in (None, inputs.shape):
            self._record_again()
        self.shape = inputs.shape
        self.steps += 1
        if self.use_graph and self.steps > EAGER_STEPS_BEFORE_CAPTURE:
            report = self._replay(inputs, labels, count)
        else:
            report = self._train(self._load(inputs), self._load(labels), self._number(count))
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

    def _number(self, count: int) -> Tensor:
        # Made there: a copy from the host would wait for the device.
        return torch.full((), float(count), device=self.rank.device)

    def _train(self, inputs: Tensor, labels: Tensor, count: Tensor) -> StepReport:
        losses, additions, usage = [], [], {}
        extra: dict[str, list[Tensor]] = {name: [] for name in self.extra}
        parts = self.config.accumulation
        for index, (tokens, targets) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True)):
            beside = {name: value for one in self.features for name, value in one.inputs(index, parts).items()}
            with self._without_sync() if index + 1 < parts else contextlib.nullcontext():
                with autocast(self.rank.device, self.dtype):
                    found = self.run(tokens, targets, count, **beside)
                whole = self._whole(found)
                # DDP averages gradients, and the loss is already divided by the count of all processes.
                (whole if self.rank.world_size == 1 else whole * self.rank.world_size).backward()
                if self.lowered is not None:
                    self.lowered.synchronize()
            for one in self.features:
                one.read_pass(found)
            losses.append(found.text.detach())
            if found.routing is not None:
                additions.append(found.routing.detach())
            usage = found.usage
            for name, other in found.extra.items():
                extra[name].append(other.detach())
        norm = self._update()
        for one in self.features:
            one.end_update()
        self.optimizer.zero_grad()
        summed = {name: self._sum(each) for name, each in extra.items()}
        return StepReport(self._sum(losses), norm, self._sum(additions), usage, summed)

    def _whole(self, found: BatchLosses) -> Tensor:
        """What is minimised."""
        text, routing = found.text, found.routing
        if found.weighted is not None:
            return found.weighted if routing is None else found.weighted + routing
        whole = text * math.prod(loss.text_weight for loss in self.extra.values()) if self.extra else text
        whole = whole if routing is None else whole + routing
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
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None], foreach=True)
        # On a GPU the comparison would wait for the device, so there the product with 1 is simply computed.
        if longest is not None and (norm.is_cuda or bool(norm > longest)):
            nn.utils.clip_grads_with_norm_(self.parameters, longest, norm, foreach=True)
        self.optimizer.step()
        return norm

    def _without_sync(self) -> contextlib.AbstractContextManager:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return contextlib.nullcontext()

    def _replay(self, inputs: np.ndarray, labels: np.ndarray, count: int) -> StepReport:
        batch = packed_batch(inputs, labels, count).pin_memory()
        if self.graph is None:
            self.graph = CapturedStep(self._train, batch, inputs.shape, self.rank.device)
            if self.fused is not None:
                self.fused.write_addresses()
        return self.graph.replay(batch)
