"""Training with differential privacy: DP-SGD (Abadi and others, arXiv 1607.00133), by any optimizer.

The gradient of each row is computed by itself and shortened to `clip`, and Gaussian noise is added to their sum before
the update, so much that the whole training has (epsilon, delta): whether one row was in the text changes no probability
of what comes out by more than a factor of e^epsilon, but for delta. How much noise that is, is opacus's answer (Renyi
differential privacy) for what the loader does: each row is in each step by itself, with one probability (Poisson
sampling), so that the rows of a step differ in number, and their sum is divided by the mean number.

So rows must be the same in every epoch and share nothing with each other. A row's loss is divided by a number that no
text decides, and so is progress: a step counts as the mean one, which fixes the number of steps before the first.

Noise, draws and dropout are the operating system's and no seed's: who knew them could take them away, and with a known
seed one row more would change the dropout of all others, which no clip bounds. So two runs of a recipe differ. The key
of the draws is saved with the position, and a run that goes on draws what it would have drawn.
"""

import contextlib
import secrets
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.model.config.ranges import Positive, Range
from braidlm.model.paths.joins import GumbelJoin
from braidlm.model.routing.router import TopKRouter
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.objective import BatchLosses, routers
from braidlm.training.step.row_gradients import Parameters, RowGradients, gradients_at_once, gradients_one_by_one


