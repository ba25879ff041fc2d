"""Where the data of tasks is: given by the user, or in a data folder under one of its usual names; or on the Hub.

A user names data on the Hub as `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME@REVISION`; `hub:` alone is the task's own data
set. Rows are written as JSONL into the data folder, `hub/NAME/CONFIG/SPLIT.jsonl` (of a task whose sets are
configurations `hub/NAME/all/CONFIG.jsonl`), and read from there the next time, so that only the first evaluation needs
the network. NAME may also be a local folder in the Hub's layout, which is read every time.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import atomic_folder, write_text
from braidlm.core.reading import check_openable, given_path
from braidlm.data.sources.rows import hub_library, hub_name, hub_parts
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import HUB, HubSource

StrPath = str | Path
VARIABLE = "BRAID_DATA"
DEFAULT = "data"
SAY_WHERE = f"Say where data is with `--data FOLDER` (or {VARIABLE}=FOLDER), or with `--data TASK=PATH`."
BUILT_IN = Path("built-in")
"""Stands for the data of a task that makes its items itself."""


def data_root(root: StrPath | None) -> Path:
    """The data folder: the given one, else that of the environment, else `data`."""
    return given_path(root if root is not None else os.environ.get(VARIABLE) or DEFAULT)


def data_here(task: str, root: StrPath | None = None) -> Path | None:
    """Where the data of a task is, if it is in the data folder; `BUILT_IN` if it needs none."""
    if TASKS[task].built_in:
        return BUILT_IN
    candidates = [data_root(root) / location for location in TASKS[task].locations]
    return next((path for path in candidates if path.exists()), None)


def find_data(
    tasks: Sequence[str], root: StrPath | None, own: Mapping[str, StrPath], todo: str = SAY_WHERE
) -> dict[str, Path]:
    """The path of each task's data, or under their names those of its texts; all missing data is reported at once, and
    `todo` says how to name it."""
    task_of = {data: TASKS[name] for name in tasks for data in TASKS[name].texts or (name,)}
    for name in own:
        if name not in task_of:
            raise BraidError(f"data is given for '{name}', which is not evaluated.{did_you_mean(name, task_of)}")
        if task_of[name].built_in:
            raise BraidError(f"data is given for '{name}', which makes its items itself", todo="Leave it out.")
    folder, paths, missing, collections = data_root(root), {}, [], []
    on_hub = {name: str(location) for name, location in own.items() if str(location).startswith(HUB)}
    for name, task in task_of.items():
        if name in on_hub or (name in task.texts[1:] and name not in own):
            continue
        path = given_path(own[name]) if name in own else None if task.texts else data_here(name, root)
        if path is None:
            texts = (task.fetch, task.collection)
            fetch, collection = (re.sub(r"\bDATA\b", lambda _: shlex.quote(str(folder)), text) for text in texts)
            missing.append(f"{name}: its data is not in {folder}. {fetch}")
            collections.append(collection)
        elif path != BUILT_IN and not path.exists():
            check_openable(path)
            missing.append(f"{name}: there is no file or folder {path}")
        else:
            paths[name] = path
    if missing:
        if here := [name for name in tasks if name in paths or name in on_hub]:
            todo += f"\nThere is data for {' '.join(here)}."
        raise BraidError("\n".join([*missing, *filter(None, dict.fromkeys(collections))]), todo=todo)
    paths |= {name: fetch_from_hub(source, task_of[name].hub, folder) for name, source in on_hub.items()}
    return {name: paths[name] for name in task_of if name in paths}


def fetch_from_hub(name: str, default: HubSource | None, root: Path) -> Path:
    """The folder with the rows of a data set (`hub:NAME`), a file for each split or set."""
    if default is None:
        raise BraidError("this task is not read from the Hub", name, "Give a file or a folder.")
    repository, split, revision = hub_parts(name.removeprefix(HUB))
    splits = (split,) if split else default.splits
    source = replace(default, name=repository or default.name, splits=splits, revision=revision or None)
    is_local = given_path(source.name).is_dir()
    folder_name = Path(source.name).name if is_local else source.name.replace("/", "--")
    folder = root / "hub" / "@".join(filter(None, (folder_name, source.revision)))
    folder /= "all" if default.sets else default.config or "default"
    if not default.sets:
        files = {split: folder / f"{split}.jsonl" for split in source.splits}
        if is_local or not all(file.exists() for file in files.values()):
            for split, rows in _load(source).items():
                _write_rows(files[split], rows)
    elif is_local or not folder.is_dir():
        configs = _configs(source)
        # A file for each configuration; atomically, so that an interrupted download leaves nothing behind.
        with atomic_folder(folder, replace=True) as part:
            for config in configs:
                (rows,) = _load(replace(source, config=config, splits=source.splits[:1])).values()
                _write_rows(part / f"{config}.jsonl", rows)
    return folder


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _load(source: HubSource) -> dict[str, Sequence[dict[str, Any]]]:
    configs = _configs(source)
    config = source.config if source.config in configs or len(configs) != 1 else configs[0]
    with _library(source) as library:
        load = partial(library.load_dataset, hub_name(source.name), config, revision=source.revision, streaming=True)
        return {split: list(load(split=split)) for split in source.splits}


def _configs(source: HubSource) -> list[str]:
    with _library(source) as library:
        return list(library.get_dataset_config_names(hub_name(source.name), revision=source.revision))


def _library(source: HubSource) -> AbstractContextManager[Any]:
    return hub_library(HUB + source.name, f"It is to have the splits {', '.join(source.splits)}.")
