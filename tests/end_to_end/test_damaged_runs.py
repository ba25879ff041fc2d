"""Damage in a run folder that hashes of weights do not see: each is told with what to do, and nothing is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny_runs import records, tiny_recipe, written

LAST = "checkpoints/step-000012"


@pytest.fixture(scope="module")
def finished(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from braidlm.training.train import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_recipe({"stories": stories}, folder, log={"every": 2}))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def again(run: Path, stories: Path, tmp_path: Path, braid: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the run's own command again."""
    recipe = written(tiny_recipe({"stories": stories}, run, log={"every": 2}), tmp_path)
    return lambda *overrides: braid("train", recipe, *overrides)


def test_a_damaged_tokenizer_of_the_last_checkpoint_is_repaired_by_the_same_command(
    run: Path, finished: Path, again: Callable[..., Any], braid: Callable[..., Any]
) -> None:
    damaged = run / LAST / "tokenizer.json"
    damaged.write_text('{"version":')
    answer = braid("generate", run, "Once")
    assert answer.code == 2
    assert "the same `braid train` command repairs the last checkpoint of a run" in answer.err
    answer = again()
    assert answer.code == 0
    assert "checkpoint step-000012 cannot be used (tokenizer.json is damaged); trying the one before" in answer.err
    assert damaged.read_bytes() == (finished / LAST / "tokenizer.json").read_bytes()
    assert records(run) == records(finished)


def lose_the_file(path: Path) -> None:
    path.unlink()


def lose_a_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def spoil_a_line(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0][:20] + "\n", *lines[1:]]))


@pytest.mark.parametrize(("lose", "lost"), [(lose_the_file, 5), (lose_a_line, 1), (spoil_a_line, 1)])
def test_lost_records_are_told(lose: Callable[[Path], None], lost: int, run: Path, again: Callable[..., Any]) -> None:
    shutil.rmtree(run / "states" / "step-000012")  # so that the run has something to do
    lose(run / "metrics.jsonl")
    answer = again()
    assert answer.code == 0
    assert f"metrics.jsonl: {lost} of 5 records up to step 8 are lost, so the curves have gaps" in answer.err
    assert "put it back and run the same command again" in answer.err
    assert again().err == "", "it is told once"


def test_no_record_is_missed_in_a_whole_run(run: Path, again: Callable[..., Any]) -> None:
    shutil.rmtree(run / "states" / "step-000012")
    assert "lost" not in again().err


LINKS = ["metrics.jsonl", "recipe.yaml", "states", "checkpoints", "states/step-000012", LAST, ""]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_to_nothing(name: str, run: Path, tmp_path: Path, again: Callable[..., Any]) -> None:
    moved, link = tmp_path / "moved", run / name
    link.rename(moved)
    link.symlink_to(tmp_path / "not-mounted")
    answer = again()
    assert answer.code == 2
    assert f"error: {link}: this link leads to nothing ({tmp_path / 'not-mounted'})" in answer.err
    assert "Restore what it pointed to, or remove the link" in answer.err
    os.replace(moved, tmp_path / "not-mounted")
    assert again().code == 0, "links that lead somewhere are followed"


def test_fresh_replaces_links(run: Path, tmp_path: Path, again: Callable[..., Any]) -> None:
    shutil.rmtree(run / "states")
    (run / "states").symlink_to(tmp_path / "nowhere")
    answer = again("--fresh")
    assert answer.code == 0, answer.err
    assert (run / "states" / "step-000012").is_dir()
