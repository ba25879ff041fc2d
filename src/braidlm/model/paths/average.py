"""Heads of models side by side: each path has logits of its own, and what is averaged is their probabilities.

The logits that these heads return are the logarithms of the averaged probabilities, so that their softmax is the
average itself, and whoever samples, scores or distils needs to know nothing of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Range, Size
from ..config.registry import Choice
from ..config.strict import PartOf
from ..errors import BraidError
from ..exporting import is_exporting, is_recorded
from ..heads.ends import LinearHead, heads
from ..heads.losses import IGNORED, NO_SHARE, best_alone, next_token_loss
from ..norms import norms
from ..routing.stacked import fill_zeros
from ..span import Span, Stream, TextPass
from .joins import Concat
from .parallel import ParallelLayer, PathConfig, Settling


@dataclass
class PathPart:
    """One path's part of the stream."""

    name: str
    """Name of the path."""
    width: Size
    """Channels of its part."""

    def __post_init__(self) -> None:
        PathConfig(name=self.name)  # checks it


@dataclass
class PathNorm(PathPart):
    """The norm of one path."""

    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """The kind of norm."""


@norms.register("per_path")
class PerPathNorm(nn.Module):
    """A norm of its own for each path's part of the stream, where paths stay apart up to the head (`average`)."""

    @dataclass
    class Config:
        paths: list[PathNorm]
        """The paths in the order of their parts of the stream: {name, width, norm}."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        self.widths = widths_of(config.paths, width)
        self.paths = nn.ModuleDict({path.name: norms.build(path.norm, path.width) for path in config.paths})

    def forward(self, hidden: Tensor) -> Tensor:
        parts = zip(self.paths.values(), hidden.split(self.widths, dim=-1), strict=True)
        return torch.cat([norm(part) for norm, part in parts], dim=-1)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self], []


def widths_of(paths: Sequence[PathPart], width: int) -> list[int]:
    """The widths of all parts, which must have names of their own and be the whole stream."""
    if len({path.name for path in paths}) < len(paths):
        raise BraidError("paths: a name is listed twice")
    widths = [path.width for path in paths]
    if sum(widths) != width:
        parts = " + ".join(map(str, widths)) or "none"
        raise BraidError(f"widths do not add up: the paths have {parts} = {sum(widths)} and the stream has {width}")
    return widths


@heads.register("average")
class AverageHead(LinearHead):
    """Every path predicts the next token by itself, from its own part of the stream; the probabilities are averaged."""

    composed = {}  # a model with this head is made of whole models, and is no path of another
    weighs_tokens = False  # whether the shares of the paths are others from token to token

    @dataclass(kw_only=True)
    class Config(LinearHead.Config):
        paths: list[PathPart]
        """The paths in the order of their parts of the stream: {name, width}."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        if config.bias:
            self.bias = nn.Parameter(torch.empty(len(config.paths), vocab_size))
        self.names, self.widths = tuple(path.name for path in config.paths), widths_of(config.paths, width)
        self.active = list(range(len(self.names)))  # the indices of the paths that are averaged

    def use_paths(self, active: frozenset[str]) -> None:
        """An inactive path has no share of the average."""
        self.active = [index for index, name in enumerate(self.names) if name in active]

    def of_active(self, values: Tensor) -> Tensor:
        """The values [..., path] of the active paths alone."""
        # Not by a list of indices: a GPU would have to copy it, which no graph can hold.
        return torch.stack([values[..., index] for index in self.active], dim=-1)

    def path_routers(self) -> tuple[()]:
        """No router chooses among the paths."""
        return ()

    def forward(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        """The logarithms of the averaged probabilities [..., vocabulary]."""
        weights = self.log_weights(hidden, evidence).unbind(-1)
        pairs = zip(self.path_logits(hidden), weights, strict=True)
        return reduce(torch.logaddexp, (logits.log_softmax(-1) + weight[..., None] for logits, weight in pairs))

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        """The logarithm of each active path's share of the average, [path] or [..., path]."""
        return torch.zeros(len(self.active), dtype=_wide(hidden), device=hidden.device).log_softmax(-1)

    def path_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The logits [..., vocabulary] of each active path."""
        parts = hidden.split(self.widths, dim=-1)
        for index in self.active:
            yield self.logits_of(index, parts[index])

    def logits_of(self, index: int, part: Tensor) -> Tensor:
        """The logits [..., vocabulary] of one path, from its part of the stream."""
        bias, matrix = None if self.bias is None else self.bias[index], self.weight.split(self.widths, dim=1)[index]
        return F.linear(part, matrix, bias).to(_wide(part))

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        count: Tensor | float | None = None,
        logits: Tensor | None = None,
        evidence: Tensor | None = None,
    ) -> Tensor:
        """In training only what each path gives to the targets is averaged, which takes less memory."""
        if logits is not None or not torch.is_grad_enabled():
            return next_token_loss(self(hidden, evidence) if logits is None else logits, targets, count)
        of_paths, real = torch.stack(list(self._log_likelihoods(hidden, targets)), dim=-1), targets != IGNORED
        averaged = (of_paths + self.log_weights(hidden, evidence)).logsumexp(-1)
        return -torch.where(real, averaged, 0.0).sum() / (real.sum() if count is None else count)

    def _log_likelihoods(self, hidden: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """The log-probabilities of the targets, in their shape, by each active path; 0 for ignored ones."""
        for logits in self.path_logits(hidden):
            if is_exporting():  # ONNX has no such loss that is not summed; a head that reads the text judges by it
                yield logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
                continue
            losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
            yield -losses.view_as(targets)

    def paths_and_joins(self) -> tuple[list[Any], list[nn.Module]]:
        return [self], []


@heads.register("mixture")
class MixtureHead(AverageHead):
    """An average with learned shares: a number for each path, or with `per_token` a router that reads the stream."""

    @dataclass(kw_only=True)
    class Config(AverageHead.Config):
        per_token: bool = False
        """Whether a linear router reads the stream and changes the shares from token to token."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.mixture = MixtureWeights(width if config.per_token else None, len(config.paths))
        self.weighs_tokens = config.per_token

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        return self.of_active(self.mixture(hidden)).to(_wide(hidden)).log_softmax(-1)

    def paths_and_joins(self) -> tuple[list[Any], list[nn.Module]]:
        return [parameter for parameter in (self.weight, self.bias) if parameter is not None], [self.mixture]


class MixtureWeights(nn.Module):
    """The logits of the paths' shares; they begin equal."""

    def __init__(self, width: int | None, paths: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(paths))
        self.router = None if width is None else nn.Linear(width, paths, bias=False)
        if self.router is not None:
            self.router.fill = fill_zeros  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.bias if self.router is None else self.router(hidden) + self.bias


def _wide(hidden: Tensor) -> torch.dtype:
    """Probabilities are computed in float32, or in float64."""
    return torch.promote_types(hidden.dtype, torch.float32)


ROWS = 4096  # how many tokens are judged at once, which bounds the memory of their logits


@heads.register("posterior")
class PosteriorHead(AverageHead):
    """An average in which each path's share is its posterior probability, given the text so far. Nothing is learned.

    What attention does with values, this head does with evidence: every token says how probable each path found it,
    and the shares after a token are the softmax of what all tokens that it sees have said. So masks, padding, trees of
    texts and caches mean here what they mean to attention.
    """

    @dataclass(kw_only=True)
    class Config(AverageHead.Config):
        window: Annotated[int, Range(at_least=2)] | None = None
        """How many tokens back the paths are judged by; by default the whole text."""
        settle: Annotated[int, Range(at_least=2)] | None = None
        """After how many tokens of a text the path with the largest share goes on alone; by default none does. Where
        whole texts are read, without a cache and padding, the others are then computed for the beginning only."""

        def __post_init__(self) -> None:
            if self.window is not None and self.settle is not None:
                what = "window: nothing is judged after the beginning of a text, where one path goes on alone (settle)"
                raise BraidError(what, todo="Leave out one of them.")

    weighs_tokens = True

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.window, self.settle = config.window, config.settle
        self.settling = None if config.settle is None else Settling(config.settle, len(config.paths))
        self.are_apart = False  # whether no path reads what another writes; the model says so
        self.cache_shapes = [(1, sum(self.widths)), (1, len(self.names))]
        """A layer for the stream of every token, and one for what the token says of the paths."""

    def read(self, hidden: Tensor, span: Span) -> dict[str, Tensor]:
        """The logarithm of each path's share after each token, [batch, time, path], but for a constant."""
        if span.tokens is None:
            raise BraidError("the head 'posterior' judges its paths by the text, and only embeddings are given")
        mask, time = span.masks[self.window], hidden.shape[1]
        seen = _cached(hidden, span, self.first_slot)
        before, is_there = _before(hidden, seen, mask)
        judged = self._judged(time, seen.shape[1] - time) if mask is None else time
        said = self.judge(before[:, :judged], is_there[:, :judged], span.tokens[:, :judged])
        said = said if judged == time else F.pad(said, (0, 0, 0, time - judged))
        all_said = _cached(said, span, self.first_slot + 1)
        if mask is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                heard = self._first(mask[:, 0]).to(said.dtype) @ all_said
        else:
            whole = all_said.shape[1] == time
            heard = said.cumsum(1) if whole else all_said[:, : self.settle].sum(1, keepdim=True)
        heard = heard - self.of_active(heard).amax(-1, keepdim=True)
        if self.settle is not None:
            keys = torch.arange(seen.shape[1] - time, seen.shape[1], device=hidden.device) + 1
            keys = keys if mask is None else mask[:, 0].sum(-1)
            heard = torch.where(
                (keys >= self.settle)[..., None], self._best_alone(heard), heard.clamp_min(NO_SHARE / 4)
            )
        return {"evidence": heard.to(hidden.dtype)}

    def _judged(self, time: int, past: int) -> int:
        """How many of `time` tokens, which so many are before, the paths are judged by."""
        return time if self.settle is None else min(time, max(self.settle - past, 0))

    def _first(self, seen: Tensor) -> Tensor:
        """Of the tokens that each one sees, those that the paths are judged by."""
        return seen if self.settle is None else seen & (seen.cumsum(-1) <= self.settle)

    def _best_alone(self, heard: Tensor) -> Tensor:
        """All of the share for the active path that has the largest."""
        nothing = torch.full_like(heard[..., 0], -torch.inf)  # less than any path has heard
        parts = [part if index in self.active else nothing for index, part in enumerate(heard.unbind(-1))]
        return best_alone(torch.stack(parts, dim=-1))

    def run(self, stream: Stream, embedded: Tensor, span: Span) -> TextPass:
        """The beginning of all texts with all paths, and then each text with the one that it has settled on."""
        if not self._goes_on_alone(embedded, span):
            return super().run(stream, embedded, span)
        assert self.settle is not None
        start = self.settle - 1  # the token at which a text settles is predicted by all
        beginning, _ = stream(embedded[:, :start], span.beginning(start))
        hidden = F.pad(beginning, (0, 0, 0, span.time - start))
        read = self.read(hidden, span)
        for index in self.active:
            rows = (read["evidence"][:, -1, index] == 0).nonzero()[:, 0]
            if len(rows):
                alone, _ = stream(embedded[rows], replace(span, paths=frozenset([self.names[index]])))
                hidden[rows, start:] = alone[:, start:].to(hidden.dtype)
        return TextPass(hidden, (), read)

    def _goes_on_alone(self, embedded: Tensor, span: Span) -> bool:
        """Whether the pass is over whole texts, of which one path alone can be computed, and that is less."""
        if not self.are_apart or len(self.active) < 2 or self.settling is None or not self.settling.saves(span.time):
            return False
        plain = span.is_same_for_all_texts and span.masks[self.window] is None and span.backend is None
        shown = span.record is not None and span.record.hidden_states is not None
        kept = self.training or torch.is_grad_enabled() or is_recorded(embedded)
        return plain and not shown and not kept and span.tokens is not None

    def product_share_at(self, length: int) -> float:
        """The matrix is used twice, for what follows a token and to judge by what did follow: all of it in the
        beginning of a text, and where that settles the part of one path."""
        beginning = length if self.settle is None else min(length, self.settle - 1)
        return (2 * beginning + (length - beginning) / len(self.names)) / length

    def forward(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        """The logarithms of the averaged probabilities [..., vocabulary]; of a path without a share nothing is computed
        where a text has settled."""
        if self.settle is None or evidence is None or torch.is_grad_enabled() or is_recorded(hidden):
            return super().forward(hidden, evidence)
        parts, has_share = hidden.split(self.widths, dim=-1), self.of_active(evidence) > NO_SHARE / 2
        averaged = hidden.new_empty((*hidden.shape[:-1], len(self.weight)), dtype=_wide(hidden))
        together = has_share.all(-1)
        averaged[together] = super().forward(hidden[together], evidence[together])
        for index, alone in zip(self.active, has_share.unbind(-1), strict=True):
            rows = alone & ~together
            averaged[rows] = self.logits_of(index, parts[index][rows]).log_softmax(-1)
        return averaged

    def judge(self, before: Tensor, is_there: Tensor, tokens: Tensor) -> Tensor:
        """[batch, time, path]: by how much less probable each active path found a token than the best, in logarithms.
        `before` is the stream at the token before it; a token without one says 0. Only the differences of paths count,
        and half precision would lose them in sums over long texts."""
        rows = before.flatten(0, 1), tokens.flatten()
        # The number of parts would depend on the length.
        parts = [rows] if is_exporting() else zip(*(each.split(ROWS) for each in rows), strict=True)
        said = torch.cat([torch.stack(list(self._log_likelihoods(*pair)), dim=-1) for pair in parts])
        said = said.unflatten(0, tokens.shape)
        said = torch.where(is_there[..., None], said - said.amax(-1, keepdim=True), 0.0)
        of_paths = dict(zip(self.active, said.unbind(-1), strict=True))
        nothing = torch.zeros_like(said[..., 0])
        return torch.stack([of_paths.get(index, nothing) for index in range(len(self.names))], dim=-1)

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        if evidence is None:  # vectors without a text, of which all paths know as much
            return super().log_weights(hidden)
        return self.of_active(evidence).to(_wide(hidden)).log_softmax(-1)


def stay_apart(stages: Iterable[nn.Module], norm: nn.Module, head: AverageHead) -> bool:
    """Whether each path of a head reads and writes its own part of the stream in every layer, and has its own norm."""
    layers = [layer for stage in stages for layer in getattr(stage, "layers", [None])]
    return isinstance(norm, PerPathNorm) and all(
        type(layer) is ParallelLayer
        and isinstance(layer.join, Concat)
        and (layer.names, layer.widths) == (head.names, tuple(head.widths))
        and layer.can_leave_out
        for layer in layers
    )


def _cached(new: Tensor, span: Span, slot: int) -> Tensor:
    """[batch, keys, channels]: what a layer of the cache has stored, with `new` [batch, time, channels] at its end."""
    if span.cache is None:
        return new
    return span.cache.update(new[:, None], new[:, None], slot)[0][:, 0].to(new.dtype)


def _before(hidden: Tensor, seen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stream [batch, time, width] at the token before each one, the last but one that it sees, and where it is."""
    batch, time, _ = hidden.shape
    if mask is None:
        past = seen.shape[1] - time
        before = F.pad(hidden[:, :-1], (0, 0, 1, 0)) if past == 0 else seen[:, past - 1 : -1]
        return before, (torch.arange(past, past + time, device=hidden.device) > 0).expand(batch, -1)
    numbers = mask[:, 0] * torch.arange(1, seen.shape[1] + 1, device=hidden.device)
    own = numbers.amax(-1, keepdim=True)
    number = torch.where(numbers == own, 0, numbers).amax(-1).expand(batch, -1)
    index = (number - 1).clamp_min(0)[..., None].expand(-1, -1, seen.shape[-1])
    return seen.gather(1, index), number > 0
