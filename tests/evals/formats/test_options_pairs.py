"""Minimal pairs: the accuracy of the definition to the last item, ties, close calls, and files that are wrong."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import Item, RankedOptions, pair, read_pairs
from braidlm.evals.scoring.requests import Begin, Request, consecutive_ranges, from_divergence
from braidlm.evals.scoring.scorer import NEAR_TIE, Scorer, resolve_near_ties
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.evals.plain_scorer import plain_sum
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()


def letters_model(**architecture: object) -> BraidForCausalLM:
    return tiny_model(vocab_size=TOKENIZER.vocab_size, context=64, **architecture)


def of_pairs(*pairs: Item) -> RankedOptions:
    return RankedOptions(list(pairs), "0" * 64, share_context=False)


def differences(task: RankedOptions, scorer: Scorer, begin: Begin = "tokenizer") -> np.ndarray:
    """By how many nats the good sentence of each pair is more probable."""
    sums, _ = task.sums(scorer, TOKENIZER, begin=begin)
    return sums[0::2] - sums[1::2]


def many_pairs(count: int = 60) -> RankedOptions:
    rng = random.Random(0)
    pairs = []
    for index in range(count):
        stem = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 20)))
        good, bad = ("".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 9))) for _ in range(2))
        pairs.append(pair(stem + good, stem + bad, f"set {index % 7}"))
    return of_pairs(*pairs)


@pytest.mark.parametrize("places", [1, 64, 5000])
@pytest.mark.parametrize("share", [True, False])
def test_every_item_is_that_of_the_plain_scorer(places: int, share: bool) -> None:
    model, task = letters_model(), many_pairs()
    found = differences(task, Scorer(model, tokens_per_pass=places, share=share))
    expected = np.array(
        [
            plain_sum(model, TOKENIZER.encode(good)) - plain_sum(model, TOKENIZER.encode(bad))
            for good, bad in (item.texts for item in task.items)
        ]
    )
    assert ((found >= 0) == (expected >= 0)).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    assert 5 < (found > 0).sum() < 55


def test_only_what_differs_is_scored() -> None:
    given = [[1, 2, 3, 4], [1, 2, 5], [7, 8], [9, 8], [1, 2], [1, 2], [3], [3, 4, 5], [], [6]]
    firsts = [
        request.first for request in from_divergence([Request(ids) for ids in given], consecutive_ranges([2] * 5))
    ]
    assert firsts == [2, 2, 1, 1, 2, 2, 1, 1, 0, 1]


def test_a_beginning_changes_scores_and_not_what_was_laid_before() -> None:
    scorer, task = Scorer(letters_model()), many_pairs()
    plain = differences(task, scorer)
    begun = differences(task, scorer, begin="bos")
    assert np.abs(plain - begun).max() > 0.1
    assert np.array_equal(differences(task, scorer), plain)


def test_the_score_is_the_mean_over_sets_and_ties_count_as_right() -> None:
    task = of_pairs(*[pair("x", "y", "large")] * 4, *[pair("x", "y", "small")] * 2)
    sums = np.array([[good, 0.0] for good in (1.0, -1.0, -2.0, -3.0, 0.0, 0.5)]).reshape(-1)
    result = task.result("blimp", sums, consecutive_ranges([2] * 6))
    assert {name: (part.score, part.count) for name, part in result.parts.items()} == {
        "large": (25.0, 4),
        "small": (100.0, 2),
    }
    assert (result.score, result.count, result.chance) == (62.5, 6, 50.0)
    assert result.notes == {"sets": 2, "ties": 1}
    assert result.standard_error == pytest.approx(100 * (0.25 * 0.75 / 4) ** 0.5 / 2)
    assert result.shown == "62.50 ± 10.83"


def test_sentences_of_equal_tokens_are_a_tie() -> None:
    task = of_pairs(pair("abc", "abc", "a"), pair("abcd", "abce", "a"))
    result = task.evaluate("t", EvaluatedModel(Scorer(letters_model()), TOKENIZER))
    assert result.notes["ties"] == 1


def test_close_calls_are_settled_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(letters_model())
    requests = [
        Request([1, 2, 3]),
        Request([1, 2, 4]),
        Request([5, 6]),
        Request([5, 7]),
        Request([8, 8]),
        Request([9, 9]),
    ]
    groups = [(0, 1), (2, 3), (4, 5)]
    sums = np.array([-1.0, -1.0 - NEAR_TIE / 2, -1.0, -3.0, -2.0, -2.0])
    asked: list[list[Request]] = []

    def exact(some: list[Request]) -> object:
        asked.append(some)
        return Scorer.score_float64(scorer, some)

    monkeypatch.setattr(scorer, "score_float64", exact)
    found = resolve_near_ties(scorer, requests, sums, groups)
    assert asked == [requests[:2]], "only the first pair is close, and the last is equal"
    assert found[2:].tolist() == sums[2:].tolist()
    twin = letters_model().double()
    assert found[:2].tolist() == pytest.approx([plain_sum(twin, [1, 2, 3]), plain_sum(twin, [1, 2, 4])], abs=1e-9)
    assert sums[0] == -1.0, "what was given stays"


def write(folder: Path, name: str, *lines: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return folder


GOOD = {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"}


def test_files_are_read_in_order_and_named_by_uid_or_file(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", GOOD, "", {"sentence_good": "x\u2028y", "sentence_bad": "z"})
    write(tmp_path, "a.jsonl", {**GOOD, "UID": "other"})
    (tmp_path / "README.md").write_text("no data")
    task = read_pairs(tmp_path)
    assert [pair.of for pair in task.items] == ["other", "agreement", "b"]
    assert task.items[2].texts[0] == "x\u2028y", "only a newline ends a line"
    assert read_pairs(tmp_path / "a.jsonl").count == 1
    before = task.sha256
    write(tmp_path, "a.jsonl", GOOD)
    assert read_pairs(tmp_path).sha256 != before


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"sentence_good": ', "a.jsonl, line 2: this line is not JSON (Expecting value at character 19)"),
        ('["x"]', 'a.jsonl, line 2: this line is not an object but ["x"]'),
        (
            {"sentence_good": "x", "sentence_bed": "y"},
            "line 2: there is no 'sentence_bad'. Did you mean 'sentence_bed'?",
        ),
        ({"sentence_good": 3, "sentence_bad": "y"}, "line 2: 'sentence_good' is to be a sentence, not 3"),
        ({"sentence_good": "x", "sentence_bad": " "}, "line 2: 'sentence_bad' is to be a sentence, not \" \""),
    ],
)
def test_a_malformed_line(tmp_path: Path, line: object, text: str) -> None:
    with pytest.raises(BraidError) as error:
        read_pairs(write(tmp_path, "a.jsonl", GOOD, line))
    assert text in str(error.value)
    assert "A line is {" in str(error.value)


def test_folders_without_pairs(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"there are no \.jsonl files here"):
        read_pairs(tmp_path)
    with pytest.raises(BraidError, match="the files are empty"):
        read_pairs(write(tmp_path, "a.jsonl", ""))
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(BraidError, match=r"a\.jsonl: this is not UTF-8 text"):
        read_pairs(tmp_path)
