"""A recipe's data section: mixes and curricula, shares that do not overlap, one tokenizer, prepared once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.loading import open_data as opening
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.streams import TokenStream
from braidlm.data.packing.prepare import prepare
from braidlm.model.config.strict import decode
from braidlm.training.train import train
from tests.training.tiny_runs import tiny_recipe


def opened(**data: Any) -> OpenData:
    return open_data(decode(DataConfig, data))


def documents(stream: TokenStream) -> set[int]:
    return set(stream.subset.choose(stream.data.manifest.documents).tolist())


def text_file(path: Path, documents: int, word: str = "story") -> Path:
    path.write_text("\n\n".join(f"A {word} with the number {n} and some more words." for n in range(documents)))
    return path


@pytest.mark.parametrize("holdout", [0.05, 0.1, 0.33])
def test_shares_and_holdout_never_overlap(holdout: float, stories: Path) -> None:
    def one(start: float, stop: float) -> dict[str, Any]:
        return {"path": str(stories), "holdout": holdout, "subset": {"start": start, "stop": stop}}

    data = opened(sets={"a": one(0, 0.6), "b": one(0.6, 1), "c": {"path": str(stories), "holdout": holdout}})
    a, b, c = map(documents, data.train)
    held = documents(data.validation[0])
    assert all(documents(stream) == held for stream in data.validation)
    assert not a & b
    assert not c & held
    assert a | b == c
    assert c | held == set(range(120))
    assert len(a) == pytest.approx(0.6 * len(c), abs=1)
    assert len(held) == pytest.approx(120 * holdout, abs=1)


def test_no_holdout_and_no_validation(stories: Path, tmp_path: Path) -> None:
    data = opened(sets={"a": {"path": str(stories), "holdout": 0}})
    assert data.validation == []
    assert documents(data.train[0]) == set(range(120))
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 2})
    recipe["data"]["sets"]["stories"]["holdout"] = 0
    assert train(recipe).finished
    assert '"validation"' not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_other_text_to_validate_on(stories: Path, maths: Path, tmp_path: Path) -> None:
    data = opened(sets={"a": {"path": str(stories), "validation": str(maths)}})
    assert data.validation[0].data.folder == maths
    assert documents(data.train[0]) == set(range(120))
    text_file(tmp_path / "held.txt", 9)
    sets = {"a": {"path": str(stories), "validation": str(tmp_path / "held.txt")}}
    data = opened(sets=sets, cache=str(tmp_path / "cache"))
    assert (data.validation[0].documents, data.validation[0].name) == (9, "a")


def test_different_tokenizers_are_refused(stories: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    prepare("maths", other, documents=50, vocab_size=280, workers=1)
    with pytest.raises(BraidError) as caught:
        opened(sets={"a": {"path": str(stories)}, "b": {"path": str(other)}})
    assert "other: data sets 'a' and 'b' were prepared with different tokenizers: " in str(caught.value)
    assert "`braid prepare SOURCE --tokenizer DIR --out DIR`" in str(caught.value)
    with pytest.raises(BraidError, match="were prepared with different tokenizers"):
        opened(sets={"a": {"path": str(stories), "validation": str(other)}})


def test_a_tokenizer_beside_packed_sets_is_told_to_have_no_effect(
    stories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(sets={"a": {"path": str(stories)}}, tokenizer={"kind": "bpe", "vocab_size": 999})
    assert "data.tokenizer has no effect: packed data sets bring their own tokenizer" in capsys.readouterr().err
    opened(sets={"a": {"path": str(stories)}})
    assert capsys.readouterr().err == ""


def test_what_is_prepared_on_demand_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = text_file(tmp_path / "a.txt", 60)
    config = {
        "sets": {"a": {"source": str(file), "holdout": 0.1}, "m": {"source": "maths", "documents": 40, "holdout": 0.1}},
        "tokenizer": {"kind": "bpe", "vocab_size": 280},
        "cache": str(tmp_path / "cache"),
    }
    first = opened(**config)
    assert first.tokenizer.vocab_size == 280
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    with monkeypatch.context() as patch:
        for target in (
            "braidlm.data.loading.open_data.train_tokenizer",
            "braidlm.data.packing.prepare.pack_all",
            "braidlm.data.packing.shards.PackedText.assemble",
        ):
            patch.setattr(target, None)
        again = opened(**config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == times
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert [s.data.folder for s in again.train] == [s.data.folder for s in first.train]


def test_a_file_that_changed_gets_a_new_tokenizer(tmp_path: Path) -> None:
    file = text_file(tmp_path / "a.txt", 60, "story")
    config: dict[str, Any] = {
        "sets": {"a": {"source": str(file), "holdout": 0.1}},
        "tokenizer": {"kind": "bpe", "vocab_size": 290},
        "cache": str(tmp_path / "cache"),
    }
    first = opened(**config)
    text_file(file, 70, "xylophone")
    second = opened(**config)
    assert second.train[0].data.manifest.documents == 70
    assert len(second.tokenizer.encode("xylophone")) < len(first.tokenizer.encode("xylophone"))


def test_empty_text_leaves_no_tokenizer_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n")
    config: dict[str, Any] = {"sets": {"a": {"source": str(tmp_path / "a.txt")}}, "cache": str(tmp_path / "cache")}
    with pytest.raises(BraidError, match="there are no documents in it"):
        opened(**config)
    assert not list((tmp_path / "cache").rglob("*.*"))


@pytest.mark.parametrize("kind", ["bytes", "folder"])
def test_other_tokenizers(kind: str, stories: Path, tmp_path: Path) -> None:
    file = text_file(tmp_path / "a.txt", 60)
    named = "bytes" if kind == "bytes" else str(stories / "tokenizer")
    data = opened(sets={"a": {"source": [str(file)], "holdout": 0.1}}, tokenizer=named, cache=str(tmp_path / "cache"))
    assert data.tokenizer.vocab_size == (300 if kind == "folder" else data.tokenizer.vocab_size)
    assert data.train[0].documents == 54


def rows_by_progress(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many rows of each data set every step had."""
    seen = []
    whole = Loader.next_batch

    def watched(self: Loader, *args: Any) -> Any:
        batch = whole(self, *args)
        seen.append(np.bincount(batch.whole.sources, minlength=len(self.names)).tolist())
        return batch

    monkeypatch.setattr(Loader, "next_batch", watched)
    train(recipe)
    return seen


