"""The sources of an edit, read tensor by tensor: a model folder, a run folder or a checkpoint that a bridge reads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from braidlm.bridges.checkpoint import FLOATS
from braidlm.bridges.convert import bridges, folder_formats  # importing this registers every bridge
from braidlm.bridges.importing import Import
from braidlm.bridges.locate import Location, find_tokenizer
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import WEIGHTS, check_weights, load_config, load_lineage
from braidlm.core.models.runs import CHECKPOINTS, is_run, model_folder
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.config.braid_config import BraidConfig

BRAID = BraidConfig.model_type


@dataclass(frozen=True)
class Located:
    """A model whose folder, kind and tokenizer are known and whose weights have not been read."""

    folder: Path
    kind: str
    """`braid`, or the name of a bridge."""
    tokenizer: BraidTokenizer

    @property
    def title(self) -> str:
        """The run's name for a checkpoint of a run, else the folder's."""
        folder = self.folder.resolve()
        run = folder.parent.parent
        return run.name if folder.parent.name == CHECKPOINTS and is_run(run) else folder.name

    def open(self) -> "Source":
        """Open its tensors, checking their names and shapes against the configuration."""
        return _BraidSource(self) if self.kind == BRAID else _BridgedSource(self)


def locate(path: str | Path) -> Located:
    """A model folder, a run folder (its newest checkpoint), or a Hugging Face folder of a format that Braid reads."""
    folder = model_folder(Path(path).expanduser())
    kind = read_json(folder / "config.json").get("model_type")
    if kind is None:
        raise BraidError("this is not a model folder (its config.json has no model_type)", str(folder))
    known = (BRAID, *folder_formats())
    if kind not in known:
        raise BraidError(f"this folder holds a '{kind}' model; edits read {', '.join(known)}", str(folder))
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise BraidError(
            "this model has no tokenizer, so it cannot be compared with the others'",
            str(folder),
            "Put its tokenizer.json and tokenizer_config.json into the folder.",
        )
    return Located(folder, str(kind), tokenizer)


class Source(ABC):
    """The tensors of one model under Braid's names, each read on demand."""

    config: BraidConfig
    notes: list[str]
    """Remarks for the plan."""

    def __init__(self, located: Located):
        self.located = located

    @cached_property
    def plain(self) -> ModelInfo:
        """Its modules on the meta device."""
        return ModelInfo(self.config)

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, in float32."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Its origin, for the lineage of the new model."""


class _BraidSource(Source):
    """A model folder."""

    def __init__(self, located: Located):
        super().__init__(located)
        self.config = load_config(located.folder)
        check_weights(located.folder, self.config)
        self.path = located.folder / WEIGHTS
        with safe_open(self.path, "pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in self.plain.tensors}
        if odd := [f"{name} is of type {kind}" for name, kind in kinds.items() if kind not in FLOATS]:
            raise BraidError(f"these are no plain floating point numbers: {'; '.join(odd[:5])}", str(located.folder))
        dtypes = sorted({FLOATS[kind] for kind in kinds.values()})
        self.notes = (
            [] if dtypes == ["float32"] else [f"weights are {' and '.join(dtypes)}; they are written as float32"]
        )

    def read(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:  # an open file would keep all it has read in memory
            return file.get_tensor(name).float()

    def record(self) -> dict[str, Any]:
        folder = self.located.folder
        lineage = load_lineage(folder) or {}
        known = {key: lineage[key] for key in ("made_by", "recipe_sha256", "training", "sources") if lineage.get(key)}
        return {"model": folder.name, "format": BRAID, "sha256": sha256_of(self.path), **known}


class _BridgedSource(Source):
    """A checkpoint of another format."""

    def __init__(self, located: Located):
        super().__init__(located)
        found = Location(located.folder, located.folder.resolve().name)
        self.bridged = Import(found, located.kind, bridges[located.kind](), located.tokenizer)
        self.config, self.notes = self.bridged.info.config, list(self.bridged.plan.notes)
        self.links = {link.braid: link for link in self.bridged.mappings}

    def read(self, name: str) -> Tensor:
        return self.bridged.read(self.links[name])

    def record(self) -> dict[str, Any]:
        read_as = {link.braid: list(link.foreign) for link in self.bridged.mappings}
        checkpoint = self.bridged.checkpoint
        return {
            "model": self.bridged.location.name,
            "format": self.located.kind,
            "weights": checkpoint.hashes(),
            "read_as": read_as,
            **({"ignored": checkpoint.ignored} if checkpoint.ignored else {}),
        }
