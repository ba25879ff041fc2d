"""Duplicates and rules of quality: what is found, what stays, and that processes and shards change nothing."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import document
from braidlm.data.loading.config import DataConfig, DataSetConfig
from braidlm.data.loading.open_data import open_data
from braidlm.data.packing.filtering import RULES, bands
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import load_tokenizer

STORIES = [document("stories", 0, number) for number in range(40)]


def changed(text: str, share: float, seed: int = 0) -> str:
    """The text with another word in place of one here and there."""
    rng = random.Random(seed)
    return " ".join(f"word{rng.random()}" if rng.random() < share else word for word in text.split())


def long_text(seed: int, words: int = 400) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(STORIES).split()[rng.randrange(20)] for _ in range(words))


def texts_of(data: PackedData) -> list[str]:
    tokenizer = load_tokenizer(data.tokenizer_folder)
    starts = data.document_starts
    return [tokenizer.decode(data.tokens[a : b - 1].tolist()) for a, b in pairwise(starts)]


def pack(folder: Path, texts: list[str], **options: object) -> PackedData:
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"workers": 1, "tokenizer": "bytes"} | options
    return prepare(folder / "a.jsonl", folder / "packed", **settings)


def test_duplicates_leave_the_first(tmp_path: Path) -> None:
    near = changed(STORIES[3], 0.01, seed=5)
    texts = [*STORIES, STORIES[0].replace(" ", "  "), near, "  ", *STORIES[:3]]
    every = pack(tmp_path / "keep", texts)
    assert texts_of(every) == [text for text in texts if text.strip()]
    assert "left_out" not in every.manifest.source
    exact = pack(tmp_path / "exact", texts, duplicates="exact")
    assert texts_of(exact) == [*STORIES, near]
    assert exact.manifest.source["left_out"] == {"exact duplicates": 4}
    both = pack(tmp_path / "near", texts, duplicates="near")
    assert texts_of(both) == STORIES
    assert both.manifest.source["left_out"] == {"exact duplicates": 4, "near duplicates": 1}
    assert both.manifest.source["empty_documents"] == 1


def test_shards_and_processes_change_nothing(tmp_path: Path) -> None:
    texts = [*STORIES, *(changed(text, 0.01) for text in STORIES), *STORIES[:7]]
    options = {"duplicates": "near", "quality": ["repetition", "letters"]}
    one = pack(tmp_path / "one", texts, **options)
    many = pack(tmp_path / "many", texts, shard_mb=0.004, workers=2, **options)
    assert one.manifest.source["left_out"] == many.manifest.source["left_out"]
    assert 0 < one.manifest.documents < 60
    assert np.array_equal(one.tokens, many.tokens)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 1.0, 1.0), (0.015, 0.9, 1.0), (0.15, 0.0, 0.05)])
def test_how_near_is_near(share: float, least: float, most: float) -> None:
    """A text of which a share s of the words changes has about (1 - s) ** 5 of its sequences of five words left."""
    found = []
    for seed in range(30):
        text = long_text(seed)
        found.append(bool(set(bands(text)) & set(bands(changed(text, share, seed)))))
    assert least <= np.mean(found) <= most


def test_different_texts_share_no_band() -> None:
    seen = [set(bands(long_text(seed))) for seed in range(30)] + [set(bands(text)) for text in ("", "one", "two words")]
    assert len(set.union(*seen)) == sum(map(len, seen))


SOUND = " ".join(f"number{number} the small cats and dogs that have mice" for number in range(10))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("length", "the cat and the dog"),
        ("word_length", "a " * 300 + "the and"),
        ("word_length", "incomprehensibilities " * 100),
        ("symbols", SOUND + " #" * 20),
        ("symbols", SOUND + " well..." * 40),
        ("letters", SOUND + " 1234" * 200),
        ("stop_words", "cats dogs mice birds " * 30),
        ("repetition", "a line of the text and that\n" * 30),
        ("placeholders", SOUND + " function() { return }"),
        ("placeholders", SOUND + " Lorem ipsum dolor"),
    ],
)
def test_rules_of_quality(rule: str, text: str) -> None:
    assert not RULES[rule](text, text.split())
    assert all(keeps(SOUND, SOUND.split()) for keeps in RULES.values())


def test_rules_leave_out_and_count(tmp_path: Path) -> None:
    bad, short = "the of " * 60 + "{ }", "the and"
    data = pack(tmp_path / "a", [SOUND, bad, short, bad], quality=["length", "placeholders"], duplicates="exact")
    assert texts_of(data) == [SOUND]
    counts = {"quality: length": 1, "quality: placeholders": 2, "exact duplicates": 0}
    assert data.manifest.source["left_out"] == counts
    with pytest.raises(BraidError, match=r"no rule of quality 'lenght'.*length"):
        pack(tmp_path / "b", [SOUND], quality=["lenght"])
    with pytest.raises(BraidError, match="a limit ends the reading"):
        pack(tmp_path / "c", [SOUND], quality=["length"], limit_words=5)


def test_a_killed_look_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*STORIES, *STORIES]
    monkeypatch.setattr("braidlm.data.packing.shards.PackedText.assemble", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(tmp_path / "a", texts, duplicates="exact")
    looks = list((tmp_path / "a/packed.part/filter").glob("*.look"))
    written = [path.stat().st_mtime_ns for path in looks]
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / "a/a.jsonl", tmp_path / "a/packed", duplicates="exact", workers=1, tokenizer="bytes")
    assert looks
    assert written == [path.stat().st_mtime_ns for path in looks]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join([*STORIES, *STORIES]))
    command = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*command, "--duplicates", "near", "--quality", "letters", "stop_words", "--workers", "1"]) == 0
    assert "left out: exact duplicates" in capsys.readouterr().out
    assert "exact duplicates" in PackedData(tmp_path / "out").manifest.source["left_out"]


def test_recipes_filter_what_is_trained_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "dev"):
        Path(f"{name}.txt").write_text("\n\n".join([*STORIES, *STORIES]))
    spec = DataSetConfig(source="train.txt", validation="dev.txt", duplicates="exact")
    opened = open_data(DataConfig({"set": spec}, length=16))
    paragraphs = opened.validation[0].documents
    assert 0 < 2 * opened.train[0].documents <= paragraphs
