"""The classes of parts that have kernels, and the options that these honour. A kernel opts in, by exact class.

An option that a kernel does not know can never be ignored: a part that has it set is refused. Nothing here needs
Triton.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from braidlm.model.attention.mixture_of_heads import MixtureOfHeads
from braidlm.model.attention.positions import LearnedPositions, NoPositions, RotaryPositions
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.attention.stick_breaking import StickBreaking, StickBreakingAttention
from braidlm.model.block import Block
from braidlm.model.config.registry import Choice
from braidlm.model.dropout import Dropout
from braidlm.model.feed.feeds import GEGLU, MLP, SwiGLU
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.gates import GatedLayer
from braidlm.model.heads.embedding import TokenEmbedding
from braidlm.model.heads.linear import LinearHead
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.norms import LayerNorm, RMSNorm
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import ExpertProjection, ProjectStage
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.router import ScoreLinear, TopKRouter
from braidlm.model.routing.stacked import StackedLinear

Reject = Callable[[Any, Any], str | None]
"""From a part and the BraidModel around it to a reason against the kernels that no option's name tells."""


@dataclass(frozen=True)
class Lowering:
    """What the kernels of one class of parts can do."""

    honours: frozenset[str]
    """The options that they implement; those of a nested configuration with dots."""
    reject: Reject | None = None


LOWERINGS: dict[type[nn.Module], Lowering] = {}
"""By exact class: a subclass may compute something else."""


NO_OPTIONS = (nn.Linear, ScoreLinear, StackedLinear, nn.ModuleList, nn.ModuleDict, Dropout)
"""Classes inside a part that have no options of their own; an adapter or a parametrisation replaces them by another."""
DROPS = ("", "feed", "expert_outputs", "experts")
"""The kinds of dropout that kernels know, inside the parts that have them."""

ROUTER = frozenset({"top_k", "renormalise", "hidden", "activation", "bias", "new", "losses", "balance_rate", "compute"})
ATTENTION = frozenset({"heads", "kv_heads", "head_dim", "bias", "out_bias", "window"})
BLOCK = frozenset(
    {"norm", "attention", "feed", "layers", "share", "capacity", "every"}
    | {"dropout.attention", "dropout.residual", "dropout.feed", "dropout.expert_outputs", "dropout.experts"}
)
EXPERTS = frozenset({"experts", "experts.names"} | {f"experts.router.{option}" for option in ROUTER})


def lowers(part: type[nn.Module], honours: Iterable[str] = (), reject: Reject | None = None) -> None:
    """Declare that there are kernels for a class."""
    LOWERINGS[part] = Lowering(frozenset(honours), reject)


def refusal(part: nn.Module, body: Any) -> str | None:
    """Why a part of a BraidModel runs its plain forward; None where kernels serve it."""
    lowering = LOWERINGS.get(type(part))
    if isinstance(part, GatedLayer):
        return "it has a gate"
    if lowering is None:
        return f"{type(part).__name__} has no kernels"
    for option in set_options(part.config):
        if option not in lowering.honours:
            return f"its kernels do not know the option {option}"
    # The parts of a block are lowered or refused one by one.
    children: Iterable[tuple[str, nn.Module]] = [("", part)] if isinstance(part, Block) else part.named_modules()
    for name, child in children:
        if type(child) not in LOWERINGS and type(child) not in NO_OPTIONS:
            return f"{name} is a {type(child).__name__}, which has no kernels"
        if isinstance(child, Dropout) and child.rate and child.kind not in DROPS:
            return f"its kernels do not know the option dropout.{child.kind}"
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{name or 'it'} has a forward hook"
    return lowering.reject(part, body) if lowering.reject is not None else None


def set_options(config: Any, prefix: str = "") -> Iterator[str]:
    """The options of a configuration that do not have their default, and those without one."""
    for field in fields(config):
        value, default, name = getattr(config, field.name), _default(field), prefix + field.name
        if is_dataclass(value) and not isinstance(value, Choice):
            if not is_dataclass(default):
                yield name
            yield from set_options(value, f"{name}.")
        elif value != default:
            yield name


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def first(*reasons: str | None) -> str | None:
    """The first reason that there is."""
    return next((reason for reason in reasons if reason is not None), None)


def _unless(condition: bool, reason: str) -> str | None:
    return None if condition else reason


def _rejects_attention(part: SoftmaxAttention, body: Any) -> str | None:
    return _rejects_positions(body)


def _rejects_positions(body: Any) -> str | None:
    reason = refusal(body.positions, body)
    return reason and f"positions: {reason}"


def _rejects_rotation(body: Any) -> str | None:
    """Routed queries are in sorted rows, which no kernel rotates."""
    rotates = isinstance(body.positions, RotaryPositions)
    return first(_rejects_positions(body), _unless(not rotates, "no kernel rotates the queries of routed tokens"))


def _rejects_stick_breaking(part: Any, body: Any) -> str | None:
    rotates = isinstance(body.positions, RotaryPositions)
    return first(
        _rejects_positions(body),
        _unless(not rotates, "its kernels do not rotate queries and keys"),
        _unless(part.window is None, "its kernels do not know the option window"),
        _unless(not part.drop.rate, "its kernels do not drop attention weights"),
    )


def _rejects_mixture_of_heads(part: MixtureOfHeads, body: Any) -> str | None:
    return first(
        _rejects_router(part.router, body),
        _rejects_rotation(body),
        _rejects_stick_breaking(part, body) if isinstance(part.rule, StickBreaking) else None,
    )


