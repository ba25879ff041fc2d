"""Formats of Hugging Face: folders with a configuration that transformers reads, imported and exported."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor

from braidlm.bridges.bridge import ExportingBridge, ExportTarget, OpenedCheckpoint
from braidlm.bridges.checkpoint import Checkpoint
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo, lost_options, other_stages
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.core.models.card import USE_AS_IT_IS
from braidlm.core.models.logits import Probe, check_promise, fits_beside, logits_of_transformers, rounding
from braidlm.core.reading import read_json
from braidlm.model.config.braid_config import BraidConfig


class HuggingFaceBridge(ExportingBridge):
    """A format whose configuration is converted to ours and back, as its tensors are."""

    model_type: ClassVar[str]
    """What config.json calls it."""
    body: ClassVar[str]
    """The prefix of every tensor but the head's; a checkpoint saved without the head lacks it."""
    ignorable: ClassVar[dict[str, str]] = {}
    """Patterns of stored tensors that carry nothing learned, and what they are."""
    embedding: ClassVar[str]
    """The tensor that a tied head shares."""
    options: ClassVar[dict[str, str]]
    """Settings of the format, and the paths of the options of ours that have the same values."""
    fixed: ClassVar[dict[str, Any]]
    """The options of ours that every model of the format has, by their paths."""
    head: ClassVar[str] = "lm_head.weight"

    @property
    def config_class(self) -> Any:
        """Transformers' class of the configuration, imported when a folder of the format is read or written."""
        return transformers.CONFIG_MAPPING[self.model_type]

    @abstractmethod
    def import_problems(self, config: Any) -> list[str]:
        """The settings of a foreign configuration that our model cannot express."""

    def computed(self, config: Any) -> dict[str, Any]:
        """The options of ours whose values follow from several settings, or from one in another form."""
        return {}

    def windows(self, config: Any) -> list[int | None]:
        """The sliding window of each layer of a foreign configuration; None: it sees everything before."""
        return [None] * config.num_hidden_layers

    def architecture(self, config: Any) -> dict[str, Any]:
        """Our architecture for a foreign configuration without problems."""
        values = {ours: getattr(config, theirs, None) for theirs, ours in self.options.items() if ours != "layers"}
        given = {ours: value for ours, value in values.items() if value is not None}
        stages = ((window, len(list(layers))) for window, layers in groupby(self.windows(config)))
        tree: dict[str, Any] = {
            "stages": [{"block": {"layers": layers, "attention": {"window": window}}} for window, layers in stages]
        }
        for path, value in (self.fixed | given | self.computed(config)).items():
            *sections, key = path.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[key] = value
        return tree

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        """The foreign configuration for a model of ours; what the format does not have is not in it."""
        values: dict[str, Any] = {}
        for theirs, ours in self.options.items():
            value: Any = info.explicit
            for key in ours.split("."):
                value = (value or {}).get(key)
            values |= {} if value is None else {theirs: value}
        return {"vocab_size": info.config.vocab_size, **values, **info.token_ids}

    def export_problems(self, info: ModelInfo) -> list[str]:
        if problems := other_stages(info, self.title):
            return problems
        try:
            config = self.config_class(**self.settings(info))
        except Exception as error:  # strict configurations raise errors of several libraries
            return [f"transformers does not accept its configuration: {' '.join(str(error).split())}"]
        if problems := self.import_problems(config):
            return problems
        again = ModelInfo(BraidConfig(self.architecture(config), vocab_size=info.config.vocab_size))
        return lost_options(info, again, self.title, self.zero_biases)

    def target(self, info: ModelInfo) -> "TransformersTarget":
        return self.target_of(self.config_class(**self.settings(info), dtype="float32"))

    def target_of(self, config: Any) -> "TransformersTarget":
        """Transformers' own model of a configuration, which shows the tensors that it needs."""
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        return TransformersTarget(model, self.head, self.embedding)

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        config = self.foreign_config(path)
        if problems := self.import_problems(config):
            where = str(path / "config.json")
            raise BraidError(f"Braid cannot express this {self.title}:{bullet_list(problems)}", where)
        checkpoint = self.open_checkpoint(path)
        notes = self.resolve_tied_head(config, checkpoint)
        token_ids = {name: getattr(config, name) for name in TOKEN_IDS}
        ours = BraidConfig(self.architecture(config), vocab_size=config.vocab_size, **token_ids)
        return OpenedCheckpoint(checkpoint, ours, f"the {self.title} that config.json describes", notes)

    def foreign_config(self, folder: Path) -> Any:
        """The configuration of a folder whose weights are plain numbers, in transformers' terms."""
        path = folder / "config.json"
        data = read_config(folder, self.model_type)
        if "quantization_config" in data:
            method = (data["quantization_config"] or {}).get("quant_method", "an unknown method")
            what = f"the weights are quantised ({method})"
            raise BraidError(what, str(folder), "Convert the model they were quantised from.")
        try:
            return self.config_class.from_dict(data)
        except Exception as error:  # strict configurations raise errors of several libraries
            first = " ".join(str(error).split())
            raise BraidError(f"transformers does not accept this configuration: {first}", str(path)) from error

    def open_checkpoint(self, folder: Path) -> Checkpoint:
        """The tensors of a folder, without those that carry nothing learned."""
        checkpoint = Checkpoint(folder)
        if not any(name.startswith(self.body) for name in checkpoint.stored):  # saved without its head
            checkpoint.rename(lambda name: name if name == self.head else self.body + name)
        for pattern, why in self.ignorable.items():
            for name in [name for name in checkpoint.stored if re.fullmatch(pattern, name)]:
                checkpoint.ignore(name, why)
        return checkpoint

    def resolve_tied_head(self, config: Any, checkpoint: Checkpoint) -> list[str]:
        """Leave out a stored head that equals the embedding it is tied to; untie another one, as transformers does."""
        if not config.tie_word_embeddings or not {self.head, self.embedding} <= set(checkpoint.stored):
            return []
        if checkpoint.ignore_copy_of_embedding(self.head, self.embedding):
            return []
        config.tie_word_embeddings = False
        return ["config.json ties the head to the embedding, but the weights hold another head: it is kept, untied"]


