"""The sources of an edit, read tensor by tensor: a model folder of Braid's, or one that a bridge reads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor

from braidlm.bridges.checkpoint import FLOATS
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo
from braidlm.bridges.opening import BRAID, OpenModel
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import WEIGHTS, load_lineage
from braidlm.core.models.integrity import file_sha256
from braidlm.core.models.licence import licence_record
from braidlm.core.models.trained_length import LENGTH, trained_length
from braidlm.model.compression.compression import untrainable
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM


def open_source(model: OpenModel) -> "Source":
    """Open a model's tensors, checking their names and shapes against the configuration."""
    return _BraidSource(model) if model.is_braid else _BridgedSource(model)


class Source(ABC):
    """The tensors of one model under Braid's names, each read on demand."""

    config: BraidConfig
    notes: list[str]
    """Remarks for the plan."""

    def __init__(self, model: OpenModel):
        self.model = model
        self.config = model.config

    @property
    def plain(self) -> ModelInfo:
        """Its modules on the meta device."""
        return self.model.info

    def load(self) -> BraidForCausalLM:
        """The model in memory, in float32 as its tensors are read: what an edit promises is measured against it."""
        return self.model.load().float()

    def config_with(self, frozen: Sequence[str] | None = None, **parts: Any) -> BraidConfig:
        """The configuration with other parts of the architecture, and other parts that training leaves as they are."""
        config = self.config
        return BraidConfig(
            config.architecture | parts,
            vocab_size=config.vocab_size,
            frozen=list(config.frozen if frozen is None else frozen),
            paths=config.paths,
            **{name: getattr(config, name) for name in TOKEN_IDS},
        )

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, in float32; a table of whole numbers as it is."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Its origin, for the lineage of the new model."""


class _BraidSource(Source):
    """A model folder."""

    def __init__(self, model: OpenModel):
        super().__init__(model)
        model.check()
        self.path = model.folder / WEIGHTS
        with safe_open(self.path, "pt") as file:
            weights = [name for name, tensor in self.plain.tensors.items() if tensor.is_floating_point()]
            types = {name: file.get_slice(name).get_dtype() for name in weights}
        if kinds := untrainable(self.config.decoded.compression):
            raise BraidError(
                f"this model is quantised ({', '.join(kinds)}), and an edit needs weights",
                str(model.folder),
                "Edit the model that it was made of, which lineage.json names, and quantise the result.",
            )
        if odd := [f"{name} is of type {kind}" for name, kind in types.items() if kind not in FLOATS]:
            raise BraidError(f"these are no plain floating point numbers: {'; '.join(odd[:5])}", str(model.folder))
        dtypes = sorted({FLOATS[kind] for kind in types.values()})
        self.notes = (
            [] if dtypes == ["float32"] else [f"weights are {' and '.join(dtypes)}; they are written as float32"]
        )

    def read(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:  # an open file would keep all it has read in memory
            tensor = file.get_tensor(name)
        return tensor.float() if self.plain.tensors[name].is_floating_point() else tensor

    def record(self) -> dict[str, Any]:
        folder = self.model.folder
        lineage = load_lineage(folder) or {}
        known = {key: lineage[key] for key in ("made_by", "recipe_sha256", "training", "sources") if lineage.get(key)}
        if (length := trained_length(lineage)) is not None:
            known[LENGTH] = length
        return {
            "model": folder.name,
            "format": BRAID,
            "sha256": file_sha256(self.path),
            **licence_record(folder),
            **known,
        }


class _BridgedSource(Source):
    """A checkpoint of another format."""

    def __init__(self, model: OpenModel):
        super().__init__(model)
        self.bridged = model.imported
        self.notes = list(self.bridged.plan.notes)
        self.links = {link.braid: link for link in self.bridged.mappings}

    def read(self, name: str) -> Tensor:
        return self.bridged.read(self.links[name])

    def record(self) -> dict[str, Any]:
        read_as = {link.braid: list(link.foreign) for link in self.bridged.mappings}
        checkpoint = self.bridged.checkpoint
        return {
            "model": self.bridged.location.name,
            "format": self.model.kind,
            "weights": checkpoint.hashes(),
            **licence_record(self.model.folder),
            "read_as": read_as,
            **({"ignored": checkpoint.ignored} if checkpoint.ignored else {}),
        }
