"""Training with differential privacy: DP-SGD (Abadi and others, arXiv 1607.00133), by any optimizer.

The gradient of each row of text is computed by itself and shortened to `clip`, and Gaussian noise is added to their sum
before the update, so much that the whole training has (epsilon, delta): whether one row was in the text changes no
probability of what comes out by more than a factor of e^epsilon, but for delta. How much noise that is, is opacus's
answer (Renyi differential privacy); it takes rows to be drawn at random for each step, where the loader shuffles them.

The noise is the operating system's and no seed's: who knew it could take it away. So two runs of a recipe differ.
"""

import contextlib
import math
import secrets
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig
from braidlm.model.config.ranges import Positive, Range
from braidlm.model.paths.joins import GumbelJoin
from braidlm.model.routing.router import TopKRouter
from braidlm.training.amounts import share_of_epoch
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.objective import routers


@dataclass
class PrivacyConfig:
    """How much the trained model may depend on any one row of text."""

    epsilon: Positive
    """The bound: 1 is strict, 8 is common."""
    delta: Annotated[float, Range(above=0, below=1)]
    """The chance that the bound fails; far less than 1 by the number of rows: 1e-6."""
    clip: Positive = 1.0
    """The longest gradient of a row; longer ones are shortened to it."""


@feature("training.privacy")
class Privacy(Feature):
    """Gradients of single rows, shortened and with noise."""

    @dataclass
    class Keys:
        privacy: PrivacyConfig | None = None
        """Differential privacy, `{epsilon: 8, delta: 1e-6}`: what each row of text adds to a step is bounded, and noise
        is added (`pip install 'braidlm[privacy]'`). It costs quality and time."""

    excludes: ClassVar = {
        "training.losses": ("an extra loss reads several rows of a batch, or other text", "Leave out training.losses."),
        "training.distill": ("a teacher's probabilities are not covered by the bound", "Leave out training.distill."),
        "training.memory": ("a memory carries one row's text into the next", "Leave out training.memory."),
        "training.lengths": ("a sequence that is cut into rows is read several times", "Leave out training.lengths."),
        "training.parallel": ("the noise is added by one process", "Train in one process."),
    }
    capturable = False
    plain_pass = True
    each_row = True

    def __init__(self, setup: Setup):
        chosen: PrivacyConfig = setup.training.privacy
        self.clip, self.delta, self.model = chosen.clip, chosen.delta, setup.model
        if setup.rank.world_size > 1:
            raise BraidError("training.privacy: the noise is added by one process", todo="Train in one process.")
        if setup.opened is None or setup.data is None:
            raise BraidError("training.privacy: how much noise is needed follows from the data, and there is none")
        self.rows = setup.training.batch * setup.training.accumulation
        tokens = self.rows * setup.data.length
        epochs, _ = share_of_epoch(setup.training.budget, setup.opened.train, tokens)
        available = sum(map(len, setup.opened.train))
        self.rate = min(1.0, tokens / available)
        """The share of all rows that a step reads."""
        self.steps = max(1, math.ceil(epochs * available / tokens))
        self.noise = noise_multiplier(chosen.epsilon, chosen.delta, self.rate, self.steps)
        """The standard deviation of the noise, as a multiple of `clip`."""
        self.generator = torch.Generator(setup.rank.device)
        self.generator.manual_seed(secrets.randbits(63))
        self.step, self.shortened = 0, torch.zeros((), device=setup.rank.device)
        self.find_parameters()
        bound = f"epsilon {chosen.epsilon:g} at delta {chosen.delta:g} for each row of {setup.data.length} tokens"
        how = (
            f"noise of {self.noise:.3g} times the longest gradient, {self.steps:,} steps of {self.rate:.2%} of the rows"
        )
        console.say(f"Privacy: {bound}: {how}")

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        if data.mix.weights:
            what = (
                "training.privacy: with data.mix.weights the rows of some sets are read more often than the bound knows"
            )
            yield BraidError(what, todo="Leave out data.mix.weights, or train on one set.")
        for name, one in data.sets.items():
            if one.answer is not None:
                what = f"training.privacy: rows of data.sets.{name} have different numbers of answers, which mixes them"
                yield BraidError(what, todo="Train on plain text.")

    @classmethod
    def check_model(cls, model: Any, training: Any, data: DataConfig) -> None:
        if any(router.config.balance_rate for router in routers(model)):
            what = "training.privacy: a router that balances (balance_rate) counts the tokens of a whole batch"
            raise BraidError(what, todo="Set its balance_rate to 0.")
        choosing = [part for part in model.modules() if isinstance(part, (TopKRouter, GumbelJoin))]
        own = training.routing_losses
        if any((part.config.losses if own is None else own) for part in choosing):
            what = "training.privacy: a routing loss is of the tokens of a whole batch, so that rows are mixed"
            raise BraidError(what, todo="Leave such losses out: training.routing_losses={}.")

    def find_parameters(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        """Of the rows of a step so far."""

    def begin_step(self, step: int, share: float) -> bool:
        self.step = step
        self.shortened.zero_()
        return False

    @torch.no_grad()
    def read_gradients(self) -> None:
        # The loss of a step is a mean over all labels, so that a row's gradient is its share of them.
        own = [None if p.grad is None else p.grad.float() * self.rows for p in self.parameters]
        found = [(total, gradient) for total, gradient in zip(self.sums, own, strict=True) if gradient is not None]
        length = torch.stack([gradient.norm() for _, gradient in found]).norm()
        factor = (self.clip / (length + 1e-6)).clamp(max=1.0)
        for total, gradient in found:
            total.add_(gradient * factor)
        self.shortened += (length > self.clip).float()
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def end_gradients(self) -> None:
        deviation = self.noise * self.clip
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            noise = torch.empty_like(total).normal_(0.0, deviation, generator=self.generator) if deviation else 0.0
            parameter.grad = ((total + noise) / self.rows).to(parameter.dtype)
            total.zero_()

    def readings(self) -> dict[str, float]:
        spent = epsilon_spent(self.noise, self.rate, self.step + 1, self.delta)
        return {"epsilon": spent, "shortened_gradients": float(self.shortened) / self.rows}

    def budget_grew(self) -> None:
        what = "training.privacy: the noise of the steps so far was chosen for a smaller budget"
        raise BraidError(what, todo="Train anew (--fresh) with the larger one.")


def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The least noise with which so many steps have (epsilon, delta)."""
    with _opacus():
        from opacus.accountants.utils import get_noise_multiplier

        given = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate, "steps": steps}
        return float(get_noise_multiplier(**given, accountant="rdp", epsilon_tolerance=0.01 * epsilon))


def epsilon_spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """The epsilon of so many steps, each with this noise for this share of the rows."""
    with _opacus():
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(noise, rate, steps)]
        return float(accountant.get_epsilon(delta))


@contextlib.contextmanager
def _opacus() -> Iterator[None]:
    """Without its warnings that the bound could be tighter by a hair, and with its errors in our words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except ImportError:
        what = "training.privacy: how much noise is needed is counted by the package 'opacus'"
        raise BraidError(what, todo="pip install 'braidlm[privacy]'") from None
    except ValueError as error:
        what = f"training.privacy: no noise keeps the bound ({error})"
        raise BraidError(what, todo="Ask for a larger epsilon or delta, or train for fewer steps.") from error
