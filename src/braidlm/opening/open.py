"""The two entrances to models: by one name, or by several."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from braidlm.bridges.bridge import folder_formats
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import model_type
from braidlm.core.models.runs import CHECKPOINTS, CONFIG, is_interruption, is_run, model_folders_in
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.opening.braid import BRAID, OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gated_folders import is_adapter
from braidlm.opening.names import Names, StrPath, find_or_fetch, model_folder, name_sources, names_inside
from braidlm.opening.opened_model import OpenedModel

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

Backend = Literal["any", "own", "braid", "transformers"]
"""What reads a folder: Braid wherever a bridge lets it, and else transformers (any); the library that the folder is of
(own); Braid, which refuses what no bridge reads (braid); or transformers, which refuses Braid's folders."""


@overload
def open_model(name: StrPath, backend: Literal["braid"], *, bare: bool = ..., **switches: Any) -> OpenedBraid: ...
@overload
def open_model(
    name: StrPath, backend: Literal["transformers"], *, bare: bool = ..., **switches: Any
) -> OpenedDecoder: ...
@overload
def open_model(name: StrPath, backend: Backend = ..., *, bare: bool = ..., **switches: Any) -> OpenedModel: ...
def open_model(name: StrPath, backend: Backend = "any", *, bare: bool = False, **switches: Any) -> OpenedModel:
    """A model by its name: a model folder, a run, one model of a study, a folder of adapters, or ORG/NAME on the Hub.

    With `bare`, NAME alone may be the Hub's. `paths` are the active ones, and `without` modules that are switched off.
    """
    folder, hub = find_or_fetch(name, bare)
    return _backend(folder, backend)(folder, hub, **switches)


def open_models(
    names: Names, backend: Backend = "any", *, all_checkpoints: bool = False, **switches: Any
) -> list[OpenedModel]:
    """All models that names stand for: a study stands for all of its models, and a run for its newest checkpoint.

    With `all_checkpoints`, a run or a folder stands for all checkpoints in it, in the order of their training. A
    mapping gives the names of tables itself.
    """
    found = name_sources(names, all_checkpoints)
    if not found:
        raise BraidError("there is no model", todo="Name a model folder, a run or a study.")
    opened: list[OpenedModel] = []
    for name, (folder, hub) in found.items():
        if not all_checkpoints:
            folder = model_folder(folder)
            opened.append(_backend(folder, backend)(folder, hub, name=name, **switches))
            continue
        checkpoints: list[OpenedModel] = []
        for path in checkpoint_folders(folder):
            checkpoints.append(_backend(path, backend)(path, name=f"{name}/{path.name}", **switches))
            checkpoints[-1].run = name
        opened += sorted(checkpoints, key=lambda c: (c.words or 0, c.tokens or 0, c.steps or 0, c.name))
    return opened


def load(
    name: StrPath,
    device: str | torch.device = "cpu",
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> "tuple[BraidForCausalLM, BraidTokenizer]":
    """A model in evaluation mode, and its tokenizer, by any name that the verbs take.

    `paths` are the active ones, `without` are modules that are switched off.
    """
    opened = open_model(name, "braid", paths=paths, without=without)
    return opened.load(device), opened.tokenizer


def checkpoint_folders(folder: Path) -> list[Path]:
    """The model folders of a run, or of any folder that holds some."""
    parent = folder / CHECKPOINTS if is_run(folder) else folder
    checkpoints = [path for path in model_folders_in(parent) if not is_interruption(path)]
    if not checkpoints:
        todo = names_inside(folder) or "Leave out --all-checkpoints to evaluate a single model."
        raise BraidError("there are no checkpoints here", str(folder), todo)
    return checkpoints


def _backend(folder: Path, backend: Backend) -> type[OpenedBraid] | type[OpenedDecoder]:
    if backend in ("braid", "transformers"):
        return OpenedBraid if backend == "braid" else OpenedDecoder
    if is_adapter(folder) or not (folder / CONFIG).is_file():
        return OpenedDecoder
    reads = (BRAID,) if backend == "own" else (BRAID, *folder_formats())
    return OpenedBraid if model_type(folder) in reads else OpenedDecoder
