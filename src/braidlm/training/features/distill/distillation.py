"""Knowledge distillation as an extra loss: teachers run in every step, or what they said is read from disk."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.config import DataConfig
from braidlm.kernels.ops.soft_head_loss import TeacherLogits, TopTokens
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.features.distill.divergence import (
    Evaluator,
    divergence,
    sliced_loss,
    slices_of,
    top_k_divergence,
)
from braidlm.training.features.distill.storing import StoragePlan, StoredTargets, Targets, open_targets
from braidlm.training.features.distill.teachers import (
    DistillConfig,
    Teacher,
    Teachers,
    check_same_teachers,
    find_teachers,
)
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.parallel import main_first


@feature("training.distill")
class Distillation(ExtraLoss):
    """temperature^2 x KL(teachers || model) of the next token, and what the hidden states differ by if asked for."""

    @dataclass
    class Keys:
        distill: DistillConfig | None = None
        """Learn from the probabilities of other models: `{teachers: [runs/a, runs/b]}`."""

    order = 1  # behind the losses that a recipe lists
    kind = "distill"
    config: DistillConfig
    found: Sequence[Teacher] = ()

    def __init__(self, config: DistillConfig, model: BraidForCausalLM):
        super().__init__(config, model)
        self.text_weight = 1.0 - config.weight

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        if data.pauses and training.distill.top_k is not None:
            yield BraidError(
                "training.distill.top_k stores what teachers say of text without pauses",
                todo="Leave out top_k, so that the teachers read every step's sequences, or data.pauses.",
            )

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        """Find the teachers; what is to be stored of what they say is stored before the first step."""
        config, data, opened = setup.training.distill, setup.data, setup.opened
        if config is None or data is None or opened is None:
            return []
        assert isinstance(setup.model, BraidForCausalLM)  # a recipe of a decoder has no teachers
        with torch.random.fork_rng(devices=[]):
            found = find_teachers(config, opened.tokenizer, data.length)
        made = make_distillation(config, found, setup.model, setup)
        made.found = found
        return [made]

    def sources(self) -> list[dict[str, Any]]:
        return [teacher.record() for teacher in self.found]

    def check_checkpoint(self, folder: Path) -> None:
        check_same_teachers(self.found, folder)

    @torch.compiler.disable  # it computes its gradients itself
    def forward(self, done: TrainingPass) -> Tensor:
        used = [*done.model.head.parameters(), *self.parameters()]
        rows, time = done.inputs.shape
        slices = slices_of(rows, time, done.model.config.vocab_size)
        loss = sliced_loss(
            self.evaluator(done), (done.hidden, *done.read.values()), slices, [p for p in used if p.requires_grad]
        )
        return loss / done.count

    def evaluator(self, done: TrainingPass) -> Evaluator:
        """The summed loss of some rows of a pass."""
        raise NotImplementedError("abstract: teachers run, or are read")


class OnlineDistillation(Distillation):
    """The teachers read every batch."""

    def __init__(self, config: DistillConfig, model: BraidForCausalLM, teachers: Teachers):
        super().__init__(config, model)
        self.teachers = teachers
        # A model of another package may wait for the device, and only a plain pass keeps hidden states.
        self.capturable = teachers.by_kernels and not config.hidden
        self.has_soft_targets = self.capturable and config.temperature == 1
        own, widths = model.model.width_out, teachers.widths if config.hidden else []
        self.projections = nn.ModuleList(
            nn.Identity() if width == own else nn.Linear(own, width, bias=False) for width in widths
        )

    def evaluator(self, done: TrainingPass) -> Evaluator:
        temperature, weight = self.config.temperature, self.config.hidden
        real = done.labels != IGNORED

        def evaluate(part: slice, stream: Tensor, *read: Tensor) -> Tensor:
            said = self.teachers.read(done.inputs[part], hidden=weight > 0)
            loss = temperature**2 * divergence(said.log_probabilities, done.model.head(stream, *read), temperature)
            for share, other, project in zip(self.teachers.weights, said.hidden, self.projections, strict=False):
                loss = loss + weight * share * hidden_difference(project(stream), other)
            return torch.where(real[part], loss, 0.0).sum()

        return evaluate

    def soft_targets(self, inputs: Tensor) -> TeacherLogits:
        return TeacherLogits(self.teachers.logits(inputs), tuple(self.teachers.weights), self.text_weight, self.factor)


class StoredDistillation(Distillation):
    """The teachers' most probable tokens were stored; a step reads those of its rows."""

    def __init__(
        self,
        config: DistillConfig,
        model: BraidForCausalLM,
        stored: Mapping[str, StoredTargets],
        shape: tuple[int, int, int],
    ):
        """`shape` [rows of a step, time, k]; `stored` are those of each data set by its name."""
        super().__init__(config, model)
        self.has_soft_targets = config.temperature == 1
        self.stored = [stored[name] for name in sorted(stored)]
        # A replayed step needs them in their place. They are no buffers, which data parallelism would make equal.
        self.ids = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self.logs = torch.zeros(shape, device=model.device)
        self.next_token = 0

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        shape = (*batch.whole.positions.shape, self.ids.shape[-1])  # shorter rows are as many more
        # As they are stored, which is less to copy. Memory that is not pinned would wait for the step before it; torch
        # gives that of an earlier step again once its copy is complete.
        read = [
            torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=self.ids.is_cuda)
            for dtype in (self.stored[0].ids.dtype, self.stored[0].logs.dtype)
        ]
        rows = zip(*(values.numpy() for values in read), strict=True)
        for source, positions, out in zip(batch.whole.own_sources, batch.whole.positions, rows, strict=True):
            self.stored[int(source)].at(positions, Targets(*out))
        for place, values in zip((self.ids, self.logs), read, strict=True):
            place.copy_(values.to(place.device, non_blocking=True).view_as(place))
        self.next_token = 0
        return batch

    def soft_targets(self, inputs: Tensor) -> TopTokens:
        return TopTokens(*self._next(inputs), self.text_weight, self.factor)

    def evaluator(self, done: TrainingPass) -> Evaluator:
        ids, logs = self._next(done.inputs)
        real, temperature = done.labels != IGNORED, self.config.temperature

        def evaluate(part: slice, *inputs: Tensor) -> Tensor:
            loss = top_k_divergence(ids[part].long(), logs[part], done.model.head(*inputs), temperature)
            return temperature**2 * torch.where(real[part], loss, 0.0).sum()

        return evaluate

    def _next(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The targets of a micro-batch [batch, time]: they come in the order of its tokens, whatever their rows."""
        begin, self.next_token = self.next_token, self.next_token + inputs.numel()
        here, shape = slice(begin, self.next_token), (*inputs.shape, -1)
        return self.ids.flatten(0, 1)[here].view(shape), self.logs.flatten(0, 1)[here].view(shape)


def hidden_difference(own: Tensor, other: Tensor) -> Tensor:
    """The mean squared difference [...] of two states [..., width], each with mean 0 and variance 1."""
    one, two = (F.layer_norm(state.float(), state.shape[-1:]) for state in (own, other))
    return (one - two).square().mean(-1)


def make_distillation(
    config: DistillConfig, found: Sequence[Teacher], model: BraidForCausalLM, setup: Setup
) -> Distillation:
    """The loss of a run; what is to be stored is stored first."""
    assert setup.data is not None
    assert setup.opened is not None
    rank, streams, vocab_size = setup.rank, setup.opened.train, setup.opened.tokenizer.vocab_size
    shape = (setup.training.batch * setup.training.accumulation, setup.data.length)

    def load() -> Teachers:
        with torch.random.fork_rng(devices=[]):  # the run is the same whether they are loaded or not
            models = [teacher.load(rank.device, setup.dtype) for teacher in found]
        return Teachers(models, [teacher.weight for teacher in found], vocab_size, config.temperature)

    alike = len({teacher.name for teacher in found}) < len(found)  # one model with several seeds
    labels = (f"{teacher.folder if alike else teacher.name} ({teacher.weight:.0%})" for teacher in found)
    console.say(f"Teachers: {', '.join(labels)}.")
    if config.top_k is None:
        return OnlineDistillation(config, model, load()).to(rank.device)
    top_k = min(config.top_k, vocab_size)
    facts = {"temperature": config.temperature, "teachers": [[teacher.sha256, teacher.weight] for teacher in found]}
    plan = StoragePlan(Path(setup.data.cache), shape[1], top_k, vocab_size, facts)
    stored = main_first(lambda: open_targets(streams, plan, load, rank.device), rank)
    return StoredDistillation(config, model, stored, (*shape, top_k))
