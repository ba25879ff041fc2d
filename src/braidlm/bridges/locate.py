"""Finding what to convert: a folder or file here, or a model on the Hub by name; and its tokenizer."""

import os
from dataclasses import dataclass
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.models.names import find_model, title_of
from braidlm.core.models.runs import MODEL_CONFIGS, is_model_folder
from braidlm.core.reading import given_path
from braidlm.data.tokenizing.build import BraidTokenizer, load_tokenizer

DOWNLOADED = [
    *MODEL_CONFIGS,
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "README.md",
]
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that hold a whole model's weights; torch.save writes all but the first."""


@dataclass(frozen=True)
class Location:
    """The path of a model, and the name that its lineage gives it."""

    path: Path
    """Its folder, or its file of weights."""
    name: str
    config: Path | None = None
    """The configuration that was given with a file of weights."""


def locate_model(source: str | Path) -> Location:
    """The folder of a model, by any name that the verbs take; a name of nothing here is looked up on the Hub."""
    path = given_path(source)
    if path.is_file():
        raise BraidError(
            "this is a file; give the folder that holds config.json and the weights",
            str(source),
            "If it is a file of weights that needs no folder, say of which format with `--from`.",
        )
    if _may_be_on_hub(str(source), path):
        return _download(str(source))
    folder = find_model(path)
    return Location(folder, title_of(folder))


def on_disk(name: str | Path) -> str | Path:
    """The folder of a model that is named as the Hub does, ORG/NAME, which is fetched; any other name as it is."""
    is_hubs = isinstance(name, str) and name.count("/") == 1 and _may_be_on_hub(name, given_path(name))
    return _download(str(name)).path if is_hubs else name


def _may_be_on_hub(source: str, path: Path) -> bool:
    """`gpt2` or `openai-community/gpt2`, where there is neither such a folder nor one of the first name."""
    is_path = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    return not (is_path or os.path.lexists(path) or (len(path.parts) > 1 and path.parent.is_dir()))


def find_file(source: str | Path, config: str | Path | None) -> Location:
    """A file of weights, with the file of its configuration if there is one."""
    path = given_path(source)
    if path.is_dir():
        raise BraidError("this is a folder; give the file of the weights", str(source))
    if not path.is_file():
        raise BraidError("there is no such file", str(source))
    if path.suffix not in WEIGHT_SUFFIXES:
        raise BraidError(f"this is no file of weights that Braid reads ({', '.join(WEIGHT_SUFFIXES)})", str(source))
    return Location(path, path.name, None if config is None else given_path(config))


def find_tokenizer(folder: Path) -> BraidTokenizer | None:
    """The tokenizer of a model folder, or None where it has none that Braid reads."""
    has_bpe = any(folder.glob("*vocab.json")) and any(folder.glob("*merges.txt"))
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() or has_bpe else None


def _download(name: str) -> Location:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, allow_patterns=DOWNLOADED, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise BraidError(
            f"'{name}' on the Hub asks you to accept its terms first",
            todo=f"Accept them at https://huggingface.co/{name} and log in with `hf auth login`.",
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise BraidError(
            f"there is no folder '{name}', and no model of that name on the Hub",
            todo="Check the spelling; for a private model log in with `hf auth login`.",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        raise BraidError(
            f"there is no folder '{name}', and the Hub cannot be reached ({type(error).__name__})",
            todo="Check the path; or download the model where there is a connection and give its folder.",
        ) from None
    if not is_model_folder(folder):
        raise BraidError(f"'{name}' on the Hub has no config.json", todo="It is not a transformers model.")
    return Location(folder, f"{name}@{folder.name}")  # a snapshot's folder is named after its commit