class TransformersTarget(ExportTarget):
    """A model of transformers, on the meta device until it is filled."""

    use = USE_AS_IT_IS

    def __init__(self, model: Any, head: str, embedding: str):
        self.model, self.head, self.embedding = model, head, embedding
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del self.shapes[head]

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        if self.model.config.tie_word_embeddings:
            tensors = tensors | {self.head: tensors[self.embedding]}
        self.model.load_state_dict(tensors, assign=True)
        self.model.tie_weights()
        self.model.save_pretrained(folder)
        path = folder / "config.json"
        write_json(path, read_json(path) | older_rope_settings(getattr(self.model.config, "rope_parameters", None)))

    def check(self, folder: Path, probe: Probe) -> None:
        if fits_beside(self.model.parameters()):
            written, allowed = logits_of_transformers(folder, probe.ids), rounding(probe.logits)
            promise = f"an export changes no logit by more than {allowed:.3g}, and this one changes one by"
            check_promise(promise, probe.logits, written, allowed)


def read_config(folder: Path, model_type: str) -> dict[str, Any]:
    """The config.json of a folder, which must be of this model type where it names one."""
    data = read_json(folder / "config.json")
    if (other := data.get("model_type", model_type)) != model_type:
        raise BraidError(f"this folder holds a '{other}' model, not a '{model_type}' model", str(folder))
    return data


def older_rope_settings(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """`rope_parameters` under the names that transformers 4 reads; it would take its defaults in silence."""
    rope = dict(parameters or {})
    if "rope_theta" not in rope:  # a model without rotary positions, or with others for every kind of layer
        return {}
    theta = rope.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}
