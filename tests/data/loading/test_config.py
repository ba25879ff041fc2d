"""A corpus folder with splits, as one data set."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig, DataSetConfig, TokenizerConfig, find_splits
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.sources.format import Reading, ReadOptions
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.model.config.strict import decode


def corpus(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        text = "\n\n".join(f"Once {name} upon a time {n} there was a cat." for n in range(30))
        (folder / name / f"text.{name.split('_')[0]}").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train", "dev"), ("train", "dev")),
        (("train_10M", "dev"), ("train_10M", "dev")),
        (("train", "train_10M", "dev", "dev_small", "test"), ("train", "dev")),
    ],
)
def test_splits_are_found_by_their_names(names: tuple[str, ...], found: tuple[str, str], tmp_path: Path) -> None:
    corpus(tmp_path, *names)
    assert find_splits(str(tmp_path), "train", "x") == tuple(str(tmp_path / name) for name in found)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), "the corpus 'x' has no folder `train`"),
        (("train",), "the corpus 'x' has no folder `dev`"),
        (
            ("train_10M", "train_100M", "dev"),
            "more than one folder or file that begins with `train`: train_100M, train_10M",
        ),
        (("train", "dev_1", "dev_2"), "more than one folder or file that begins with `dev`: dev_1, dev_2"),
    ],
)
def test_what_is_missing_or_unclear_is_refused(names: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        find_splits(str(corpus(tmp_path, *names)), "train", "x")
    assert text in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"the corpus 'x' is not there(.|\n)*domains\.x\.folder=DIR"):
        find_splits(str(tmp_path / "none"), "train", "x")


def test_one_of_several_is_chosen_by_name_and_validated_on_all_of_dev(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus", "train_10M", "train_100M", "dev")
    config = {
        "sets": {"x": {"folder": str(folder), "split": "train_100M"}},
        "tokenizer": "bytes",
        "cache": str(tmp_path / "cache"),
    }
    data = open_data(decode(DataConfig, config))
    trained = data.tokenizer.decode(data.train[0].read(0, len(data.train[0]))[0].tolist())
    held = data.tokenizer.decode(data.validation[0].read(0, len(data.validation[0]))[0].tolist())
    assert "train_100M" in trained
    assert "train_10M" not in trained
    assert "dev" not in trained
    assert held.count("Once dev upon") == 30, "nothing is held out from the training text"
    assert trained.count("Once") == 30


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give either `path` (a packed folder), `source` (text to prepare) or `folder`"),
        (
            {"folder": "a", "source": "b"},
            "; `source` and `folder` are given, and `source=null` or `folder=null` takes one out",
        ),
        ({"folder": "a", "validation": "b"}, "`folder` brings its own text to validate on"),
    ],
)
def test_a_data_set_has_one_origin(options: dict[str, str], text: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(DataSetConfig, options)
    assert text in str(caught.value)


@pytest.mark.parametrize("split", ["train", "train.txt"])
def test_a_corpus_of_two_files(split: str, tmp_path: Path) -> None:
    for name in ("train.txt", "dev.txt", "training-notes.txt"):
        (tmp_path / name).touch()
    assert find_splits(str(tmp_path), split, "x") == (str(tmp_path / "train.txt"), str(tmp_path / "dev.txt"))


def test_a_corpus_of_questions_with_answers(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(20)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {"maths": DataSetConfig(folder=str(tmp_path), fields=["question"], answer="answer")}
    data = open_data(DataConfig(sets, tokenizer=TokenizerConfig("bytes"), cache=str(tmp_path / "cache")))
    for (stream,) in (data.train, data.validation):
        assert stream.has_prompts
        assert stream.data.manifest.targets is not None
        assert stream.data.manifest.targets.bytes == sum(len(row["answer"]) for row in rows)
    with pytest.raises(BraidError, match="no effect on a packed folder"):
        DataSetConfig(path=str(stream.data.folder), answer="answer")


def test_texts_may_begin_with_the_token_that_ends_one(tmp_path: Path) -> None:
    """With and without it the same text is packed into the same tokens, in folders of their own."""
    folder = corpus(tmp_path / "corpus", "train", "dev")

    def opened(**tokenizer: object) -> OpenData:
        sets = {"x": {"folder": str(folder)}}
        return open_data(decode(DataConfig, {"sets": sets, "tokenizer": tokenizer, "cache": str(tmp_path / "cache")}))

    plain, begun = opened(vocab_size=300), opened(vocab_size=300, begin=True)
    assert (plain.tokenizer.beginning, begun.tokenizer.beginning) == ([], [begun.tokenizer.eos_id])
    one, other = (data.train[0].data for data in (plain, begun))
    assert one.folder != other.folder
    assert np.array_equal(one.tokens, other.tokens)
    assert load_tokenizer(one.tokenizer_folder).beginning == []
    assert load_tokenizer(other.tokenizer_folder).beginning == [begun.tokenizer.eos_id]
    spaced = opened(vocab_size=300, space_before="texts")
    assert spaced.tokenizer.space_before == "texts"
    assert spaced.train[0].data.manifest.words == one.manifest.words
    for option, value in (("begin", True), ("space_before", "lines")):
        with pytest.raises(BraidError, match=rf"data\.tokenizer\.{option}.*is trained here"):
            opened(kind="bytes", **{option: value})


READ: dict[str, Any] = {
    "documents": 7,
    "seed": 3,
    "fields": ("q", "a"),
    "joiner": " ",
    "answer": "a",
    "template": "{question}: {answer}",
    "separator": {"*.md": "file"},
    "encoding": "latin-1",
    "errors": "replace",
    "split": "dev",
    "duplicates": "near",
    "chunk_tokens": 8,
    "quality": ("length",),
}


def test_every_option_of_reading_is_passed_on() -> None:
    assert set(READ) == {field.name for field in fields(Reading)}
    for name, value in READ.items():
        options = decode(DataSetConfig, {"source": "texts", name: value}).read_options()
        assert options == ReadOptions(**{name: value})
    assert decode(DataSetConfig, {"source": "hub:x", "configuration": "small"}).read_options().subset == "small"
