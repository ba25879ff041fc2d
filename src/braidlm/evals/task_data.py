"""Where the data of tasks is: given by the user, or in a data folder under one of its usual names."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import given_path
from braidlm.evals.files.hub_data import PREFIX, fetch_from_hub
from braidlm.evals.tasks import TASKS

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
    """The path of each task's data; all missing data is reported at once, and `todo` says how to name it."""
    for name in own:
        if name not in tasks:
            raise BraidError(f"data is given for '{name}', which is not evaluated.{did_you_mean(name, tasks)}")
        if TASKS[name].built_in:
            raise BraidError(f"data is given for '{name}', which makes its items itself", todo="Leave it out.")
    paths, missing, collections = {}, [], []
    on_hub = {name: str(location) for name, location in own.items() if str(location).startswith(PREFIX)}
    for name in (name for name in tasks if name not in on_hub):
        path = given_path(own[name]) if name in own else data_here(name, root)
        if path is not None and (path == BUILT_IN or path.exists()):
            paths[name] = path
        elif path is not None:
            missing.append(f"{name}: there is no file or folder {path}")
        else:
            missing.append(f"{name}: its data is not in {data_root(root)}. {_with_folder(TASKS[name].fetch, root)}")
            collections.append(_with_folder(TASKS[name].collection, root))
    if missing:
        raise BraidError("\n".join([*missing, *filter(None, dict.fromkeys(collections))]), todo=todo)
    paths |= {name: fetch_from_hub(source, TASKS[name].hub, data_root(root)) for name, source in on_hub.items()}
    return {name: paths[name] for name in tasks}


def _with_folder(text: str, root: StrPath | None) -> str:
    """Instructions to get data, with the data folder in them."""
    return re.sub(r"\bDATA\b", lambda _: shlex.quote(str(data_root(root))), text)
