"""Where the data of tasks is: named by the user, or found in a data folder under its usual name."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.evals.files.hub_data import PREFIX, fetched
from braidlm.evals.tasks import TASKS

Place = str | Path
VARIABLE = "BRAID_DATA"
USUAL = "data"


def data_root(given: Place | None) -> Path:
    """The data folder: the one given, else that of the environment, else `data`."""
    return Path(given if given is not None else os.environ.get(VARIABLE) or USUAL).expanduser()


def data_here(task: str, root: Place | None = None) -> Path | None:
    """Where the data of a task is, if it is in the data folder."""
    return _look(task, data_root(root))


def find_data(tasks: Sequence[str], root: Place | None, own: Mapping[str, Place]) -> dict[str, Path]:
    """The place of each task's data; all that are missing are named at once."""
    for name in own:
        if name not in tasks:
            raise BraidError(f"data is given for '{name}', which is not evaluated.{did_you_mean(name, tasks)}")
    found, missing, collections = {}, [], []
    on_hub = {name: str(place) for name, place in own.items() if str(place).startswith(PREFIX)}
    for name in (name for name in tasks if name not in on_hub):
        place = Path(own[name]).expanduser() if name in own else _look(name, data_root(root))
        if place is not None and place.exists():
            found[name] = place
        elif place is not None:
            missing.append(f"{name}: there is no file or folder {place}")
        else:
            missing.append(f"{name}: its data is not in {data_root(root)}. {_with_folder(TASKS[name].fetch, root)}")
            collections.append(_with_folder(TASKS[name].collection, root))
    if missing:
        raise BraidError(
            "\n".join([*missing, *filter(None, dict.fromkeys(collections))]),
            todo=f"Say where data is with `--data FOLDER` (or {VARIABLE}=FOLDER), or with `--data TASK=PATH`.",
        )
    found |= {name: fetched(place, TASKS[name].hub, data_root(root)) for name, place in on_hub.items()}
    return {name: found[name] for name in tasks}


def _with_folder(text: str, root: Place | None) -> str:
    """How to get data, with the folder that it is to be put into."""
    return re.sub(r"\bDATA\b", lambda _: shlex.quote(str(data_root(root))), text)


def _look(name: str, root: Path) -> Path | None:
    places = [root / place for place in TASKS[name].places]
    return next((place for place in places if place.exists()), None)
