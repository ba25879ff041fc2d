"""Task data from the Hugging Face Hub, when it is asked for by name: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME@REVISION`.

Rows are written as JSONL into the data folder, `hub/NAME/CONFIG/SPLIT.jsonl`, and found there the next time, so that
only the first evaluation needs the network. NAME may also be a local folder in the Hub's layout, which is read anew
each time; `hub:` alone is the task's usual data set.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_text

PREFIX = "hub:"
FOLDER = "hub"


@dataclass(frozen=True)
class HubSource:
    """Where a task's data is on the Hub."""

    name: str
    config: str | None = None
    splits: tuple[str, ...] = ("test",)
    revision: str | None = None

    @property
    def command(self) -> str:
        """For a sentence on how to get the data, with TASK to be filled in."""
        return f"`--data {{task}}={PREFIX}{self.name}` gets it from the Hub (`{self.name}`)."


def fetched(place: str, usual: HubSource | None, root: Path) -> Path:
    """The folder with the rows of `place` (which begins with `hub:`), a file for each split."""
    if usual is None:
        raise BraidError("this task is not read from the Hub", place, "Give a file or a folder.")
    source = _source(place.removeprefix(PREFIX), usual)
    is_local = Path(source.name).expanduser().is_dir()
    name = Path(source.name).name if is_local else source.name.replace("/", "--")
    folder = root / FOLDER / "@".join(filter(None, (name, source.revision))) / (usual.config or "default")
    files = {split: folder / f"{split}.jsonl" for split in source.splits}
    if is_local or not all(file.exists() for file in files.values()):
        for split, rows in _load(source, PREFIX + source.name).items():
            write_text(files[split], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return folder


def _source(given: str, usual: HubSource) -> HubSource:
    name, _, split = given.partition(":")
    name, _, revision = name.partition("@")
    return replace(
        usual, name=name or usual.name, splits=(split,) if split else usual.splits, revision=revision or None
    )


def _load(source: HubSource, where: str) -> dict[str, Sequence[dict[str, Any]]]:
    try:
        from datasets import get_dataset_config_names, load_dataset
    except ImportError:
        raise BraidError(
            "reading a Hub data set needs the package 'datasets'", where, "`pip install 'braidlm[data]'`"
        ) from None
    name = str(Path(source.name).expanduser()) if Path(source.name).expanduser().is_dir() else source.name
    try:
        configs = get_dataset_config_names(name, revision=source.revision)
        config = source.config if source.config in configs or len(configs) != 1 else configs[0]
        return {
            split: list(load_dataset(name, config, split=split, revision=source.revision, streaming=True))
            for split in source.splits
        }
    except ConnectionError as error:
        raise BraidError(
            f"the Hub cannot be reached ({type(error).__name__})",
            where,
            "Check the connection, or download the data set's files and give their folder.",
        ) from None
    except (ValueError, OSError) as error:  # its errors name the splits and configurations that exist
        what = f"this data set cannot be opened: {str(error).strip().splitlines()[0]}"
        raise BraidError(what, where, f"It is to have the splits {', '.join(source.splits)}.") from None
