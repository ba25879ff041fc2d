"""The opened model: what every verb, edit and evaluation takes.

Its folder is known and has been told from other kinds of folders; configuration, tokenizer and weights are read on
demand. There are two backends: `OpenedBraid` (Braid's own folders, and those that a bridge reads as Braid models) and
`OpenedDecoder` (decoders of transformers as they are, with gates or LoRA adapters). `open.py` chooses one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.card import licence_record
from braidlm.core.models.folders import check_vocabulary, load_lineage
from braidlm.core.models.integrity import WEIGHT_FILES, model_hash
from braidlm.core.models.runs import training_of
from braidlm.data.tokenizing.build import BraidTokenizer, load_tokenizer
from braidlm.opening.names import named, words_in_name

Loader = Callable[[str | torch.device], Any]


class OpenedModel(ABC):
    """A model of a folder; the paths that are active and the modules that are switched off belong to it."""

    kind: str
    """What config.json calls the architecture: `braid`, `llama`."""
    run: str | None = None
    """The name of the run that it is one of several checkpoints of."""
    base: Any = None
    """The opened model that its adapters are for, if it is one of adapters."""
    loader: Loader | None = None
    """Loads it in place of the backend: a model that is changed in memory has one."""

    def __init__(
        self,
        folder: Path,
        hub: str | None = None,
        name: str | None = None,
        paths: Sequence[str] | None = None,
        without: Sequence[str] | None = None,
    ):
        """`hub` is the model's name on the Hub, if it is from there, and `name` the one that tables give it."""
        self.folder, self.hub = folder, hub
        self.title = named(folder, hub)
        """The run's name for a checkpoint of a run, else the folder's; the Hub's with its revision."""
        self.name = name or self.title
        self.paths = None if paths is None else list(paths)
        """The active paths, if they were chosen; else those that the folder says."""
        self.without = list(without) if without else None

    @property
    def parts(self) -> list[Any]:
        """The model itself, its base, and so on to the one without adapters."""
        return [self] if self.base is None else [self, *self.base.parts]

    @property
    def address(self) -> str:
        """What opens the model from any working folder: its path, or its name on the Hub."""
        return self.hub or str(self.folder.resolve())

    @property
    @abstractmethod
    def config(self) -> Any:
        """The configuration."""

    @property
    @abstractmethod
    def context(self) -> int | None:
        """How many tokens the model is made for, if it says so."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """How many tokens the model can read; None if its positions have no end."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many rows the model has for tokens."""

    @cached_property
    @abstractmethod
    def tokenizer(self) -> BraidTokenizer:
        """The tokenizer of the folder."""

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 over all files that determine the model's scores."""
        return model_hash(self.folder)

    @property
    def disk_bytes(self) -> int:
        """The size of the files of weights, with those of an adapter's base."""
        files = (path for part in self.parts for pattern in WEIGHT_FILES for path in part.folder.glob(pattern))
        return sum(path.stat().st_size for path in files)

    @cached_property
    def lineage(self) -> dict[str, Any] | None:
        """Where the model came from, if its folder says."""
        return load_lineage(self.folder)

    @property
    def steps(self) -> int | None:
        """The steps that the model was trained for."""
        return training_of(self.lineage or {}).get("steps")

    @property
    def tokens(self) -> int | None:
        """The tokens that the model was trained on."""
        return training_of(self.lineage or {}).get("tokens")

    @property
    def words(self) -> int | None:
        """The words that the model was trained on, as its lineage or its name says."""
        return training_of(self.lineage or {}).get("words") or words_in_name(self.folder.name)

    @abstractmethod
    def check(self) -> None:
        """Check configuration, active paths, switched-off modules and the header of the weights; nothing is loaded."""

    def check_with_tokenizer(self) -> None:
        """Check the model, that it has a tokenizer that Braid reads, and that it has a row for each of its tokens."""
        try:
            tokenizer = self.tokenizer
        except BraidError as error:
            what = "this model folder has no tokenizer that can be read"
            todo = "Put the tokenizer.json that the model was trained with into the folder. (Of a model of"
            python = "transformers: `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes it.)"
            raise BraidError(what, str(self.folder), f"{todo} {python}") from error
        self.check()
        check_vocabulary(self.vocab_size, tokenizer, str(self.folder))

    def load(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
        """The model in memory, in evaluation mode, with its paths and switches. Without a `dtype`, Braid's weights are
        of the type that config.json says, and those of others float32."""
        return self._load(device, dtype) if self.loader is None else self.loader(device)

    @abstractmethod
    def _load(self, device: str | torch.device, dtype: torch.dtype | None) -> Any:
        """What `load` does, by the backend."""

    def changed(self, name: str, sha256: str, loader: Loader) -> "OpenedModel":
        """This model as it is changed in memory, by a function that loads it: pruned, or left after a layer."""
        other = copy(self)
        other.name, other.sha256, other.loader = name, sha256, loader
        return other

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Which model this is, for the lineage of another that is trained from it."""

    def _named_record(self, name: str) -> dict[str, Any]:
        return {"model": name, **licence_record(self.folder)}


def find_tokenizer(folder: Path) -> BraidTokenizer | None:
    """The tokenizer of a model folder, or None where it has none that Braid reads."""
    has_bpe = any(folder.glob("*vocab.json")) and any(folder.glob("*merges.txt"))
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() or has_bpe else None