def test_a_mix_in_a_recipe(stories: Path, maths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(
        {"stories": stories, "maths": maths}, tmp_path / "run", data={"mix": {"weights": {"stories": 3, "maths": 1}}}
    )
    assert rows_by_progress(recipe, monkeypatch) == [[1, 3]] * 12


def test_a_curriculum_in_a_recipe(stories: Path, maths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"at": 0, "weights": {"stories": 1}}, {"at": 1, "weights": {"maths": 1}}]
    recipe = tiny_recipe({"stories": stories, "maths": maths}, tmp_path / "run", data={"mix": {"curriculum": points}})
    rows = rows_by_progress(recipe, monkeypatch)
    assert rows[0] == [0, 4]
    assert sum(row[0] for row in rows[:4]) < sum(row[0] for row in rows[4:8]) < sum(row[0] for row in rows[8:])
    assert sum(row[0] for row in rows) == pytest.approx(24, abs=3)


def test_the_sample_of_a_tokenizer_is_shared_between_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SAMPLE_CHARACTERS", 2000)
    seen: list[str] = []
    whole = opening.train_tokenizer

    def watched(sample: Any, characters: int, *args: Any) -> Any:
        seen.extend(sample(characters))
        return whole(sample, characters, *args)

    monkeypatch.setattr(opening, "train_tokenizer", watched)
    files = [text_file(tmp_path / f"{word}.txt", 100, word) for word in ("story", "sum")]
    sets = {file.stem: {"source": str(file), "holdout": 0.1} for file in files}
    opened(sets=sets, tokenizer={"kind": "bpe", "vocab_size": 280}, cache=str(tmp_path / "cache"))
    shares = [sum(len(text) for text in seen if word in text) for word in ("story", "sum")]
    assert shares == [pytest.approx(1000, abs=60)] * 2
