"""Heads of models side by side: each path has logits of its own, and what is averaged is their probabilities.

The logits that these heads return are the logarithms of the averaged probabilities, so that their softmax is the
average itself, and whoever samples, scores or distils needs to know nothing of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Range, Size
from ..config.registry import Choice
from ..config.strict import PartOf
from ..errors import BraidError
from ..exporting import is_exporting
from ..heads.ends import LinearHead, heads
from ..heads.losses import IGNORED, next_token_loss
from ..norms import norms
from ..routing.stacked import fill_zeros
from ..span import Span
from .parallel import PathConfig


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
        parts, matrices = hidden.split(self.widths, dim=-1), self.weight.split(self.widths, dim=1)
        for index in self.active:
            bias = None if self.bias is None else self.bias[index]
            yield F.linear(parts[index], matrices[index], bias).to(_wide(hidden))

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

    weighs_tokens = True
    product_share = 2.0  # the matrix is used twice: for what follows a token, and to judge by what did follow

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.window = config.window
        self.cache_shapes = [(1, sum(self.widths)), (1, len(self.names))]
        """A layer for the stream of every token, and one for what the token says of the paths."""

    def read(self, hidden: Tensor, span: Span) -> dict[str, Tensor]:
        """The logarithm of each path's share after each token, [batch, time, path], but for a constant."""
        if span.tokens is None:
            raise BraidError("the head 'posterior' judges its paths by the text, and only embeddings are given")
        mask = span.masks[self.window]
        seen = _cached(hidden, span, self.first_slot)
        said = self.judge(*_before(hidden, seen, mask), span.tokens)
        all_said = _cached(said, span, self.first_slot + 1)
        if mask is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                heard = mask[:, 0].to(said.dtype) @ all_said
        else:
            heard = said.cumsum(1) if all_said.shape[1] == said.shape[1] else all_said.sum(1, keepdim=True)
        heard = heard - self.of_active(heard).amax(-1, keepdim=True)
        return {"evidence": heard.to(hidden.dtype)}

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
