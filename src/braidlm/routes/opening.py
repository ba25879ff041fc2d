"""Models to look at, opened as far as checking needs: configuration and tokenizer, no weights yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import load_config
from braidlm.core.models.runs import model_folder, short_names
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.paths.switches import path_names, use_paths
from braidlm.routes.places import choosers_of

Place = str | Path


@dataclass
class OpenedModel:
    """A model whose configuration and tokenizer have been read, and whose weights have not."""

    name: str
    folder: Path
    config: BraidConfig
    tokenizer: BraidTokenizer
    paths: tuple[str, ...]
    heard: list[str] | None

    @property
    def where(self) -> str:
        return str(self.folder)

    @property
    def context(self) -> int:
        return self.config.max_position_embeddings

    @property
    def reads(self) -> tuple[str, int]:
        """What makes a text the same for two models."""
        return self.tokenizer.fingerprint, self.context


def open_models(
    models: Place | Sequence[Place] | Mapping[str, Place], heard: Sequence[str] | None
) -> list[OpenedModel]:
    """Models by folder, run or name and folder; `heard` are the paths to listen to, which each of them must have."""
    if isinstance(models, Mapping):
        places = {str(name): place for name, place in models.items()}
    else:
        places = short_names([models] if isinstance(models, (str, Path)) else list(models))
    if not places:
        raise BraidError("there is no model to look at")
    opened = []
    for name, place in places.items():
        folder = model_folder(place)
        config = load_config(folder)
        bare = skeleton(config)
        try:
            choosers_of(bare)
            use_paths(bare, heard if heard is not None else config.paths)
        except BraidError as error:
            raise BraidError(error.what, str(folder), error.todo) from error
        wanted = None if heard is None else list(heard)
        opened.append(OpenedModel(name, folder, config, load_tokenizer(folder), path_names(bare), wanted))
    return opened