def _rejects_attention_bank(bank: Any) -> str | None:
    dim = bank.head_dim
    return first(
        _unless(type(bank) is SoftmaxAttention, f"{type(bank).__name__} has no kernels for a bank of attentions"),
        _unless(bank.out is not None, "its kernels need out_projection"),
        _unless(bank.kv_heads == bank.heads, "its kernels need as many kv_heads as heads"),
        _unless(dim >= 16 and dim & (dim - 1) == 0, "its kernels need a head_dim that is a power of two from 16 on"),
    )


def _rejects_frozen_rows(part: nn.Module) -> str | None:
    """Weights that are folded have a gradient as a whole."""
    partly = any(getattr(module, "trained_rows", None) is not None for module in part.modules())
    return _unless(not partly, "it is frozen in part")


def _rejects_router(router: TopKRouter, body: Any) -> str | None:
    return first(
        _unless(not router.inactive, "some of its choices are inactive"),
        _unless(router.opening is None or router.balance is None, "new choices are ranked with a balance"),
        _unless(router.config.compute != "dense", "compute is dense"),
    )


def _rejects_routed_feed(part: RoutedFeed, body: Any) -> str | None:
    return first(_rejects_router(part.router, body), _bank_refusal(part.bank))


def _rejects_routed_attention(part: RoutedAttention, body: Any) -> str | None:
    bank = part.bank
    return first(
        _rejects_router(part.router, body),
        _rejects_frozen_rows(part),
        _bank_refusal(bank),
        _rejects_attention_bank(bank),
        _rejects_rotation(body),
    )


def _bank_refusal(bank: Any) -> str | None:
    """Of a bank's own options: those of its experts are the routed part's."""
    lowering = LOWERINGS.get(type(bank))
    if lowering is None:
        return f"{type(bank).__name__} has no kernels"
    options = (option for option in set_options(bank.config) if option.split(".")[0] != "experts")
    unknown = next((option for option in options if option not in lowering.honours), None)
    return unknown and f"its kernels do not know the option {unknown}"


def _rejects_depths(layer: MixtureOfDepths, body: Any) -> str | None:
    """All of its block is lowered, or none of it."""
    block: Any = layer.block
    parts = (block, block.attention_norm, block.attention, block.feed_norm, block.feed)
    window = getattr(block.attention, "window", None)
    return first(
        *(refusal(part, body) for part in parts),
        _rejects_router(layer.router, body),
        _unless(window is None, "its kernels do not know where a window begins among some tokens"),
    )


def _rejects_projection(stage: ProjectStage, body: Any) -> str | None:
    if stage.experts is None:
        return "a projection without experts is one product already"
    return _rejects_router(stage.experts.router, body)


def _rejects_parallel(layer: ParallelLayer, body: Any) -> str | None:
    """Kernels serve routed blocks of one shape at the stream's own width."""
    join: Any = layer.join
    reason = refusal(join, body)
    if reason is not None:
        return f"join: {reason}"
    if layer.stack is None or layer.enter is not None or len(join.leave) or join.out is not None:
        return "its paths are not of one shape at the stream's width"
    if len(layer.stack) != 1:
        return "its paths have more than one block in a layer"
    block: Any = layer.stack[0]
    return first(
        _rejects_frozen_rows(layer),
        _bank_refusal(block.attention_norm),
        _bank_refusal(block.attention),
        _bank_refusal(block.feed),
        _rejects_attention_bank(block.attention),
        _rejects_rotation(body),
    )


lowers(TokenEmbedding)
lowers(NoPositions)
lowers(LearnedPositions)
lowers(RotaryPositions, {"theta", "pairs", "scaling"})
lowers(LayerNorm, {"eps", "bias"})
lowers(RMSNorm, {"eps"})
lowers(SoftmaxAttention, ATTENTION | {"out_projection"}, _rejects_attention)
lowers(StickBreakingAttention, ATTENTION | {"out_projection", "current", "rest"}, _rejects_stick_breaking)
lowers(MLP, {"hidden", "activation", "bias"})
lowers(SwiGLU, {"hidden", "bias"})
lowers(GEGLU, {"hidden", "bias"})
lowers(
    Block,
    BLOCK,
    lambda block, body: _unless(type(block.drop) is Dropout, f"drop is a {type(block.drop).__name__}"),
)
lowers(MixtureOfDepths, BLOCK, _rejects_depths)
lowers(TopKRouter, ROUTER, _rejects_router)
lowers(RoutedFeed, EXPERTS | {"experts.shared", "hidden", "activation", "bias"}, _rejects_routed_feed)
lowers(RoutedAttention, EXPERTS | ATTENTION, _rejects_routed_attention)
lowers(
    MixtureOfHeads,
    EXPERTS | ATTENTION | {"experts.keys", "experts.kv_bias", "current", "rest"},
    _rejects_mixture_of_heads,
)
lowers(ExpertProjection, {"names", "kind", "hidden"} | {f"router.{option}" for option in ROUTER})
lowers(ProjectStage, EXPERTS | {"to", "bias", "experts.kind", "experts.hidden"}, _rejects_projection)
lowers(Routed, ROUTER, lambda join, body: _rejects_router(join.router, body))
lowers(ParallelLayer, {"paths", "layers", "join", "to", "share", "stacked"}, _rejects_parallel)
lowers(LinearHead)
