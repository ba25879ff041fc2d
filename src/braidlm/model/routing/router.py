"""Routers, which choose the top k of N named things for each token, and what every bank of experts shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import MAX_ITEMS, Choices, NonNegative, Range, Share, Size
from ..config.registry import Choice, Registry
from ..config.strict import PartOf
from ..dropout import Dropout, leave_out
from ..errors import BraidError
from ..norms import norms
from .dispatch import Compute, Permutation, is_sparse, sort_by_expert
from .losses import check_losses
from .routing import Routing, Routings
from .stacked import PartlyTrained, StackedLinear


@dataclass
class RouterConfig:
    """How a router chooses."""

    top_k: Choices = 2
    """The number of choices for each token."""
    renormalise: bool = True
    """Whether the weights of the chosen are normalised to a sum of 1 (MoEP), which is a softmax after the choice, or
    stay as the softmax over all gives them (ModuleFormer)."""
    hidden: Size | None = None
    """Inner size of a router of two layers, the first of which has a bias (ModuleFormer); by default it has one."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Between the layers of a router of two: GELU as in ModuleFormer's code, or ReLU as its paper prints."""
    norm: Annotated[Choice, PartOf(norms)] | None = None
    """A normalisation of the router's input; by default none."""
    bias: bool = True
    """Whether the scores have a bias."""
    silent: Annotated[int, Range(at_least=0, at_most=MAX_ITEMS)] = 0
    """Rows of scores after those of the choices: of modules that were pruned, whose scores still count in the softmax,
    so that the weights of the others, and their ranking where the router balances, stay as they were."""
    new: list[str] = field(default_factory=list)
    """The last of the choices, if they were inserted into a trained model; `training.opening` brings them into use."""
    base_top_k: Choices | None = None
    """The number of choices where none of `new` is left or switched on, if these were inserted with another `top_k`."""
    sampled: Annotated[int, Range(at_least=0, at_most=MAX_ITEMS)] = 0
    """How many of the `top_k` are drawn at random by their probabilities in training; the others are the top ones."""
    noise: NonNegative = 0.0
    """Standard deviation of noise on the scores in training; it changes the choice, not the weights."""
    losses: dict[str, NonNegative] = field(default_factory=lambda: {"switch": 0.01})
    """Routing losses and their weights."""
    balance_rate: Share = 0.0
    """Balancing without a loss: after each step the ranking of choices with too many tokens is lowered by this much,
    and that of choices with too few is raised; weights do not change. 0.001 is common."""
    compute: Compute = "measured"
    """Whether only the chosen are computed or all of them; by default the faster, which training measures."""

    def __post_init__(self) -> None:
        check_losses(self.losses)
        if self.sampled > self.top_k:
            raise BraidError(f"sampled is {self.sampled}, and only {self.top_k} are chosen (top_k)")
        if self.base_top_k is not None and not self.new:
            raise BraidError("base_top_k is for routers with inserted modules (new)")


