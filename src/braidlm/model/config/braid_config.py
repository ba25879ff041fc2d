"""An architecture is data: its strict configuration, and the one that transformers saves and loads with it."""

from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from transformers import PretrainedConfig

from ..attention.backend import PLAIN
from ..attention.positions import position_kinds
from ..bundle import CODE_FILE, bundle
from ..compression import compressions
from ..dropout import BlockDropout, DropoutConfig
from ..errors import BraidError
from ..gates import GatesConfig
from ..heads.ends import embeddings, heads
from ..initialisation import initialisations
from ..norms import norms
from ..stages import BlockConfig, stage_kinds
from .ranges import MAX_ITEMS, Length, Size, VocabularySize
from .registry import Choice, inherit
from .strict import PartOf, decode, encode, part_of, type_hints

MAX_BLOCKS = 4096  # the most in a model, with those of parallel paths; each takes about a millisecond to build


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
    """Decode the architecture of a recipe or a config.json; one that was built in Python is checked. Stages inherit
    from `block` and `dropout` at the top; `norm` at the top is by default the block's."""
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


def _with_kinds(template: dict[str, Any]) -> dict[str, Any]:
    """A block's options as mappings with their kinds, so that a stage's own options can refine them."""
    hints = type_hints(BlockConfig)
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


CLASSES = {
    "AutoConfig": "BraidConfig",
    "AutoModel": "BraidModel",
    "AutoModelForCausalLM": "BraidForCausalLM",
    "AutoModelForSequenceClassification": "BraidForSequenceClassification",
}
TOKEN_ID_TYPES: dict[str, Any] = {
    "bos_token_id": int | list[int] | None,
    "eos_token_id": int | list[int] | None,  # a model may end texts in several ways
    "pad_token_id": int | None,
}


@dataclass
class ServedAttention:
    """The layers that another library, such as vLLM, has for attention: it reads them before there is a model."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: list[int | None]  # of each layer


SERVED = "served_attention"
"""The key of these in config.json, which a model writes; without it no other library can serve the model."""


class BraidConfig(PretrainedConfig):
    """`architecture` defines the model; other attributes have the names that transformers and other tools read."""

    model_type = "braid"
    decoded: Architecture

    def __init__(self, architecture: Architecture | dict | None = None, vocab_size: int = 256, **kwargs: Any):
        self.architecture = architecture or {"stages": ["block"]}
        self.vocab_size = decode(VocabularySize, vocab_size, "vocab_size")
        attentions = [s.options.attention for s in self.decoded.stages if getattr(s.options, "attention", None)]
        self._heads = next((getattr(part.options, "heads", 1) for part in attentions), 1)
        served = kwargs.pop(SERVED, None)
        self.serve_by(None if served is None else decode(ServedAttention, served, SERVED))
        derived = {
            "hidden_size": self.decoded.width,
            "max_position_embeddings": self.decoded.context,
            "num_hidden_layers": self.decoded.depth,
            "num_attention_heads": self.num_attention_heads,
        }
        for name, value in derived.items():
            kwargs.pop(name, None)
            setattr(self, name, value)
        kwargs["tie_word_embeddings"] = self.decoded.tie_embeddings
        kwargs.pop("auto_map", None)
        self.use_cache = kwargs.pop("use_cache", True)
        self.paths = decode(list[str] | None, kwargs.pop("paths", None), "paths")
        """The active paths; None for all. `from_pretrained(folder, paths=["stories"])` sets it."""
        self.without = decode(list[str], kwargs.pop("without", None) or [], "without")
        """Modules that are switched off: `from_pretrained(folder, without=["german*"])`. It is not saved."""
        self.frozen = decode(list[str], kwargs.pop("frozen", None) or [], "frozen")
        """Parts that training does not change."""
        for name, kind in TOKEN_ID_TYPES.items():  # transformers expects these
            setattr(self, name, decode(kind, kwargs.pop(name, None), name))
        super().__init__(**kwargs)
        module = CODE_FILE.removesuffix(".py")
        self.auto_map = {auto: f"{module}.{name}" for auto, name in CLASSES.items()}

    def serve_by(self, layers: ServedAttention | None) -> None:
        """Have the heads, key heads and their size of the layers that another library has for attention."""
        self.served_attention = layers
        self.num_attention_heads = self._heads if layers is None else layers.heads
        if layers is not None:
            self.num_key_value_heads, self.head_dim = layers.kv_heads, layers.head_dim

    @property
    def num_hidden_layers(self) -> int:
        """The layers of the model, or those that another library has for attention while it computes that."""
        return self.last_layer if self._served is None else len(self._served)

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        self.__dict__["num_hidden_layers"] = value

    @property
    def last_layer(self) -> int:
        """The layer that passes end after: transformers sets `num_hidden_layers` for `assistant_early_exit`."""
        return self.__dict__["num_hidden_layers"]  # type: ignore[no-any-return]

    @property
    def layer_types(self) -> list[str]:
        """The kind of every layer that another library has for attention; there are none otherwise."""
        if self._served is None:
            raise AttributeError("layer_types")
        return ["full_attention" if window is None else "sliding_attention" for window in self._served]

    @property
    def sliding_window(self) -> int:
        """The window of the layers with `sliding_attention`."""
        if not any(self._served or ()):
            raise AttributeError("sliding_window")
        return max(window for window in self._served or () if window)

    @property
    def _served(self) -> list[int | None] | None:
        """The windows, while another library computes attention."""
        plain = getattr(self, "_attn_implementation", None) in PLAIN
        layers = self.__dict__.get(SERVED)
        return None if plain or layers is None else layers.windows

    @property
    def architecture(self) -> dict[str, Any]:
        """The architecture as plain data with all defaults spelled out; `decoded` is the same, typed."""
        return encode(self.decoded)

    @architecture.setter
    def architecture(self, value: Architecture | dict[str, Any]) -> None:
        self.decoded = read_architecture(value)

    def to_dict(self) -> dict[str, Any]:
        plain = copy(self)
        del plain.__dict__["decoded"]  # transformers would copy it in full, for `encode` to make plain data of it
        data = super(BraidConfig, plain).to_dict()
        data["architecture"] = encode(self.decoded)
        data["num_attention_heads"] = data.pop("_heads")
        data[SERVED] = None if self.served_attention is None else encode(self.served_attention)
        for name in ("without", "num_key_value_heads", "head_dim"):
            data.pop(name, None)
        return data

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the configuration and the code; saving a model calls this method too."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / CODE_FILE).write_text(bundle(), encoding="utf-8")
