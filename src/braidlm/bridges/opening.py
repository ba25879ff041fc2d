"""Opening a model by its name, whether its folder is Braid's or one that a bridge reads."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from braidlm.bridges.bridge import bridges, folder_formats
from braidlm.bridges.importing import Import
from braidlm.bridges.locate import Location, find_tokenizer
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import (
    WEIGHTS,
    check_weights,
    load_config,
    load_model,
    switch,
)
from braidlm.core.models.integrity import file_sha256
from braidlm.core.models.licence import licence_record
from braidlm.core.models.names import StrPath, find_model, title_of
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import import_files
from braidlm.model.modeling_braid import BraidForCausalLM

import_files("braidlm.bridges.formats")

BRAID = BraidConfig.model_type


class OpenModel:
    """A model whose folder and kind are known, and whose configuration, tokenizer and weights are read on demand."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.kind = model_type(folder)
        """`braid`, or the name of a bridge."""
        if self.kind not in (known := (BRAID, *folder_formats())):
            raise BraidError(f"this folder holds a '{self.kind}' model; Braid reads {', '.join(known)}", str(folder))

    @property
    def title(self) -> str:
        """The run's name for a checkpoint of a run, else the folder's."""
        return title_of(self.folder)

    @property
    def is_braid(self) -> bool:
        return self.kind == BRAID

    @cached_property
    def info(self) -> ModelInfo:
        """Its configuration, in Braid's terms, and its modules on the meta device."""
        return ModelInfo(load_config(self.folder)) if self.is_braid else self.imported.info

    @property
    def config(self) -> BraidConfig:
        return self.info.config

    @cached_property
    def tokenizer(self) -> BraidTokenizer:
        """Its tokenizer."""
        tokenizer = find_tokenizer(self.folder)
        if tokenizer is None:
            raise BraidError(
                "this model has no tokenizer",
                str(self.folder),
                "Put its tokenizer.json and tokenizer_config.json into the folder.",
            )
        return tokenizer

    @cached_property
    def imported(self) -> Import:
        """What a bridge reads; every tensor is accounted for by its name and shape."""
        location = Location(self.folder, self.folder.resolve().name)
        return Import(location, self.kind, bridges[self.kind](), find_tokenizer(self.folder))

    def check(self, paths: Sequence[str] | None = None, without: Sequence[str] | None = None) -> None:
        """Check configuration, paths, modules and the header of the weights, before anything is loaded."""
        switch(self.info.model, paths, without, self.folder)
        if self.is_braid:
            check_weights(self.folder, self.info.model)

    def load(
        self,
        device: str | torch.device = "cpu",
        paths: Sequence[str] | None = None,
        without: Sequence[str] | None = None,
    ) -> BraidForCausalLM:
        """The model in memory, in evaluation mode; with `paths`, only these are active, and `without` these modules."""
        if self.is_braid:
            return load_model(self.folder, device, paths, self.config, without)
        self.check(paths, without)
        return self.imported.model().to(device)

    def record(self) -> dict[str, Any]:
        """Which model this is, for the lineage of another that is made of it."""
        named = {"model": self.folder.name, **licence_record(self.folder)}
        if self.is_braid:
            return {**named, "sha256": file_sha256(self.folder / WEIGHTS)}
        return {**named, "format": self.kind, "weights": self.imported.checkpoint.hashes()}


def open_model(name: StrPath) -> OpenModel:
    """A model by its name: a model folder, a run, one model of a study, or a folder that a bridge reads."""
    return OpenModel(find_model(name))


def load(
    name: StrPath,
    device: str | torch.device = "cpu",
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> tuple[BraidForCausalLM, BraidTokenizer]:
    """A model in evaluation mode, and its tokenizer, by any name that the verbs take.

    `paths` are the active ones, `without` are modules that are switched off.
    """
    opened = open_model(name)
    return opened.load(device, paths, without), opened.tokenizer


def model_type(folder: Path) -> str:
    """The kind of model that a folder's config.json names."""
    data: Any = read_json(folder / "config.json")
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise BraidError("this is not a model folder (its config.json has no model_type)", str(folder))
    return kind
