"""Knowledge distillation as an extra loss: teachers run in every step, or what they said is read from disk.

The loss is KL(teachers || model) at a temperature: over the whole vocabulary, or over the teachers' top k and one event
more. A loss of many logits is computed in the memory of few: slice by slice, each with its gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.config import DataConfig
from braidlm.kernels.ops.soft_head_loss import ROUNDING, TeacherLogits, TopTokens
from braidlm.model.compiling import uncompiled
from braidlm.model.heads.losses import IGNORED
from braidlm.model.language_model import LanguageModel
from braidlm.training.features.distill.storing import StoragePlan, StoredTargets, Targets, open_targets
from braidlm.training.features.distill.teachers import (
    TEACHER,
    DistillConfig,
    Teacher,
    Teachers,
    find_teachers,
    slices_of,
)
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.parallel import main_first

Evaluator = Callable[..., Tensor]
"""The loss of some rows of a pass, given which rows they are and the head's inputs there."""


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

    def __init__(self, config: DistillConfig, model: LanguageModel):
        super().__init__(config, model)
        self.text_weight = 1.0 - config.weight

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        if data.pauses and training.distill.top_k is not None:
            what = "training.distill.top_k stores what teachers say of text without pauses"
            todo = "Leave out top_k, so that the teachers read every step's sequences, or data.pauses."
            yield BraidError(what, todo=todo)

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        """Find the teachers; what is to be stored of what they say is stored before the first step."""
        config, data, opened, rank = setup.training.distill, setup.data, setup.opened, setup.rank
        if config is None or data is None or opened is None:
            return []
        assert isinstance(setup.model, LanguageModel)  # a recipe of a decoder has no teachers
        with torch.random.fork_rng(devices=[]):
            found = find_teachers(config, opened.tokenizer, data.length)
        vocab_size = opened.tokenizer.vocab_size

        def load() -> Teachers:
            with torch.random.fork_rng(devices=[]):  # the run is the same whether they are loaded or not
                models = [teacher.load(rank.device, setup.dtype) for teacher in found]
            return Teachers(models, [teacher.weight for teacher in found], vocab_size, config.temperature)

        titles = [teacher.opened.title for teacher in found]
        if len(set(titles)) < len(titles):  # one model with several seeds
            titles = [str(teacher.opened.folder) for teacher in found]
        labels = (f"{title} ({teacher.weight:.0%})" for title, teacher in zip(titles, found, strict=True))
        console.say(f"Teachers: {', '.join(labels)}.")
        made: Distillation
        if config.top_k is None:
            made = OnlineDistillation(config, setup.model, load()).to(rank.device)
        else:
            shape = (setup.training.batch * setup.training.accumulation, data.length, min(config.top_k, vocab_size))
            hashes = [[teacher.opened.sha256, teacher.weight] for teacher in found]
            facts = {"temperature": config.temperature, "teachers": hashes}
            plan = StoragePlan(Path(data.cache), *shape[1:], vocab_size, facts)
            stored = main_first(lambda: open_targets(opened.train, plan, load, rank.device), rank)
            made = StoredDistillation(config, setup.model, stored, shape)
            made.ids, made.logs = made.ids.to(rank.device), made.logs.to(rank.device)
        made.found = found
        return [made]

    def sources(self) -> list[dict[str, Any]]:
        return [teacher.record() for teacher in self.found]

    def check_checkpoint(self, folder: Path) -> None:
        """Refuse to go on with other teachers than before: a run that teaches may have been trained on."""
        sources = (load_lineage(folder) or {}).get("sources") or []
        before = [source.get("sha256") for source in sources if source.get("role") == TEACHER]
        for had, teacher in zip(before, self.found, strict=False):
            if had != teacher.opened.sha256:
                raise BraidError(
                    "this teacher is another model now than when the run began",
                    str(teacher.opened.folder),
                    "Go on with the one that it was, by its own folder, or begin a new run with another folder "
                    "(out=DIR).",
                )

    @uncompiled  # it computes its gradients itself
    def forward(self, done: TrainingPass) -> Tensor:
        used = [p for p in (*done.model.head.parameters(), *self.parameters()) if p.requires_grad]
        rows, time = done.inputs.shape
        slices = slices_of(rows, time, done.model.config.vocab_size)
        return sliced_loss(self.evaluator(done), (done.hidden, *done.read.values()), slices, used) / done.count

    def evaluator(self, done: TrainingPass) -> Evaluator:
        """The summed loss of some rows of a pass."""
        raise NotImplementedError("abstract: teachers run, or are read")


