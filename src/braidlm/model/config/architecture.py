"""An architecture is data: the strict configuration that one model class builds."""

from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

from ..attention.positions import position_kinds
from ..block import BlockConfig
from ..dropout import BlockDropout, DropoutConfig
from ..errors import BraidError
from ..heads.embedding import embeddings
from ..heads.linear import heads
from ..initialisation import initialisations
from ..norms import norms
from ..stages import stage_kinds
from .inheritance import inherit
from .registry import Choice
from .strict import PartOf, decode, encode, part_of


@dataclass(kw_only=True)
class Architecture:
    """Everything about a model but its vocabulary's size."""

    stages: list[Annotated[Choice, PartOf(stage_kinds, by_key=True)]]
    """The model, from the embedding to the head."""
    width: int = 256
    """Channels of the stream at the embedding."""
    context: int = 512
    """The longest sequence it is made for."""
    embedding: Annotated[Choice, PartOf(embeddings, "tokens")] = "tokens"  # type: ignore[assignment]
    """Tokens to vectors."""
    positions: Annotated[Choice, PartOf(position_kinds, "rope")] = "rope"  # type: ignore[assignment]
    """How order is known."""
    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Before the head."""
    head: Annotated[Choice, PartOf(heads, "linear")] = "linear"  # type: ignore[assignment]
    """Vectors to scores."""
    tie_embeddings: bool = True
    """Whether the head's matrix is the embedding's."""
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Rates for embedding, attention and residual."""
    initialisation: Annotated[Choice, PartOf(initialisations, "normal")] = "normal"  # type: ignore[assignment]
    """How weights begin."""

    def __post_init__(self) -> None:
        for name in ("width", "context"):
            if getattr(self, name) < 1:
                raise BraidError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.stages:
            raise BraidError("stages: a model needs at least one stage, for example `- block`")

    @property
    def depth(self) -> int:
        """Layers that write to the stream one after another."""
        return sum(getattr(stage.options, "layers", 0) for stage in self.stages)


def read_architecture(data: dict[str, Any], where: str = "model") -> Architecture:
    """Decode an architecture as written in a recipe or a config.json.

    `block` and `dropout` at the top are what stages inherit; `norm` at the top is by default the block's.
    """
    if not isinstance(data, dict):
        return decode(Architecture, data, where)  # which says what is wrong with it
    data = dict(data)
    template = data.pop("block", None) or {}
    if not isinstance(template, dict):
        raise BraidError(f"{where}.block: expected a mapping, got '{template}'")
    template = _with_kinds(template)
    if "dropout" in data:
        rates = _with_kinds({"dropout": data["dropout"]})
        if isinstance(rates["dropout"], dict):
            rates["dropout"] = {kind: rate for kind, rate in rates["dropout"].items() if kind != "embedding"}
        template = inherit(rates, template)
    if "norm" in template:
        data.setdefault("norm", template["norm"])
    if isinstance(data.get("stages"), list):
        data["stages"] = [_inherited(stage, template) for stage in data["stages"]]
    return decode(Architecture, data, where)


def write_architecture(architecture: Architecture) -> dict[str, Any]:
    """Plain data with nothing left implicit."""
    return encode(architecture)


def _with_kinds(template: dict[str, Any]) -> dict[str, Any]:
    """A block's options as mappings that name their kinds, so that it is clear what a stage's own options refine."""
    hints = get_type_hints(BlockConfig, include_extras=True)
    full = dict(template)
    for name, value in template.items():
        part = part_of(hints.get(name))
        if part is not None and isinstance(value, (str, dict)):
            full[name] = {"kind": value} if isinstance(value, str) else {"kind": part.default, **value}
        elif name == "dropout" and isinstance(value, (int, float)):
            full[name] = BlockDropout.from_shorthand(value)
    return full


def _inherited(stage: Any, template: dict[str, Any]) -> Any:
    """A stage with the options that it does not give itself taken from the template, as its kind says."""
    mapping = {stage: {}} if isinstance(stage, str) else stage
    if not isinstance(mapping, dict) or len(mapping) != 1:
        return stage  # decoding says what is wrong with it
    ((kind, options),) = mapping.items()
    if kind not in stage_kinds:
        return stage
    inherit_in_stage = getattr(stage_kinds[kind], "inherit", None)
    if inherit_in_stage is None or not isinstance(options or {}, dict):
        return stage
    return {kind: inherit_in_stage(options or {}, template)}
