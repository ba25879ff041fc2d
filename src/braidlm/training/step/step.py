"""One optimizer step: forward and backward over the micro-batches, clipping, update; eager or as a replayed graph."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.kernels.side_stream import SideStream
from braidlm.model.dropout import Dropout, scale_dropout
from braidlm.model.paths.gumbel import GumbelJoin, scale_temperature
from braidlm.model.routing.router import TopKRouter
from braidlm.training.config import TrainingConfig
from braidlm.training.step.captured_step import EAGER_STEPS_BEFORE_CAPTURE, CapturedStep, packed_batch
from braidlm.training.step.extra_losses import ExtraLoss
from braidlm.training.step.memory import Memory
from braidlm.training.step.objective import BatchLosses, routers
from braidlm.training.step.optimizers.contract import Optimizer, optimizers
from braidlm.training.step.parallel import Rank, data_parallel, sum_over_processes
from braidlm.training.step.precision import autocast
from braidlm.training.step.step_report import StepReport
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
        memory: int = 0,
        given: dict[str, ExtraLoss] | None = None,
        seed: int = 0,
    ):
        """With `memory`, each row attends to that many tokens before its chunk. `given` are extra losses that the
        recipe does not list, by name. `seed` is for what losses draw."""
        model = trained.model
        self.model, self.config, self.rank, self.dtype = model.train(), config, rank, dtype
        on_gpu = rank.device.type == "cuda"
        self.extra = {**trained.extra_losses(config.losses), **(given or {})}
        """What is added to the text's loss."""
        for loss in self.extra.values():
            loss.begin_run(config.batch, seed)
        self.use_graph = (on_gpu and rank.world_size == 1) if config.graph is None else config.graph and on_gpu
        self.use_graph = self.use_graph and trained.capturable and all(x.capturable for x in self.extra.values())
        if config.activation_checkpointing:
            trained.checkpoint_activations()
        self.memory = trained.empty_memory(memory, config.batch * config.accumulation, rank.device, dtype)
        """What each row remembers between steps."""
        self._check_taken_rows(given)
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
        self.dropout_scale = 1.0
        scale_dropout(model, self.dropout_scale)
        dropouts = [m for m in model.modules() if isinstance(m, Dropout) and m.rate > 0]
        self.has_dropout, self.records_dropout = bool(dropouts), any(m.is_recorded for m in dropouts)
        self.balanced = {router.address: router for router in routers(model) if _is_balanced(router)}
        self.growing = [router for router in routers(model) if router.opening is not None]
        self.shape: tuple[int, ...] | None = None
        """[rows, time] of the last step."""
        self.temperature_scale = 1.0
        self.has_temperature = any(isinstance(m, GumbelJoin) and m.is_noisy for m in model.modules())
        self.steps = 0
        self.graph: CapturedStep | None = None
        self.memory_after: list[Memory] = []
        """What the rows of each micro-batch remember after the last step."""

    def _lower(self, trained: Trainable) -> "LoweredModel | None":
        """The model by kernels, where the step is a graph: launched one by one they would wait for the host."""
        # Kernels see one chunk alone, and keep less than extra losses read, but for soft targets of the head.
        taught = [loss.has_soft_targets for loss in self.extra.values()]
        if self.config.compile or not self.use_graph or self.memory is not None or taught not in ([], [True]):
            return None
        # Gradients that are added to others, or sent to other processes, are read before the side stream is waited for.
        alone = self.rank.world_size == 1 and self.config.accumulation == 1
        side = SideStream(self.rank.device) if alone else None
        lowered = trained.lower(self.dtype, side, compile_plain=self.config.compile is not False)
        return None if lowered is None or (taught and not lowered.serves_head) else lowered

    def _check_taken_rows(self, given: dict[str, ExtraLoss] | None) -> None:
        """Rows that see both ways have no memory of the text before, teachers read forward, and rows are counted."""
        takers = [name for name, loss in self.extra.items() if loss.taken_rows]
        others = {
            "training.memory": self.memory is not None,
            "training.distill": bool(given),
            "training.lengths": bool(self.config.lengths),
        }
        for other, is_there in others.items():
            if takers and is_there:
                what = f"the loss '{takers[0]}' and {other} do not go together"
                raise BraidError(what, "training.losses", "Leave out one of them.")

    def step(
        self,
        inputs: np.ndarray,
        labels: np.ndarray,
        count: int,
        rate: float,
        continues: np.ndarray | None = None,
        read_again: bool = False,
    ) -> StepReport:
        """Train on this process's rows; `count` labels are in the batch of all processes.

        For a memory: `continues` says which rows go on with their text (by default none), `read_again` that the next
        step has the same rows once more.
        """
        self.optimizer.set_rate(rate)
        if self.shape not in (None, inputs.shape):
            self._record_again()
        self.shape = inputs.shape
        self.steps += 1
        goes_on = np.zeros(len(inputs), np.int64) if continues is None else continues.astype(np.int64)
        if self.use_graph and self.steps > EAGER_STEPS_BEFORE_CAPTURE:
            report = self._replay(inputs, labels, goes_on, count)
        else:
            report = self._train(self._load(inputs), self._load(labels), self._load(goes_on), self._number(count))
        if self.memory is not None and not read_again:
            for rows, after in zip(self.memory.split(self.config.accumulation), self.memory_after, strict=True):
                rows.copy_from(after)
        return report

    def scale_dropout(self, scale: float) -> None:
        """Change every dropout rate; a captured step is recorded again if it holds one."""
        if scale == self.dropout_scale:
            return
        self.dropout_scale = scale
        scale_dropout(self.model, scale)
        if self.records_dropout:
            self._record_again()

    def scale_temperature(self, scale: float) -> None:
        """Change the temperature of every Gumbel join; a captured step is recorded again."""
        if scale == self.temperature_scale:
            return
        self.temperature_scale = scale
        scale_temperature(self.model, scale)
        if self.has_temperature:
            self._record_again()

    def open_modules(self, share: float) -> None:
        """Open modules that were inserted this far, in place: a captured step reads it."""
        for router in self.growing:
            router.open(share)

    def begin_step(self, step: int, share: float, batch: Batch) -> Batch:
        """Tell the extra losses which step comes; a captured step is recorded again where they compute another.

        Gives the batch as it is trained.
        """
        self.optimizer.begin_step(share)
        changed = [loss.begin_step(step, share) for loss in self.extra.values()]
        if any(changed):
            self._record_again()
        for loss in self.extra.values():
            batch = loss.read_batch(batch)
        return batch

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

    def _train(self, inputs: Tensor, labels: Tensor, continues: Tensor, count: Tensor) -> StepReport:
        losses, additions, picked, remembered = [], [], [], []
        used: dict[str, Tensor] = {}
        extra: dict[str, list[Tensor]] = {name: [] for name in self.extra}
        pieces = list(self._micro_batches(inputs, labels, continues))
        for index, (tokens, targets, *memory) in enumerate(pieces):
            last = index + 1 == len(pieces)
            with self._without_sync() if not last else contextlib.nullcontext():
                with autocast(self.rank.device, self.dtype):
                    found = self.run(tokens, targets, count, *memory)
                whole = self._whole(found)
                # DDP averages gradients, and the loss is already divided by the count of all processes.
                (whole if self.rank.world_size == 1 else whole * self.rank.world_size).backward()
                if self.lowered is not None:
                    self.lowered.synchronize()
            loss, added, used, picks, after, others, _ = found
            losses.append(loss.detach())
            picked.append(picks)
            if after is not None:
                remembered.append(after)
            if added is not None:
                additions.append(added.detach())
            for name, other in others.items():
                extra[name].append(other.detach())
        norm = self._update()
        for extra_loss in self.extra.values():
            extra_loss.end_step()
        self._rebalance(picked)
        self.memory_after = remembered
        self.optimizer.zero_grad()
        summed = {name: self._sum(parts) for name, parts in extra.items()}
        return StepReport(self._sum(losses), norm, self._sum(additions), used, summed)

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

    def _micro_batches(self, inputs: Tensor, labels: Tensor, continues: Tensor) -> Iterator[tuple[Any, ...]]:
        """Inputs and labels of each, and where rows have a memory, that and whether they go on with their text."""
        parts = self.config.accumulation
        columns: list[Any] = [inputs.chunk(parts), labels.chunk(parts)]
        if self.memory is not None:
            columns += [self.memory.split(parts), continues.chunk(parts)]
        return zip(*columns, strict=True)

    def _rebalance(self, picked: list[dict[str, Tensor]]) -> None:
        """Routers that are balanced without a loss see what all processes' tokens chose."""
        for name, router in self.balanced.items():
            load = functools.reduce(torch.add, (picks[name] for picks in picked))
            router.rebalance(sum_over_processes(load, self.rank))

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

    def _replay(self, inputs: np.ndarray, labels: np.ndarray, continues: np.ndarray, count: int) -> StepReport:
        batch = packed_batch(inputs, labels, continues, count).pin_memory()
        if self.graph is None:
            self.graph = CapturedStep(self._train, batch, inputs.shape, self.rank.device)
            if self.fused is not None:
                self.fused.write_addresses()
        return self.graph.replay(batch)


def _is_balanced(router: TopKRouter) -> bool:
    """Whether training adjusts its ranking; a router that is frozen, or all but its new rows, keeps it."""
    trained = router.scores.weight.requires_grad and router.scores.trained_rows is None
    return router.balance is not None and trained