class OnlineDistillation(Distillation):
    """The teachers read every batch."""

    def __init__(self, config: DistillConfig, model: LanguageModel, teachers: Teachers):
        super().__init__(config, model)
        self.teachers = teachers
        # A model of another package may wait for the device, and only a plain pass keeps hidden states.
        self.capturable = bool(teachers.lowered) and not config.hidden
        self.has_soft_targets = self.capturable and config.temperature == 1
        own, widths = model.model.width_out, teachers.widths if config.hidden else []
        self.projections = nn.ModuleList(
            nn.Identity() if width == own else nn.Linear(own, width, bias=False) for width in widths
        )

    def evaluator(self, done: TrainingPass) -> Evaluator:
        temperature, weight, teachers = self.config.temperature, self.config.hidden, self.teachers
        real = done.labels != IGNORED

        def evaluate(part: slice, stream: Tensor, *read: Tensor) -> Tensor:
            ids = done.inputs[part]
            said, states = teachers.read(ids) if weight else (teachers.log_probabilities(ids), [])
            loss = temperature**2 * divergence(said, done.model.head(stream, *read), temperature)
            for share, state, project in zip(teachers.weights, states, self.projections, strict=False):
                loss = loss + weight * share * hidden_difference(project(stream), state)
            return torch.where(real[part], loss, 0.0).sum()

        return evaluate

    def soft_targets(self, inputs: Tensor) -> TeacherLogits:
        return TeacherLogits(self.teachers.logits(inputs), tuple(self.teachers.weights), self.text_weight, self.factor)


class StoredDistillation(Distillation):
    """The teachers' most probable tokens were stored; a step reads those of its rows."""

    def __init__(
        self,
        config: DistillConfig,
        model: LanguageModel,
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


def divergence(teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] of log-probabilities [..., vocabulary] of the teachers from a model whose logits may have more entries.
    Entries that the teachers do not have are those of no token: there the teachers' probability is 0."""
    own = torch.log_softmax(logits.float() / temperature, -1)[..., : teacher.shape[-1]]
    return _expected_difference(teacher, own).sum(-1)


def top_k_divergence(ids: Tensor, teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] over k tokens `ids` [..., k], whose log-probabilities the teachers gave, and all others as one event. It
    is the divergence of two coarser distributions: at most `divergence`, and equal to it with k = vocabulary."""
    scaled = logits.float() / temperature
    total = scaled.logsumexp(-1)
    of_k = _expected_difference(teacher, scaled.gather(-1, ids) - total[..., None]).sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return of_k
    # Not 1 - sum: the model may leave the others less than float32 resolves beside 1.
    others = scaled.scatter(-1, ids, torch.finfo(scaled.dtype).min).logsumexp(-1) - total
    left = 1.0 - teacher.exp().sum(-1)
    left = torch.where(left > ROUNDING, left, 0.0)
    return of_k + _expected_difference(left.log(), others)


def _expected_difference(teacher: Tensor, own: Tensor) -> Tensor:
    """p (log p - log q), 0 where p is."""
    there = teacher > -torch.inf
    difference = torch.where(there, teacher, 0.0) - torch.where(there, own, 0.0)
    return teacher.exp() * difference


@uncompiled  # it asks autograd for gradients
def sliced_loss(
    evaluate: Evaluator, inputs: Sequence[Tensor], slices: Sequence[slice], parameters: Sequence[Tensor]
) -> Tensor:
    """The sum of `evaluate` over all slices of the inputs; `parameters` are those that it uses and that are trained.
    Autograd alone would keep the logits of every slice for the backward pass."""
    if not torch.is_grad_enabled():
        return torch.stack([evaluate(part, *(x[part] for x in inputs)) for part in slices]).sum()
    loss: Tensor = _SlicedLoss.apply(evaluate, slices, len(inputs), *inputs, *parameters)
    return loss


class _SlicedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, while a slice's logits are there."""

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluator, slices: Sequence[slice], count: int, *tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[:count], tensors[count:]
        of_inputs = [torch.empty_like(x) for x in inputs]
        of_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        losses = []
        for part in slices:
            with torch.enable_grad():
                rows = [x[part].detach().requires_grad_() for x in inputs]
                loss = evaluate(part, *rows)
            gradients = torch.autograd.grad(loss, [*rows, *parameters], allow_unused=True)
            for whole, gradient in zip(of_inputs, gradients[:count], strict=True):
                whole[part] = gradient
            for total, gradient in zip(of_parameters, gradients[count:], strict=True):
                if gradient is not None:  # a head may have parameters that its logits do not depend on
                    total += gradient
            losses.append(loss.detach())
        ctx.save_for_backward(*of_inputs, *of_parameters)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * upstream for gradient in ctx.saved_tensors)
