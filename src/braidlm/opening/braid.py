"""The backend of Braid: its own model folders, and folders of other formats that a bridge reads as Braid models."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from braidlm.bridges.bridge import Import, folder_formats
from braidlm.bridges.checkpoint import FLOATS
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import WEIGHTS, check_weights, load_config, load_model, model_type, switch
from braidlm.core.models.integrity import file_sha256
from braidlm.core.models.runs import length_record
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.compression import untrainable
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import import_files
from braidlm.opening.opened_model import OpenedModel, find_tokenizer

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

import_files("braidlm.bridges.formats")

BRAID = BraidConfig.model_type
FROM_THE_SOURCE = ("made_by", "recipe_sha256", "training", "sources")
"""What the lineage of an edited model repeats of its source's."""


class OpenedBraid(OpenedModel):
    """A Braid model; edits read its tensors one by one, under Braid's names."""

    def __init__(self, folder: Path, hub: str | None = None, **options: Any):
        super().__init__(folder, hub, **options)
        self.kind = model_type(folder)
        self.is_bridged = self.kind != BRAID
        if self.kind not in (known := (BRAID, *folder_formats())):
            raise BraidError(f"this folder holds a '{self.kind}' model; Braid reads {', '.join(known)}", str(folder))

    @cached_property
    def bridged(self) -> Import:
        """What a bridge reads; every tensor is accounted for by its name and shape."""
        return Import(self.folder, self.folder.resolve().name, self.kind, find_tokenizer(self.folder))

    @cached_property
    def info(self) -> ModelInfo:
        """The configuration, in Braid's terms, and the modules on the meta device."""
        return self.bridged.info if self.is_bridged else ModelInfo(load_config(self.folder))

    @property
    def config(self) -> BraidConfig:
        return self.info.config

    @property
    def context(self) -> int:
        return self.config.max_position_embeddings  # type: ignore[no-any-return]

    @property
    def limit(self) -> int | None:
        return self.info.model.model.positions.limit  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def tokenizer(self) -> BraidTokenizer:
        if (tokenizer := find_tokenizer(self.folder)) is not None:
            return tokenizer
        todo = "Put its tokenizer.json and tokenizer_config.json into the folder."
        raise BraidError("this model has no tokenizer", str(self.folder), todo)

    def check(self) -> None:
        switch(self.info.model, self.paths, self.without, self.folder)
        if not self.is_bridged:
            check_weights(self.folder, self.info.model)

    def _load(self, device: str | torch.device, dtype: torch.dtype | None) -> "BraidForCausalLM":
        if self.is_bridged:
            self.check()
            model = self.bridged.model().to(device)
        else:
            model = load_model(self.folder, device, self.paths, self.config, self.without)
        return model if dtype is None else model.to(dtype)

    def record(self) -> dict[str, Any]:
        named = self._named_record(self.folder.name)
        if self.is_bridged:
            return {**named, "format": self.kind, "weights": self.bridged.checkpoint.hashes()}
        return {**named, "sha256": file_sha256(self.folder / WEIGHTS)}

    def edit_record(self) -> dict[str, Any]:
        """Which model this is and what its lineage says, for the lineage of a model that an edit makes."""
        if self.is_bridged:
            read_as = {link.braid: list(link.foreign) for link in self.bridged.mappings}
            ignored = self.bridged.checkpoint.ignored
            known = self.record() | length_record(self.lineage) | {"model": self.bridged.name, "read_as": read_as}
            return known | ({"ignored": ignored} if ignored else {})
        lineage = self.lineage or {}
        known = {key: lineage[key] for key in FROM_THE_SOURCE if lineage.get(key)}
        return {**self.record(), "format": BRAID, **known, **length_record(lineage)}

    def check_editable(self) -> None:
        """Refuse a model whose tensors are not weights that an edit can read."""
        self.check()
        if kinds := untrainable(self.config.decoded.compression):
            what = f"this model is quantised ({', '.join(kinds)}), and an edit needs weights"
            todo = "Edit the model that it was made of, which lineage.json names, and quantise the result."
            raise BraidError(what, str(self.folder), todo)
        if odd := [f"{name} is of type {kind}" for name, kind in self._types.items() if kind not in FLOATS]:
            raise BraidError(f"these are no plain floating point numbers: {'; '.join(odd[:5])}", str(self.folder))

    @property
    def notes(self) -> list[str]:
        """Remarks for the plan of an edit."""
        if self.is_bridged:
            return list(self.bridged.plan.notes)
        dtypes = sorted({FLOATS[kind] for kind in self._types.values()})
        return [] if dtypes == ["float32"] else [f"weights are {' and '.join(dtypes)}; they are written as float32"]

    @cached_property
    def _types(self) -> dict[str, str]:
        """The types of the stored weights, as safetensors names them; a bridge has checked those that it reads."""
        if self.is_bridged:
            return {}
        weights = [name for name, tensor in self.info.tensors.items() if tensor.is_floating_point()]
        with safe_open(self.folder / WEIGHTS, "pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in weights}

    def read(self, name: str) -> Tensor:
        """One tensor, in float32; a table of whole numbers as it is."""
        if self.is_bridged:
            return self.bridged.read(next(link for link in self.bridged.mappings if link.braid == name))
        with safe_open(self.folder / WEIGHTS, "pt") as file:  # an open file would keep all it has read in memory
            tensor = file.get_tensor(name)
        return tensor.float() if self.info.tensors[name].is_floating_point() else tensor

    def config_with(self, frozen: Sequence[str] | None = None, **parts: Any) -> BraidConfig:
        """The configuration with other parts of the architecture, and other parts that training leaves as they are."""
        config, frozen = self.config, list(self.config.frozen if frozen is None else frozen)
        kept = {name: getattr(config, name) for name in ("vocab_size", "paths", *TOKEN_IDS)}
        return BraidConfig(config.architecture | parts, frozen=frozen, **kept)
