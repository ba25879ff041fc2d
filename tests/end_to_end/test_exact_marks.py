"""Budgets and checkpoints by words and tokens are met to the word and to the token."""

from pathlib import Path

import pytest

from braidlm.core.reading import read_json
from braidlm.data.loading.loader import Loader
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe


def trained(folder: Path, unit: str) -> dict[str, int]:
    """The amount that each checkpoint's lineage gives."""
    found = {p.name: read_json(p / "lineage.json")["training"][unit] for p in (folder / "checkpoints").iterdir()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def test_words(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are counted a second time, from the labels that are really trained."""
    counted = [0]
    whole = Loader.next_batch

    def watched(self: Loader, *args: object) -> object:
        batch = whole(self, *args)
        used = batch.labels.reshape(-1) != -100
        counted.append(counted[-1] + int(batch.whole.words.reshape(-1)[used].sum()))
        return batch

    monkeypatch.setattr(Loader, "next_batch", watched)
    run = train(
        tiny_recipe(
            {"stories": stories},
            tmp_path / "run",
            training={"budget": "3000 words"},
            checkpoints={"every": "500 words to 2000, then 1000", "keep": None},
        )
    )
    expected = {"chck_500": 500, "chck_1k": 1000, "chck_1500": 1500, "chck_2k": 2000, "chck_3k": 3000}
    assert trained(run.folder, "words") == expected
    assert (run.progress.words, run.model.name) == (3000, "chck_3k")
    assert set(expected.values()) <= set(counted)
    assert counted[-1] == 3000


def test_tokens(stories: Path, tmp_path: Path) -> None:
    run = train(
        tiny_recipe(
            {"stories": stories},
            tmp_path / "run",
            training={"budget": "1111 tokens"},
            checkpoints={"every": "300 tokens", "keep": None},
        )
    )
    assert trained(run.folder, "tokens") == {
        "tokens-300": 300,
        "tokens-600": 600,
        "tokens-900": 900,
        "tokens-1111": 1111,
    }
    # 4 x 32 tokens a step; a step that would pass a mark is two
    assert run.progress.steps == -(-1111 // 128) + 3


def test_a_pace_of_words_within_a_budget_of_steps(stories: Path, tmp_path: Path) -> None:
    run = train(
        tiny_recipe(
            {"stories": stories},
            tmp_path / "run",
            training={"budget": "10 steps"},
            checkpoints={"every": "200 words", "keep": None},
        )
    )
    marks = list(trained(run.folder, "words").values())
    assert marks[:-1] == [200 * (i + 1) for i in range(len(marks) - 1)]
    assert run.progress.steps == 10


def test_steps(stories: Path, tmp_path: Path) -> None:
    run = train(tiny_recipe({"stories": stories}, tmp_path / "run", checkpoints={"every": "5 steps to 10"}))
    assert trained(run.folder, "steps") == {"step-000005": 5, "step-000010": 10, "step-000012": 12}
    assert run.progress.tokens == 12 * 4 * 32


def test_validation_and_samples_follow_their_own_paces(stories: Path, tmp_path: Path) -> None:
    train(
        tiny_recipe(
            {"stories": stories},
            tmp_path / "run",
            validation={"every": "5 steps"},
            samples={"every": "4 steps", "prompts": ["Once"], "tokens": 3},
        )
    )
    assert [r["step"] for r in records(tmp_path / "run", "validation")] == [5, 10, 12]
    assert [r["step"] for r in records(tmp_path / "run", "sample")] == [4, 8, 12]
    assert [r["step"] for r in records(tmp_path / "run", "train")] == [5, 10, 12]