ROUTER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class ScoreLinear(PartlyTrained, nn.Linear):
    """A linear layer that computes in the type of its input: a router of a half-precision model scores in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.rows()
        return F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))


class TopKRouter(nn.Module):
    """Linear scores, or those of two layers, softmax over all, then the top k. Computed in float32 or wider."""

    def __init__(self, config: RouterConfig, width: int, choices: Sequence[str]):
        super().__init__()
        if config.top_k > len(choices):
            raise BraidError(f"top_k is {config.top_k}, and there are only {len(choices)} to choose from")
        self.config, self.choices = config, tuple(choices)
        self.address = ""  # the model's name for this router; the model sets it
        self.inactive: frozenset[str] = frozenset()  # choices that are never selected
        self.norm = norms.build(config.norm, width) if config.norm is not None else None
        self.inner = None if config.hidden is None else ScoreLinear(width, config.hidden)
        self.drop = Dropout(kind="experts")
        self.scores = ScoreLinear(config.hidden or width, len(self.choices) + config.silent, bias=config.bias)
        self.old = len(self.choices) - len(config.new)  # how many choices were there before others were inserted
        if self.choices[self.old :] != tuple(config.new):
            raise BraidError(f"new: these must be the last of the choices: {', '.join(self.choices)}")
        if config.new:
            # A factor on their probabilities: at 0 they are never chosen, at 1 they are choices as any other.
            self.register_buffer("opening", torch.zeros(len(config.new)))
        else:
            self.opening = None
        if config.balance_rate:
            self.register_buffer("balance", torch.zeros(len(self.choices)))
        else:
            self.balance = None

    @property
    def top_k(self) -> int:
        """The number of choices for each token."""
        alone = self.config.base_top_k is not None and self.inactive.issuperset(self.config.new)
        return self.config.base_top_k if alone else self.config.top_k  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Routing:
        return self.route(self.score(hidden))

    def route(self, all_scores: Tensor, where: str = "") -> Routing:
        """The choice by scores, [batch, time, choices and silent ones]; an error says `where` they come from."""
        scores_BTN, inactive_N = all_scores[..., : len(self.choices)], None
        if self.opening is not None:
            opening_N = F.pad(self.opening.to(scores_BTN.dtype), (self.old, 0), value=1.0)
            scores_BTN, inactive_N = scores_BTN + opening_N.log(), opening_N == 0
        if self.inactive:
            off_N = torch.tensor([name in self.inactive for name in self.choices], device=scores_BTN.device)
            inactive_N = off_N if inactive_N is None else off_N | inactive_N
            scores_BTN = scores_BTN.masked_fill(off_N, -torch.inf)
        silent, active = all_scores[..., len(self.choices) :], self._active()
        probabilities_BTN = _shares(scores_BTN, silent, active)
        self._check(probabilities_BTN, where or self.address)
        ranked_BTN = scores_BTN.detach()
        if self.training and self.config.noise:
            ranked_BTN = ranked_BTN + torch.randn_like(ranked_BTN) * self.config.noise
        if self.balance is not None:
            ranked_BTN = _shares(ranked_BTN, silent.detach(), active) + self.balance
            ranked_BTN = ranked_BTN if inactive_N is None else ranked_BTN.masked_fill(inactive_N, -torch.inf)
        chosen_BTK = self._choose(ranked_BTN, probabilities_BTN.detach())
        weights_BTK = probabilities_BTN.gather(-1, chosen_BTK)
        if self.config.renormalise and active != []:  # without an active choice all weights are 0
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        if self.drop.probability:
            weights_BTK = leave_out(weights_BTK, self.drop.probability)
        losses, rows = dict(self.config.losses), self.new_rows()
        return Routing(self.address, self.choices, probabilities_BTN, chosen_BTK, weights_BTK, losses, scores_BTN, rows)

    def _active(self) -> list[int] | None:
        """The numbers of the choices that are not switched off; None for all."""
        if not self.inactive:
            return None
        return [number for number, name in enumerate(self.choices) if name not in self.inactive]

    def new_rows(self) -> Tensor | None:
        """The parameters of the new choices' scores."""
        if self.opening is None:
            return None
        weight, bias = (p if p is None else p[self.old : len(self.choices)] for p in self.scores.rows())
        return weight if bias is None else torch.cat((weight, bias[:, None]), dim=-1)

    @torch.no_grad()
    def open(self, share: float) -> None:
        """Let new choices be chosen with this factor on their probability, or the larger one that they have."""
        if self.opening is not None:
            self.opening.clamp_min_(share)

    def score(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.scores(self.read(hidden))  # type: ignore[no-any-return]

    def read(self, hidden: Tensor) -> Tensor:
        """What the rows of scores are multiplied with."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.norm is not None:
            hidden = self.norm(hidden.to(self.scores.weight.dtype))
        hidden = hidden.to(wide)
        return hidden if self.inner is None else ROUTER_ACTIVATIONS[self.config.activation](self.inner(hidden))

    def _choose(self, ranked_BTN: Tensor, probabilities_BTN: Tensor) -> Tensor:
        """The top k; in training some of them may be drawn instead."""
        drawn = self.config.sampled if self.training else 0
        top_BTK = ranked_BTN.topk(self.top_k - drawn, dim=-1).indices
        if not drawn:
            return top_BTK
        # Every choice may be drawn, however small its probability; one that is switched off only if no others are left.
        chances_BTN = probabilities_BTN + torch.where(probabilities_BTN > 0, 1e-6, 1e-30)
        chances_BTN = chances_BTN.scatter(-1, top_BTK, 0.0)
        drawn_RK = torch.multinomial(chances_BTN.flatten(0, 1), drawn)
        return torch.cat((top_BTK, drawn_RK.unflatten(0, top_BTK.shape[:2])), dim=-1)

    @torch.no_grad()
    def rebalance(self, load_N: Tensor) -> None:
        """Adjust the ranking after a step in which the choices had these shares of the selections."""
        if self.balance is not None:
            self.balance += self.config.balance_rate * (load_N.mean() - load_N).sign()

    def _check(self, probabilities_BTN: Tensor, where: str) -> None:
        """Look for NaN on a CPU, where that costs nothing; on a GPU the training loop looks at the usage."""
        if probabilities_BTN.is_cpu and not torch.compiler.is_compiling() and bool(probabilities_BTN.isnan().any()):
            todo = "Its weights or the stream it reads hold NaN or infinity: go back to a checkpoint before that."
            raise BraidError("the router's scores are not numbers", where or "router", todo)


def _shares(scores_BTN: Tensor, silent: Tensor, active: list[int] | None) -> Tensor:
    """The softmax of the choices' scores and the silent ones; only the choices' shares [batch, time, choices]. Where
    only some are active it is of these alone, bit for bit that of a router that has no others."""
    own = scores_BTN if active is None else scores_BTN[..., active]
    together = torch.cat((own, silent), dim=-1) if silent.shape[-1] else own
    shares = together.softmax(-1)[..., : own.shape[-1]]
    if active is None:
        return shares
    index = torch.tensor(active, dtype=torch.long, device=shares.device)
    return torch.zeros_like(scores_BTN).index_copy(-1, index, shares)


class RouterStack(nn.ModuleDict):
    """A router for each member, by its name: [member, batch, time, width] in, a routing for each member out.

    Each is a module, so that its choices are switched off, balanced and recorded under the names they have alone.
    """

    def __init__(self, config: RouterConfig, width: int, choices: Sequence[str], members: Sequence[str]):
        super().__init__({member: TopKRouter(config, width, choices) for member in members})

    def forward(self, hidden: Tensor) -> Routings:
        together = all(_is_linear(router) for router in self.values())
        return self._together(hidden) if together else self.one_by_one(hidden)

    def one_by_one(self, hidden: Tensor) -> Routings:
        """The reference: each router by itself."""
        return tuple(router(own) for router, own in zip(self.values(), hidden, strict=True))

    def _together(self, hidden: Tensor) -> Routings:
        routers: list[Any] = list(self.values())
        scores = self._scores(hidden)
        # The members are concatenated along the batch.
        one = routers[0].route(scores.flatten(0, 1), f"{routers[0].address} or that of another path")
        names = ("probabilities_BTN", "chosen_BTK", "weights_BTK", "scores_BTN")
        parts = zip(*(getattr(one, name).chunk(len(routers)) for name in names), strict=True)
        return tuple(
            replace(one, name=router.address, losses=dict(one.losses), **dict(zip(names, own, strict=True)))
            for router, own in zip(routers, parts, strict=True)
        )

    def _scores(self, hidden: Tensor) -> Tensor:
        """[member, batch, time, choice], computed as a router does by itself: in float32 or wider."""
        layers: list[Any] = [router.scores for router in self.values()]  # type: ignore[union-attr]
        with torch.autocast(hidden.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            rows, weight = hidden.flatten(1, 2).to(wide), torch.stack([layer.weight for layer in layers]).to(wide)
            if layers[0].bias is None:
                scores = torch.bmm(rows, weight.mT)
            else:
                bias = torch.stack([layer.bias for layer in layers]).to(wide)
                scores = torch.baddbmm(bias[:, None], rows, weight.mT)
        return scores.unflatten(1, hidden.shape[1:3])


def _is_linear(router: Any) -> bool:
    """Whether its scores are of one layer, and it has no state such as choices that are switched off."""
    has_state = router.inactive or router.balance is not None or router.opening is not None
    return not has_state and router.norm is None and router.inner is None and type(router.scores) is ScoreLinear


@dataclass
class ExpertsConfig:
    """The experts' names and their router."""

    names: list[str] | Choices
    """The names of the experts, or their number: they are then called expert_1, expert_2 and so on."""
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if isinstance(self.names, int):
            self.names = [f"expert_{number + 1}" for number in range(self.names)]
        if not self.names:
            raise BraidError("at least one expert is needed")
        if len(set(self.names)) < len(self.names):
            raise BraidError(f"a name is given twice: {', '.join(self.names)}")
        if self.router.top_k > len(self.names):
            raise BraidError(f"top_k is {self.router.top_k}, and there are only {len(self.names)} experts")

    @classmethod
    def from_shorthand(cls, count: Any) -> dict[str, Any]:
        if isinstance(count, bool) or not isinstance(count, int):
            raise BraidError(f"expected a number of experts or a mapping, got '{count}'")
        return {"names": count}

    @property
    def expert_names(self) -> list[str]:
        """The names."""
        assert isinstance(self.names, list)
        return self.names

    @property
    def active_share(self) -> float:
        """The share of the experts that a token uses."""
        return self.router.top_k / len(self.expert_names)


class RoutedExperts:
    """Mixed into parts that have a bank of experts and its router, which read the same stream."""

    compute: Compute
    drop_output: Dropout
    router: TopKRouter

    def mixed(self, normed: Tensor, routing: Routing, may_be_sparse: bool = True, *others: Any) -> Tensor:
        """The weighted sum of the outputs of each token's experts; `others` is what experts read beside the stream."""
        if not (may_be_sparse and is_sparse(self.compute, normed)):
            outputs_EBTW = self.drop_output(self.expert_outputs(normed, *others))
            return torch.einsum("ebtw,bte->btw", outputs_EBTW, routing.weights_BTN.to(outputs_EBTW.dtype))
        permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.router.choices))
        rows = self.drop_output(self.expert_rows(normed, permutation, *others))
        return permutation.combine(rows, routing.weights_BTK.flatten(0, 1)).unflatten(0, normed.shape[:2])

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        """What every expert makes of every token, [expert, batch, time, width]."""
        raise NotImplementedError("each bank has experts of another kind")

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        """What the chosen experts make of their tokens, in the rows of the permutation."""
        raise NotImplementedError("each bank has experts of another kind")


def set_active_share(bank: nn.Module, share: float) -> None:
    """Set the share of a bank's parameters and products that is active for a token, for the accounting of costs."""
    for module in bank.modules():
        module.active_share = share  # type: ignore[assignment]
        if isinstance(module, StackedLinear):
            module.product_share = share


def check_stackable(registry: Registry, choice: Choice) -> None:
    """Refuse a part that cannot be stacked: experts are computed as a stack."""
    if not getattr(registry[choice.kind], "stackable", False):
        raise BraidError(f"{registry.noun} '{choice.kind}' cannot be one of several experts")
