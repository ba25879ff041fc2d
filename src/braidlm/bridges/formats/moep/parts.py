"""The parts of a MoEP checkpoint: blocks, experts and routers with their tensors, and the whole that they make."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from braidlm.bridges.formats.moep.layout import Layouts

FED = ("gate and up", "gate", "up", "down")
QKV = ("query", "key", "value")


@dataclass
class Part:
    """What is called by one name: a block, an expert, a router, or an end of the model. Tensors by part and kind."""

    name: str
    tensors: dict[tuple[str, str], str] = field(default_factory=dict)

    def has(self, part: str, kind: str = "weight") -> bool:
        return (part, kind) in self.tensors


@dataclass
class Bank:
    """Parts that a router chooses from: the blocks of a parallel layer, or experts."""

    members: list[Part]
    router: Part
    hidden: int = 0
    """Inner size of gated experts, and of blocks' feed-forward parts."""

    @property
    def gated(self) -> bool:
        return any(member.has("gate") or member.has("gate and up") for member in self.members)

    def has_bias(self, *parts: str) -> bool:
        """Whether any member's layers of these names have one; a member without then lacks it."""
        return _any_bias(self.members, parts)


@dataclass
class Form:
    """The whole model, every tensor of the file in its place."""

    ends: Part
    first: list[Part]
    last: list[Part]
    shrink: Bank
    grow: Bank
    layers: list[Bank]
    vocabulary: int
    positions: int
    width: int
    narrow: int
    hidden: int
    """Of the feed-forward of wide blocks."""
    layouts: Layouts

    @property
    def wide(self) -> list[Part]:
        return [*self.first, *self.last]

    @property
    def blocks(self) -> list[Part]:
        return [*self.wide, *(block for layer in self.layers for block in layer.members)]

    @property
    def gated(self) -> bool:
        """Whether feed-forward parts are."""
        return self.layers[0].gated

    @property
    def norm_bias(self) -> bool:
        return _any_bias([self.ends, *self.blocks], ("norm 1", "norm 2", "last norm"))

    @property
    def attention_bias(self) -> bool:
        return _any_bias(self.blocks, ("qkv", *QKV, "attention out"))

    @property
    def feed_bias(self) -> bool:
        return _any_bias(self.blocks, FED)

    @property
    def subject(self) -> str:
        """The model in words."""
        layers, paths = len(self.layers), len(self.layers[0].members)
        kind = "MoEP-SwiGLU" if self.gated else "MoEP"
        return f"a {kind} of {layers} layers of {paths} blocks, {self.width} and {self.narrow} wide"

    @property
    def sizes(self) -> dict[str, set[int]]:
        """What a configuration may say about each of its sizes."""
        layers, paths = len(self.layers), len(self.layers[0].members)
        return {
            "vocabulary": {self.vocabulary},
            "width": {self.width},
            "narrow width": {self.narrow},
            "positions": {self.positions},
            "layers": {layers, layers + len(self.wide)},
            "parallel layers": {layers},
            "blocks of a layer": {paths},
            "experts": {len(self.shrink.members), len(self.grow.members), paths},
            "feed-forward": {self.hidden, self.layers[0].hidden},
        }


def _any_bias(members: Iterable[Part], parts: Iterable[str]) -> bool:
    return any(member.has(part, "bias") for member in members for part in parts)
