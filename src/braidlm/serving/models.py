"""The models that are served: their names are known at the start, and each is opened when it is first used."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.runs import is_model_folder, is_run, newest_checkpoint
from braidlm.opening.names import (
    StrPath,
    find_or_fetch,
    find_sources,
    is_hub_name,
    model_folder,
    short_names,
    study_models,
)
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel
from braidlm.serving.engine import Engine

LOOK_EVERY = 5.0
"""Seconds between two looks whether a run has a newer checkpoint."""
KEPT = 4
"""The models that stay in memory unless somebody says how many."""


class NotFound(BraidError):
    """What a request names and does not exist: 404 over HTTP."""


class UnknownModel(NotFound):
    """A name that no served model has."""


@dataclass
class ServedModel:
    """A model by its name; its engine exists while it is in memory."""

    name: str
    source: Path
    """Its model folder, or the run whose newest checkpoint it is."""
    hub: str | None = None
    named: bool = True
    """Whether the user named it, and not only a folder that it is in."""
    engine: Engine | None = None
    folder: Path | None = None
    """The folder that the engine's weights are of."""
    used: float = 0.0
    looked: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _opened: OpenedModel | None = field(default=None, repr=False)

    @property
    def run(self) -> Path | None:
        """The folder of the run that it is the newest checkpoint of."""
        return self.source if is_run(self.source) else None

    @property
    def opened(self) -> OpenedModel:
        """The model as it is on the disk, of a run the newest checkpoint; its weights are not read."""
        if self._opened is None or (self.run is not None and time.monotonic() > self.looked + LOOK_EVERY):
            folder, self.looked = model_folder(self.source), time.monotonic()
            if self._opened is None or self._opened.folder != folder:
                self._opened = open_model(folder)
                self._opened.hub, self._opened.name = self.hub, self.name
        return self._opened


class ServedModels:
    """All models of one server. Its methods belong to the server's event loop, except for `served` and `folders`."""

    def __init__(
        self,
        names: StrPath | Sequence[StrPath],
        device: str = "auto",
        rows: int = 64,
        length: int | None = None,
        waiting: int = 256,
        keep: int | None = None,
        make_engine: Callable[..., Engine] = Engine,
    ):
        """`names` are model folders, runs, studies, folders of these, or ORG/NAME on the Hub.

        `keep` is how many models stay in memory while nobody uses them: by default all that are named one by one.
        """
        self.served = {model.name: model for model in self._find([names] if isinstance(names, StrPath) else names)}
        named = sum(model.named for model in self.served.values())
        self.keep = max(KEPT, named) if keep is None else max(1, keep)
        self.rows, self.waiting = rows, waiting
        self._options = {"device": device, "rows": rows, "length": length, "waiting": waiting}
        self._make_engine = make_engine
        self._closing: set[asyncio.Task[None]] = set()

    def _find(self, names: Sequence[StrPath]) -> list[ServedModel]:
        """What the names stand for; in a folder of runs, everything that can be served."""
        sources: dict[Path, bool] = {}
        hub: list[ServedModel] = []
        for name in names:
            path = Path(name).expanduser()
            if is_hub_name(name):
                folder, known = find_or_fetch(name)
                hub.append(ServedModel(str(name), folder, known))
            elif path.is_dir() and not (is_model_folder(path) or is_run(path) or study_models(path)):
                found = [source for inside in sorted(path.iterdir()) for source in _sources(inside)]
                if not found:
                    todo = "Name a model folder, a run, a study, or a folder that holds some."
                    raise BraidError("there is no model and no run in this folder", str(path), todo)
                sources |= {source: False for source in found if source not in sources}
            else:
                found = find_sources(name)
                sources |= dict.fromkeys(found, len(found) == 1)
        if not sources and not hub:
            raise BraidError("there is no model", todo="Name a model folder, a run, a study, or a folder of runs.")
        own = [ServedModel(short, source, named=sources[source]) for short, source in short_names([*sources]).items()]
        return [*own, *hub]

    def find(self, name: str) -> ServedModel:
        """The model of a name; what a request says is only ever looked up here, and never a path."""
        if (model := self.served.get(name)) is None:
            raise UnknownModel(f"there is no model '{name[:200]}'.{did_you_mean(name[:200], self.served)}")
        return model

    async def open_named(self) -> None:
        """Load the models that were named one by one; a run may have no checkpoint yet."""
        for model in [model for model in self.served.values() if model.named][: self.keep]:
            if model.run is None or newest_checkpoint(model.run) is not None:
                await self.engine(model.name)

    async def engine(self, name: str) -> Engine:
        """The engine of a model, for a request that is submitted at once: later it may have left memory again."""
        model = self.find(name)
        async with model.lock:
            before, opened = model.engine, model.opened
            if before is None or model.folder != opened.folder:
                model.engine = await asyncio.to_thread(self._make_engine, opened, **self._options)
                model.folder = opened.folder
                if before is not None:
                    self._retire(before)
            model.used = time.monotonic()
            engine = model.engine
            assert engine is not None
        self._make_room(model)
        return engine

    def _make_room(self, current: ServedModel) -> None:
        """Let idle models that were not used for longest leave memory, beyond those that are kept."""
        loaded = [model for model in self.served.values() if model.engine is not None]
        idle = [model for model in loaded if not model.lock.locked() and model is not current]
        idle = [model for model in idle if model.engine and not model.engine.running + model.engine.waiting]
        for model in sorted(idle, key=lambda model: model.used)[: max(0, len(loaded) - self.keep)]:
            assert model.engine is not None
            self._retire(model.engine)
            model.engine = None

    def _retire(self, engine: Engine) -> None:
        """Close an engine beside the event loop, after what still runs in it."""
        task = asyncio.create_task(asyncio.to_thread(engine.close))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines in memory by the names of their models."""
        return {name: model.engine for name, model in self.served.items() if model.engine is not None}

    async def close(self) -> None:
        """End all engines; what still runs in them is cancelled."""
        engines = list(self.engines.values())
        for model in self.served.values():
            model.engine = None
        closing: list[Any] = [asyncio.to_thread(engine.close, False) for engine in engines]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)


def _sources(path: Path) -> list[Path]:
    """The runs, model folders and models of studies that an entry of a folder is."""
    if not path.is_dir() or path.name.startswith("."):
        return []
    return [path] if is_model_folder(path) or is_run(path) else study_models(path)
