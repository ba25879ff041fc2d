"""The configuration that transformers saves and loads; the architecture inside it is decoded strictly."""

from typing import Any

from transformers import PreTrainedConfig

from .architecture import Architecture, read_architecture, write_architecture

AUTO_MAP = {
    "AutoConfig": "configuration_braid.BraidConfig",
    "AutoModel": "modeling_braid.BraidModel",
    "AutoModelForCausalLM": "modeling_braid.BraidForCausalLM",
    "AutoModelForSequenceClassification": "modeling_braid.BraidForSequenceClassification",
}


class BraidConfig(PreTrainedConfig):
    """`architecture` says what the model is; the rest are the names other tools look for."""

    model_type = "braid"

    def __init__(self, architecture: Architecture | dict | None = None, vocab_size: int = 256, **kwargs: Any):
        decoded = (
            architecture
            if isinstance(architecture, Architecture)
            else read_architecture(architecture or {"stages": ["block"]})
        )
        self.architecture = write_architecture(decoded)
        self.vocab_size = vocab_size
        derived = {
            "hidden_size": decoded.width,
            "max_position_embeddings": decoded.context,
            "num_hidden_layers": decoded.depth,
            "num_attention_heads": _first_heads(decoded),
        }
        for name, value in derived.items():
            kwargs.pop(name, None)
            setattr(self, name, value)
        kwargs["tie_word_embeddings"] = decoded.tie_embeddings
        kwargs.pop("auto_map", None)
        self.use_cache = kwargs.pop("use_cache", True)
        self.paths: list[str] | None = kwargs.pop("paths", None)
        """Which paths are heard; None for all. `from_pretrained(folder, paths=["stories"])` sets it."""
        self.frozen: list[str] = kwargs.pop("frozen", None) or []
        """Parts that training leaves as they are."""
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # tools read them of every configuration
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)

    def decoded(self) -> Architecture:
        """The architecture as typed configuration."""
        return read_architecture(self.architecture, where="architecture")


def _first_heads(architecture: Architecture) -> int:
    for stage in architecture.stages:
        attention = getattr(stage.options, "attention", None)
        if attention is not None:
            return getattr(attention.options, "heads", 1)
    return 1


BraidConfig.register_for_auto_class()
