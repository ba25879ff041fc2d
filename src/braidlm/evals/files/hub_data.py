"""Task data from the Hugging Face Hub, where the user names it: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME@REVISION`.

Rows are written as JSONL into the data folder, `hub/NAME/CONFIG/SPLIT.jsonl` (of a task whose sets are configurations
`hub/NAME/all/CONFIG.jsonl`), and read from there the next time, so that only the first evaluation needs the network.
NAME may also be a local folder in the Hub's layout, which is read every time; `hub:` alone is the task's own data set.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_text
from braidlm.core.reading import given_path

PREFIX = "hub:"
FOLDER, ALL = "hub", "all"


@dataclass(frozen=True)
class HubSource:
    """The data set of a task on the Hub."""

    name: str
    config: str | None = None
    splits: tuple[str, ...] = ("test",)
    revision: str | None = None
    sets: bool = False
    """Whether each configuration is one of the task's sets: then a file for each, of the first split."""

    @property
    def command(self) -> str:
        """A sentence on how to get the data; `{task}` is to be filled in."""
        return f"`--data {{task}}={PREFIX}` gets it from the Hub (`{self.name}`)."


def fetch_from_hub(name: str, default: HubSource | None, root: Path) -> Path:
    """The folder with the rows of a data set (`hub:NAME`), a file for each split or set."""
    if default is None:
        raise BraidError("this task is not read from the Hub", name, "Give a file or a folder.")
    source = _source(name.removeprefix(PREFIX), default)
    is_local = given_path(source.name).is_dir()
    folder_name = Path(source.name).name if is_local else source.name.replace("/", "--")
    folder = root / FOLDER / "@".join(filter(None, (folder_name, source.revision)))
    if default.sets:
        if is_local or not (folder / ALL).is_dir():
            _write_sets(source, folder / ALL)
        return folder / ALL
    folder /= default.config or "default"
    files = {split: folder / f"{split}.jsonl" for split in source.splits}
    if is_local or not all(file.exists() for file in files.values()):
        for split, rows in _load(source, PREFIX + source.name).items():
            _write_rows(files[split], rows)
    return folder


def _write_sets(source: HubSource, folder: Path) -> None:
    """Write a file for each configuration; atomically, so that an interrupted download leaves nothing behind."""
    where, split = PREFIX + source.name, source.splits[0]
    configs = _configs(source, where)
    with atomic_folder(folder, replace=True) as part:
        for config in configs:
            rows = _load(replace(source, config=config, splits=(split,)), where)[split]
            _write_rows(part / f"{config}.jsonl", rows)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _source(text: str, default: HubSource) -> HubSource:
    name, _, split = text.partition(":")
    name, _, revision = name.partition("@")
    return replace(
        default, name=name or default.name, splits=(split,) if split else default.splits, revision=revision or None
    )


def _load(source: HubSource, where: str) -> dict[str, Sequence[dict[str, Any]]]:
    configs = _configs(source, where)
    config = source.config if source.config in configs or len(configs) != 1 else configs[0]
    from datasets import load_dataset

    with _explained(source, where):
        return {
            split: list(load_dataset(_name(source), config, split=split, revision=source.revision, streaming=True))
            for split in source.splits
        }


def _configs(source: HubSource, where: str) -> list[str]:
    try:
        from datasets import get_dataset_config_names
    except ImportError:
        todo = "`pip install 'braidlm[data]'`"
        raise BraidError("reading a Hub data set needs the package 'datasets'", where, todo) from None
    with _explained(source, where):
        return list(get_dataset_config_names(_name(source), revision=source.revision))


def _name(source: HubSource) -> str:
    """The name for `datasets`: a local folder by its expanded path."""
    folder = given_path(source.name)
    return str(folder) if folder.is_dir() else source.name


@contextlib.contextmanager
def _explained(source: HubSource, where: str) -> Iterator[None]:
    """Errors of `datasets` as BraidErrors; its messages name the existing splits and configurations."""
    try:
        yield
    except ConnectionError as error:
        raise BraidError(
            f"the Hub cannot be reached ({type(error).__name__})",
            where,
            "Check the connection, or download the data set's files and give their folder.",
        ) from None
    except (ValueError, OSError) as error:
        what = f"this data set cannot be opened: {str(error).strip().splitlines()[0]}"
        raise BraidError(what, where, f"It is to have the splits {', '.join(source.splits)}.") from None