@dataclass
class PrivacyConfig:
    """How much the trained model may depend on any one row of text, or document (`data.chunking: single`)."""

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
        "training.token_dropout": (
            "which tokens of a row are replaced depends on how many rows are before it, and on a seed that is told",
            "Leave out training.token_dropout.",
        ),
        "data.pauses": (
            "where pauses stand depends on how much text is before a row, and on a seed that is told",
            "Leave out data.pauses.",
        ),
        "training.parallel": ("rows are drawn and noise is added by one process", "Train in one process."),
    }
    capturable = False
    draws_rows = True
    file = "privacy.safetensors"
    plain_pass = True

    def __init__(self, setup: Setup):
        self.config: PrivacyConfig = setup.training.privacy
        self.model, self.budget, self.device = setup.model, setup.training.budget, setup.rank.device
        if setup.rank.world_size > 1:
            what = "training.privacy: rows are drawn and noise is added by one process"
            raise BraidError(what, todo="Train in one process.")
        if setup.opened is None or setup.data is None:
            raise BraidError("training.privacy: how much noise is needed follows from the data, and there is none")
        self.normal = SecretNormal(self.device)
        torch.manual_seed(secrets.randbits(64))  # of dropout and of joins that choose at random
        self.at_once = True
        """Whether the gradients of all rows of a pass are computed at once, until that fails."""
        self.step, self.drawn, self.shortened = 0, 0, torch.zeros((), device=self.device)
        self.find_parameters()

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        kind = data.chunking.kind
        if chunkings.build(data.chunking).unit(data.length) is None:
            what = f"training.privacy: with data.chunking '{kind}' rows overlap, or are others in every epoch: "
            what += "nothing stays the same that the bound could be for"
            todo = "data.chunking=single makes every document a row, for which the bound is then. "
            todo += f"data.chunking='{{kind: windows, stride: {data.length + 1}}}' gives rows of all text that stay."
            yield BraidError(what, todo=todo)
        if data.order.kind != "shuffled" or data.mix.curriculum:
            what = "training.privacy: with data.order or data.mix.curriculum a step reads some rows more likely than "
            yield BraidError(f"{what}others, and the bound takes it to draw from all of them", todo="Leave it out.")

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

    def read_loader(self, loader: Loader) -> None:
        if any(stream.parts > 1 for stream in loader.streams):
            what = (
                "training.privacy: a data set in shards is read in groups of them, and the bound takes a step to draw"
            )
            raise BraidError(f"{what} from all rows", todo="Prepare it without shards.")
        self.length, self.rows = loader.length, loader.global_rows
        unit = loader.chunking.unit(loader.length)
        assert unit is not None  # `problems` refuses others
        self.unit: str = unit
        self.count = sum(loader.rows_per_epoch.values())
        self.rate = max(loader.rates.values())
        """The probability with which a step has a row of the data set that is read most often."""
        if self.rate > 1:
            what = f"training.privacy: a step of {self.rows} rows reads every {unit} of a data set more than once"
            raise BraidError(what, todo="Take a smaller training.batch or training.accumulation.")
        tokens, words = loader.use_poisson_sampling(secrets.randbits(128))
        self.steps = -(-self.budget.count // {"steps": 1, "tokens": tokens, "words": words}[self.budget.unit])
        epsilon, delta = self.config.epsilon, self.config.delta
        self.noise = noise_multiplier(epsilon, delta, self.rate, self.steps)
        """The standard deviation of the noise, as a multiple of `clip`."""
        size = "" if unit == "document" else f" of {self.length} tokens"
        how = f"noise of {self.noise:.3g} times the longest gradient, {self.steps:,} steps, each "
        how += f"of which reads a {unit} with a probability of {self.rate:.2%}"
        console.say(f"Privacy: epsilon {epsilon:g} at delta {delta:g} for each {unit}{size}: {how}")

    def find_parameters(self) -> None:
        parameters = (p for p in self.model.parameters() if p.requires_grad)
        self.sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
        """Over the rows of a step so far."""
        banks = [(part, rows) for part in self.model.modules() if (rows := getattr(part, "trained_rows", None))]
        self.trained_rows = {parameter: rows for part, rows in banks for parameter in part.parameters(recurse=False)}
        """Of parameters with frozen rows, which noise would move."""

    def begin_step(self, step: int, share: float) -> bool:
        self.step, self.drawn = step, 0
        self.shortened.zero_()
        return False

    def own_pass(self, run: Any, tokens: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        """With the mean loss of the labels; of no rows it is 0."""
        objective = getattr(run, "_orig_mod", run)  # it may be compiled
        parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        divisor, text = torch.full((), float(self.length), device=self.device), torch.zeros((), device=self.device)
        usage: dict[str, Tensor] = {}
        for gradients, found in self._gradients(run, objective, parameters, tokens, labels, divisor):
            self._add([self.sums[parameter] for parameter in parameters.values()], gradients)
            text, usage = text + found.text.detach(), found.usage
        self.drawn += len(tokens)
        return BatchLosses(text * divisor / count, None, usage, {})

    def _gradients(
        self, run: Any, objective: Any, parameters: Parameters, tokens: Tensor, labels: Tensor, count: Tensor
    ) -> RowGradients:
        if not len(tokens):
            return
        if self.at_once:
            try:
                yield from gradients_at_once(objective, parameters, tokens, labels, count)
                return
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.at_once = False
                reason = textwrap.shorten(str(error), 100, placeholder=" ...")
                console.say(f"Privacy: gradients are computed row by row, which is slower than at once ({reason})")
        yield from gradients_one_by_one(run, parameters, tokens, labels, count)

    @torch.no_grad()
    def _add(self, sums: list[Tensor], gradients: list[Tensor]) -> None:
        """Add gradients [row, ...], each row's shortened; a row's that are no numbers add nothing."""
        gradients = [gradient.float() for gradient in gradients]
        lengths = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (self.config.clip / (lengths + 1e-6)).clamp(max=1.0)
        if not bool((numbers := lengths.isfinite()).all()):
            factors = factors.where(numbers, 0.0)
            gradients = [gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients]
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(torch.tensordot(factors, gradient, 1))
        self.shortened += (lengths > self.config.clip).sum()

    @torch.no_grad()
    def end_gradients(self) -> None:
        deviation = self.noise * self.config.clip
        for parameter, total in self.sums.items():
            trained = total[self.trained_rows.get(parameter, ...)]
            trained += self.normal(trained) * deviation
            parameter.grad = (total / self.rows).to(parameter.dtype)
            total.zero_()

    def readings(self) -> dict[str, float]:
        return {"epsilon": self.spent, "shortened_gradients": float(self.shortened) / max(self.drawn, 1)}

    def warnings(self) -> Iterable[str]:
        if self.config.delta * self.count >= 1:
            what = (
                f"training.privacy: a training that publishes one of {self.count:,} {self.unit}s whole has a delta of"
            )
            yield f"{what} {1 / self.count:.1g}, and {self.config.delta:g} is no less; take far less"

    def told(self) -> dict[str, Any]:
        """With what any accountant computes the bound from; and without the loss, for which there is none."""
        bound = {"epsilon": self.spent, "delta": self.config.delta, "for_each": self.unit}
        poisson = {"noise": self.noise, "probability": self.rate, "steps": self.step + 1}
        return {"privacy": bound | {"poisson_sampling": poisson}, "loss": None}

    @property
    def spent(self) -> float:
        """The epsilon of the steps so far."""
        return epsilon_spent(self.noise, self.rate, self.step + 1, self.config.delta)

    def state(self) -> dict[str, Tensor]:
        return {"noise": torch.tensor(self.noise, dtype=torch.float64)}

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with the noise of the steps so far, where it keeps the bound to the end of the budget."""
        self.noise = float(saved["noise"])
        if epsilon_spent(self.noise, self.rate, self.steps, self.config.delta) > self.config.epsilon:
            what = "training.privacy: the noise of the steps so far was chosen for a smaller budget"
            raise BraidError(what, todo="Train anew (--fresh) with the larger one.")


class SecretNormal:
    """Normal numbers like a tensor's, from a key of the operating system.

    On a CPU they are NumPy's: torch's generator there has seeds of 32 bits, which can all be tried. They are drawn in
    float64: torch's in float32 end at 5.8 deviations there, and what lies beyond could only be a row's.
    """

    def __init__(self, device: torch.device):
        self.numbers, self.generator = np.random.Generator(np.random.Philox()), torch.Generator(device)
        self.generator.manual_seed(secrets.randbits(64))

    def __call__(self, like: Tensor) -> Tensor:
        if like.device.type == "cuda":
            return torch.empty_like(like, dtype=torch.float64).normal_(generator=self.generator).to(like)
        return torch.as_tensor(self.numbers.standard_normal(tuple(like.shape))).to(like)


def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The least noise with which so many steps have (epsilon, delta)."""
    with _opacus():
        from opacus.accountants.utils import get_noise_multiplier

        given = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate, "steps": steps}
        return float(get_noise_multiplier(**given, accountant="rdp", epsilon_tolerance=0.01 * epsilon))


def epsilon_spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """The epsilon of so many steps, each with this noise, where each draws each row with the probability `rate`."""
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
