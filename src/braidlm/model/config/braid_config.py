"""The configuration that transformers saves and loads; its architecture is decoded strictly."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ..bundle import CODE_FILE, bundle
from .architecture import Architecture, read_architecture, write_architecture
from .ranges import VocabularySize
from .strict import decode

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


class BraidConfig(PretrainedConfig):
    """`architecture` defines the model; other attributes have the names that transformers and other tools read."""

    model_type = "braid"
    decoded: Architecture

    def __init__(self, architecture: Architecture | dict | None = None, vocab_size: int = 256, **kwargs: Any):
        self.architecture = architecture or {"stages": ["block"]}
        self.vocab_size = decode(VocabularySize, vocab_size, "vocab_size")
        derived = {
            "hidden_size": self.decoded.width,
            "max_position_embeddings": self.decoded.context,
            "num_hidden_layers": self.decoded.depth,
            "num_attention_heads": _first_heads(self.decoded),
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

    @property
    def architecture(self) -> dict[str, Any]:
        """The architecture as plain data with all defaults spelled out; `decoded` is the same, typed."""
        return write_architecture(self.decoded)

    @architecture.setter
    def architecture(self, value: Architecture | dict[str, Any]) -> None:
        self.decoded = read_architecture(value)

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        data["architecture"] = write_architecture(data.pop("decoded"))
        data.pop("without", None)
        return data

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the configuration and the code; saving a model calls this method too."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / CODE_FILE).write_text(bundle(), encoding="utf-8")


def _first_heads(architecture: Architecture) -> int:
    for stage in architecture.stages:
        attention = getattr(stage.options, "attention", None)
        if attention is not None:
            return getattr(attention.options, "heads", 1)
    return 1
