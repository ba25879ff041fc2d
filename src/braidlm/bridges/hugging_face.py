"""A format of Hugging Face's: a folder with a configuration that transformers reads, converted in and out."""

import re
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from braidlm.bridges.bridge import Bridge, Opened, listed
from braidlm.bridges.checkpoint import Checkpoint
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.model.config.braid_config import BraidConfig

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HuggingFaceBridge(Bridge):
    """Its configuration to ours and back, beside the links of the tensors."""

    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]
    body: ClassVar[str]
    """The prefix of every tensor but the head's; a checkpoint saved without the head lacks it."""
    ignorable: ClassVar[dict[str, str]] = {}
    """Patterns of stored tensors that carry nothing learned, and what they are."""
    embedding: ClassVar[str]
    """The tensor that a tied head shares."""
    head: ClassVar[str] = "lm_head.weight"
    zero_biases: ClassVar[bool] = False
    """Whether the format always has biases: ours without them are then written as zeros."""

    @abstractmethod
    def import_problems(self, config: Any) -> list[str]:
        """What of a foreign configuration our model cannot express."""

    @abstractmethod
    def architecture(self, config: Any) -> dict[str, Any]:
        """Our architecture for a foreign configuration without problems."""

    @abstractmethod
    def export_problems(self, plain: PlainModel) -> list[str]:
        """What of our model the format cannot express."""

    @abstractmethod
    def settings(self, plain: PlainModel) -> dict[str, Any]:
        """The foreign configuration for a model of ours without problems."""

    def export_notes(self, plain: PlainModel) -> list[str]:
        """What is lost on the way without changing the function."""
        return []

    def open(self, found: Found) -> Opened:
        config = self._read_config(found.place)
        checkpoint = self._open_checkpoint(found.place)
        notes = self._settle_head(config, checkpoint)
        token_ids = {name: getattr(config, name) for name in TOKEN_IDS}
        ours = BraidConfig(self.architecture(config), vocab_size=config.vocab_size, **token_ids)
        return Opened(checkpoint, ours, f"the {self.title} that config.json describes", notes)

    def _read_config(self, folder: Path) -> Any:
        path, kind = folder / "config.json", self.config_class.model_type
        data = read_json(path)
        if not isinstance(data, dict):
            raise BraidError("this is not a model's configuration", str(path))
        if (found := data.get("model_type", kind)) != kind:
            raise BraidError(f"this folder holds a '{found}' model, not a '{kind}' model", str(folder))
        if "quantization_config" in data:
            method = (data["quantization_config"] or {}).get("quant_method", "an unknown method")
            raise BraidError(
                f"the weights are quantised ({method})", str(folder), "Convert the model they were quantised from."
            )
        try:
            config = self.config_class.from_dict(data)
        except Exception as error:  # strict configurations raise errors of several libraries
            first = " ".join(str(error).split())
            raise BraidError(f"transformers does not accept this configuration: {first}", str(path)) from error
        if problems := self.import_problems(config):
            raise BraidError(f"Braid cannot express this {self.title}:{listed(problems)}", str(path))
        return config

    def _open_checkpoint(self, folder: Path) -> Checkpoint:
        checkpoint = Checkpoint(folder)
        if not any(name.startswith(self.body) for name in checkpoint.stored):  # saved without its head
            checkpoint.rename(lambda name: name if name == self.head else self.body + name)
        for pattern, why in self.ignorable.items():
            for name in [name for name in checkpoint.stored if re.fullmatch(pattern, name)]:
                checkpoint.ignore(name, why)
        return checkpoint

    def _settle_head(self, config: Any, checkpoint: Checkpoint) -> list[str]:
        """A tied head that is stored all the same: equal to the embedding it is left out, else it is its own.

        The second is what transformers does with such a checkpoint.
        """
        stored = checkpoint.stored
        if not config.tie_word_embeddings or self.head not in stored or self.embedding not in stored:
            return []
        if torch.equal(checkpoint.read(self.head), checkpoint.read(self.embedding)):
            checkpoint.ignore(self.head, "a second copy of the embedding, to which it is tied")
            return []
        config.tie_word_embeddings = False
        return ["config.json ties the head to the embedding, but the weights hold another head: it is kept, untied"]
