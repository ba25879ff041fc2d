"""An architecture is data: the strict configuration from which the one model class is built."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, get_type_hints

from ..attention.positions import position_kinds
from ..compression import compressions
from ..dropout import BlockDropout, DropoutConfig
from ..errors import BraidError
from ..gates import GatesConfig
from ..heads.ends import embeddings, heads
from ..initialisation import initialisations
from ..norms import norms
from ..stages import BlockConfig, stage_kinds
from .ranges import MAX_ITEMS, Length, Size
from .registry import Choice, inherit
from .strict import PartOf, decode, encode, part_of

MAX_BLOCKS = 4096
"""The most in a model, with those of parallel paths; each takes about a millisecond to build."""


@dataclass(kw_only=True)
class Architecture:
    """Everything about a model except its vocabulary's size."""

    other_keys: ClassVar = ("block", "vocab_size")
    """What stages inherit, and what a recipe has beside the architecture."""
    stages: list[Annotated[Choice, PartOf(stage_kinds, by_key=True)]]
    """The layers of the model, from the embedding to the head."""
    width: Size = 256
    """Channels of the stream at the embedding."""
    context: Length = 512
    """Context length, in tokens."""
    embedding: Annotated[Choice, PartOf(embeddings, "tokens")] = "tokens"  # type: ignore[assignment]
    """From tokens to vectors."""
    positions: Annotated[Choice, PartOf(position_kinds, "rope")] = "rope"  # type: ignore[assignment]
    """How the model knows the order of tokens."""
    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Before the head."""
    head: Annotated[Choice, PartOf(heads, "linear")] = "linear"  # type: ignore[assignment]
    """From vectors to logits."""
    tie_embeddings: bool = True
    """Whether the head's matrix is the embedding's."""
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Rates by kind."""
    initialisation: Annotated[Choice, PartOf(initialisations, "normal")] = "normal"  # type: ignore[assignment]
    """How weights are initialised."""
    compression: list[Annotated[Choice, PartOf(compressions, by_key=True)]] = field(default_factory=list)
    """Which matrices are stored in a smaller form, one form after another; `braid edit` writes it into a folder."""
    gates: GatesConfig | None = None
    """Which layers have gates, and of which kind; by default none. `braid edit gate` adds them to a trained model."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise BraidError("stages: a model needs at least one stage, for example `- block`")
        if self.blocks > MAX_BLOCKS:
            raise BraidError(f"stages: a model has at most {MAX_BLOCKS} blocks, and these have {self.blocks}")
        if self.gates is not None:
            self.gates = self.gates.for_depth(self.depth)

    @property
    def depth(self) -> int:
        """The number of layers in sequence."""
        return sum(getattr(stage.options, "layers", 0) for stage in self.stages)

    @property
    def blocks(self) -> int:
        """The number of blocks, those of parallel paths too."""
        return sum(getattr(s.options, "layers", 0) * len(getattr(s.options, "paths", "1")) for s in self.stages)


def read_architecture(data: "dict[str, Any] | Architecture", where: str = "model") -> Architecture:
    """Decode the architecture of a recipe or a config.json; one that was built in Python is checked.

    Stages inherit from `block` and `dropout` at the top; `norm` at the top is by default the block's.
    """
    if not isinstance(data, dict):
        return decode(Architecture, data, where)  # it checks what is built already, and refuses anything else
    data = dict(data)
    template = data.pop("block", None) or {}
    if not isinstance(template, dict):
        raise BraidError(f"{where}.block: expected a mapping, got '{template}'")
    template = _with_kinds(template)
    if "dropout" in data:
        rates = _with_kinds({"dropout": data["dropout"]})
        if isinstance(rates["dropout"], dict):
            outside = ("embedding", "layer")
            rates["dropout"] = {kind: rate for kind, rate in rates["dropout"].items() if kind not in outside}
        template = inherit(rates, template)
    if "norm" in template:
        data.setdefault("norm", template["norm"])
    stages = data.get("stages")
    if isinstance(stages, list) and len(stages) <= MAX_ITEMS:
        at = f"{where}.stages" if where else "stages"
        data["stages"] = [_inherited(stage, template, f"{at}[{index}]") for index, stage in enumerate(stages)]
    return decode(Architecture, data, where)


def write_architecture(architecture: Architecture) -> dict[str, Any]:
    """Encode an architecture as plain data, with all defaults spelled out."""
    return encode(architecture)


def _with_kinds(template: dict[str, Any]) -> dict[str, Any]:
    """A block's options as mappings with their kinds, so that a stage's own options can refine them."""
    hints = get_type_hints(BlockConfig, include_extras=True)
    full = dict(template)
    for name, value in template.items():
        part = part_of(hints.get(name))
        if part is not None and isinstance(value, (str, dict)):
            full[name] = {"kind": value} if isinstance(value, str) else {"kind": part.default, **value}
        elif name == "dropout" and isinstance(value, (int, float)):
            full[name] = BlockDropout.from_shorthand(value)
    return full


def _inherited(stage: Any, template: dict[str, Any], where: str) -> Any:
    """A stage with the options that it inherits from the template; its kind defines which."""
    mapping = {stage: {}} if isinstance(stage, str) else stage
    if not isinstance(mapping, dict) or len(mapping) != 1:
        return stage  # decoding raises the error
    ((kind, options),) = mapping.items()
    if kind not in stage_kinds:
        return stage
    inherit_in_stage = getattr(stage_kinds[kind], "inherit", None)
    if inherit_in_stage is None or not isinstance(options or {}, dict):
        return stage
    try:
        return {kind: inherit_in_stage(options or {}, template)}
    except BraidError as error:
        raise BraidError(f"{where}.{kind}.{error.what}", todo=error.todo) from error
