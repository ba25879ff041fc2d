"""Which models are served, when they are opened, and which leave memory."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.core.models.runs import CHECKPOINTS, RECIPE
from braidlm.serving import models as module
from braidlm.serving.engine import Engine, Request
from braidlm.serving.models import ServedModels, UnknownModel
from tests.serving.engines import GREEDY, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", -1.0)


def copies(model: Path, parent: Path, *names: str) -> list[Path]:
    return [Path(shutil.copytree(model, parent / name)) for name in names]


def make_run(folder: Path) -> Path:
    """A run that has no checkpoint yet."""
    (folder / CHECKPOINTS).mkdir(parents=True)
    (folder / RECIPE).write_text("model: {}\n")
    return folder


def add_checkpoint(run: Path, model: Path, steps: int) -> Path:
    folder = run / CHECKPOINTS / f"step-{steps:06d}"
    shutil.copytree(model, folder)
    write_json(folder / "lineage.json", {"made_by": "a test", "training": {"steps": steps}})
    return folder


def use(names: Any, work: Callable[[ServedModels], Awaitable[None]], **options: Any) -> None:
    """Serve some models for as long as some work takes, in an event loop."""

    async def run() -> None:
        models = ServedModels(names, **{"device": "cpu", "rows": 2, "length": 24, **options})
        try:
            await work(models)
        finally:
            await models.close()
        assert not models.engines

    asyncio.run(run())


def test_names_are_short_and_their_own(model: Path, tmp_path: Path) -> None:
    one, other = copies(model, tmp_path, "a/tiny", "b/tiny")
    study = tmp_path / "study"
    copies(model, study / "seed-1", "x", "y")
    assert list(ServedModels(one).served) == ["tiny"]
    assert list(ServedModels([one, other]).served) == ["a/tiny", "b/tiny"]
    assert list(ServedModels(study).served) == ["x", "y"]
    assert list(ServedModels([study, one]).served) == ["x", "y", "tiny"]


def test_a_folder_of_runs_serves_all_that_is_in_it(model: Path, tmp_path: Path) -> None:
    copies(model, tmp_path, "made", "study/seed-1/x")
    make_run(tmp_path / "young")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    models = ServedModels(tmp_path)
    assert list(models.served) == ["made", "x", "young"]
    assert not any(served.named for served in models.served.values())


@pytest.mark.parametrize("name", ["nothing/here/at-all", "empty"])
def test_what_holds_no_model_is_told_before_anything_starts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BraidError, match=r"no such folder|no model"):
        ServedModels(name)
    with pytest.raises(BraidError, match="no model"):
        ServedModels([])


def test_unknown_names_are_told_with_the_nearest(model: Path) -> None:
    with pytest.raises(UnknownModel, match="Did you mean 'tiny'"):
        ServedModels(model).find("tinny")
    with pytest.raises(UnknownModel):
        ServedModels(model).find(str(model))


def test_named_models_are_opened_at_the_start_and_others_at_their_first_use(model: Path, tmp_path: Path) -> None:
    copies(model, tmp_path, "a", "b")

    async def named(models: ServedModels) -> None:
        await models.open_named()
        assert list(models.engines) == ["a"]

    async def found(models: ServedModels) -> None:
        await models.open_named()
        assert not models.engines
        engine = await models.engine("b")
        assert models.engines == {"b": engine}
        assert await models.engine("b") is engine

    use(tmp_path / "a", named)
    use(tmp_path, found)


def test_many_first_uses_open_a_model_once(model: Path) -> None:
    async def at_once(models: ServedModels) -> None:
        assert len({await each for each in asyncio.as_completed([models.engine("tiny") for _ in range(5)])}) == 1

    use(model, at_once)


class HeldEngine(Engine):
    """An engine that can be busy for as long as a test wants."""

    held = False

    @property
    def running(self) -> int:
        return super().running + self.held


def test_idle_models_leave_memory_and_busy_ones_do_not(model: Path, tmp_path: Path) -> None:
    copies(model, tmp_path, "a", "b", "c")

    async def one_after_another(models: ServedModels) -> None:
        first = await models.engine("a")
        assert isinstance(first, HeldEngine)
        first.held = True
        text = first.submit(Request((1, 2), 20, GREEDY, ignore_eos=True))
        await models.engine("b")
        assert set(models.engines) == {"a", "b"}
        tokens = [token async for some in text.tokens() for token in some]
        assert len(tokens) == 20
        first.held = False
        while first.running:
            await asyncio.sleep(0)
        await models.engine("c")
        assert list(models.engines) == ["c"]
        assert await models.engine("a") is not first

    use(tmp_path, one_after_another, keep=1, make_engine=HeldEngine)


def test_a_run_is_its_newest_checkpoint(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    async def while_it_trains(models: ServedModels) -> None:
        await models.open_named()
        with pytest.raises(BraidError, match="no checkpoint yet"):
            await models.engine("run")
        first = add_checkpoint(run, model, 100)
        engine = await models.engine("run")
        assert models.find("run").opened.folder == first
        assert await models.engine("run") is engine
        text = engine.submit(Request((1, 2), 20, GREEDY, ignore_eos=True))
        second = add_checkpoint(run, model, 200)
        assert await models.engine("run") is not engine
        assert models.find("run").folder == second
        assert len([token async for some in text.tokens() for token in some]) == 20  # the older one ends its texts

    use(run, while_it_trains)


def test_a_model_that_cannot_be_opened_is_an_error_each_time(model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, "broken")
    (folder / "model.safetensors").write_bytes(b"nothing")

    async def twice(models: ServedModels) -> None:
        for _ in range(2):
            with pytest.raises(BraidError):
                await models.engine("broken")

    use(tmp_path, twice)
