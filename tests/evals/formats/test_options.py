"""EWoK, entity tracking and COMPS: every answer is that of the definition; archives; files that are wrong."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import Item, RankedOptions, set_accuracy
from braidlm.evals.scoring.requests import Request, from_divergence, truncate_alike
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.evals.babylm_plain import fast, gpt2, phrase_sum, small_tokenizer
from tests.evals.locked_zip import write_locked_zip
from tests.tiny_models import tiny_model

TOKENIZER = small_tokenizer()
MODEL = gpt2(TOKENIZER)
THINGS = ("the key", "the hat", "the book", "the mat", "nothing")


def write(place: Path, rows: list[Any]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return place


def boxes(folder: Path, count: int = 24) -> Path:
    rng = random.Random(1)
    for split in ("regular", "ambiref"):
        rows = []
        for at in range(count if split == "regular" else count // 2):
            prefix = f"Box 0 contains {rng.choice(THINGS)}, Box 1 contains {rng.choice(THINGS)}. Box {at % 2} contains "
            options = [f"{thing}." for thing in rng.sample(THINGS, 5)]
            rows.append({"numops": at % 3, "input_prefix": prefix, "options": options, "example_id": at})
        write(folder / f"{split}.jsonl", rows)
    return folder


def situations() -> dict[str, list[dict[str, str]]]:
    rng = random.Random(2)
    words = ["cat", "dog", "mat", "key", "hat", "book", "sat", "ran", "home", "there"]

    def sentence() -> str:
        return "The " + " ".join(rng.choices(words, k=rng.randint(3, 6))) + "."

    return {
        domain: [
            {f"{kind}{n}": sentence() for kind in ("Context", "Target") for n in (1, 2)} | {"Domain": domain}
            for _ in range(15)
        ]
        for domain in ("made-up-relations", "made-up-dynamics")
    }


def concepts(folder: Path) -> Path:
    rng = random.Random(3)
    names = ("comps_base", "comps_wugs", "comps_wugs_dist-before", "comps_wugs_dist-in-between")
    for name in names:
        rows = []
        for at in range(8):
            good, bad = (f"A {rng.choice(('cat', 'dog', 'book', 'wug'))} {at}{letter}" for letter in "xy")
            phrase = f"{rng.choice(('sat', 'ran home', 'was there'))}."
            rows.append({"prefix_acceptable": good, "prefix_unacceptable": bad, "property_phrase": phrase})
        write(folder / f"{name}.jsonl", rows)
    return folder


def plain(rows: list[tuple[list[str], list[str]]]) -> list[int]:
    """For items of (sentences, completions) which option the definition chooses."""
    tokenizer = fast(TOKENIZER)
    sums = [[phrase_sum(MODEL, tokenizer, s, c) for s, c in zip(*row, strict=True)] for row in rows]
    return [int(np.argmax(some)) for some in sums]


def read(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    files = sorted(folder.glob("*.jsonl"))
    return [(file.stem, json.loads(line)) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("places", [1, 5000])
def test_entity_tracking_is_the_definition(tmp_path: Path, places: int) -> None:
    folder = boxes(tmp_path / "boxes")
    data = TASKS["entity_tracking"]().open(folder)
    found = data.evaluate("entity_tracking", EvaluatedModel(Scorer(MODEL, tokens_per_pass=places), TOKENIZER))
    rows = read(folder)
    expected = plain([([row["input_prefix"] + o for o in row["options"]], row["options"]) for _, row in rows])
    assert found.items["chosen"] == expected
    assert 0 < sum(option == 0 for option in expected) < len(expected)
    shares = {}
    for (split, row), option in zip(rows, expected, strict=True):
        shares.setdefault(split, {}).setdefault(row["numops"], []).append(option == 0)
    by_split = [np.mean([100 * np.mean(hits) for hits in moves.values()]) for moves in shares.values()]
    assert found.score == pytest.approx(np.mean(by_split))
    assert found.parts["regular_2_ops"].score == pytest.approx(100 * np.mean(shares["regular"][2]))
    assert (found.chance, found.count) == (20.0, len(rows))
    answers = data.predictions(found)
    assert answers["ambiref_0_ops"]["predictions"][0]["id"] == "ambiref_0_ops_0"
    first = next(row for split, row in rows if (split, row["numops"]) == ("ambiref", 0))
    assert answers["ambiref_0_ops"]["predictions"][0]["pred"] == first["options"][expected[0]]


def test_ewok_is_the_definition_from_a_folder_and_from_a_locked_archive(tmp_path: Path) -> None:
    domains = situations()
    for name, rows in domains.items():
        write(tmp_path / "full" / f"{name}.jsonl", rows)
    files = {
        f"ewok/full/{path.name}": path.read_bytes() for path in sorted((tmp_path / "full").iterdir(), reverse=True)
    }
    files["ewok/fast/other.jsonl"] = b"{}\n"
    archive = write_locked_zip(tmp_path / "ewok.zip", files, "ewok")
    task = TASKS["ewok"]()
    model = EvaluatedModel(Scorer(MODEL), TOKENIZER)
    found = [task.open(place).evaluate("ewok", model) for place in (tmp_path / "full", tmp_path, archive)]
    rows = [row for name in sorted(domains) for row in domains[name]]
    expected = plain(
        [
            (
                [f"{row['Context1']} {row[target]}" for target in ("Target1", "Target2")],
                [" " + row["Target1"], " " + row["Target2"]],
            )
            for row in rows
        ]
    )
    for result in found:
        assert result.items["chosen"] == expected
    assert 3 < sum(expected) < len(expected) - 3
    assert found[0].score == pytest.approx(100 * (1 - np.mean(expected)))  # the domains are of one size
    assert found[0].chance == 50
    hashes = {task.open(place).sha256 for place in (tmp_path / "full", tmp_path, archive)}
    assert len(hashes) == 1, "what is evaluated is the same, wherever it was read from"
    assert b"Context1" not in archive.read_bytes()
    assert not [path for path in tmp_path.rglob("*.jsonl") if path.parent.name != "full"], "nothing was unpacked"


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    content = json.dumps(situations()["made-up-relations"][0]).encode()
    task = TASKS["ewok_fast"]()
    locked = write_locked_zip(tmp_path / "a.zip", {"fast/x.jsonl": content}, "another")
    with pytest.raises(BraidError, match=r"none of the known passwords \('ewok', 'BabyLM2025'\) opens this archive"):
        task.open(locked)
    official = write_locked_zip(tmp_path / "b.zip", {"ewok_fast/x.jsonl": content}, "BabyLM2025")
    assert task.open(official).count == 1
    single = write_locked_zip(tmp_path / "c.zip", {"x.jsonl": content}, "ewok")
    assert task.open(single).count == 1, "an archive of one folder"
    other = write_locked_zip(tmp_path / "d.zip", {"full/x.jsonl": content, "slow/x.jsonl": content}, "ewok")
    with pytest.raises(BraidError, match=r"there are no \.jsonl files of fast or ewok_fast in this archive"):
        task.open(other)
    (tmp_path / "e.zip").write_bytes(b"no zip")
    with pytest.raises(BraidError, match=r"e\.zip: this archive cannot be read"):
        task.open(tmp_path / "e.zip")
    broken = write_locked_zip(tmp_path / "f.zip", {"fast/x.jsonl": content + b"\n{}\n"}, "ewok")
    with pytest.raises(BraidError, match=r"f\.zip/fast/x\.jsonl, line 2: there is no 'Context1'"):
        task.open(broken)


def test_comps_is_the_definition(tmp_path: Path) -> None:
    folder = concepts(tmp_path / "comps")
    data = TASKS["comps"]().open(folder)
    found = data.evaluate("comps", EvaluatedModel(Scorer(MODEL), TOKENIZER))
    rows = read(folder)
    both = ("prefix_acceptable", "prefix_unacceptable")
    expected = plain(
        [
            ([f"{row[prefix]} {row['property_phrase']}" for prefix in both], [row["property_phrase"]] * 2)
            for _, row in rows
        ]
    )
    assert found.items["chosen"] == expected
    assert 0 < sum(expected) < len(expected)
    assert sorted(found.parts) == ["base", "wugs", "wugs_dist_before", "wugs_dist_in_between"]
    answer = data.predictions(found)["base"]["predictions"][0]["pred"]
    assert answer == f"{rows[0][1][both[expected[0]]]} {rows[0][1]['property_phrase']}"


def test_comps_as_published_has_both_distractions_in_one_file(tmp_path: Path) -> None:
    row = {"prefix_acceptable": "A cat", "prefix_unacceptable": "A sock", "property_phrase": "can purr."}
    rows = [row | {"distraction_type": kind} for kind in ("before", "in-between")]
    place = write(tmp_path / "comps_wugs_dist.jsonl", rows)
    assert [item.of for item in TASKS["comps"]().open(place).items] == ["wugs_dist_before", "wugs_dist_in_between"]
    write(place, [row | {"distraction_type": "after"}])
    with pytest.raises(BraidError, match="'distraction_type' is to be one of before, in-between, not 'after'"):
        TASKS["comps"]().open(place)
    with pytest.raises(BraidError, match="'comps_dogs' is not a set of COMPS"):
        TASKS["comps"]().open(write(tmp_path / "comps_dogs.jsonl", [row]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"numops": 1.5}, "line 2: 'numops' is to be a number of moves, not 1.5"),
        ({"numops": "many"}, "line 2: 'numops' is to be a number, not \"many\""),
        ({"options": ["the key."]}, "line 2: 'options' is to be a list of two sentences or more, not [\"the key.\"]"),
        ({"options": "the key."}, "'options' is to be a list of two sentences or more"),
        ({"input_prefix": ""}, "'input_prefix' is to be a sentence, not \"\""),
    ],
)
def test_a_malformed_item(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    good = {"numops": 0, "input_prefix": "Box 0 contains ", "options": ["the key.", "the hat."]}
    place = write(tmp_path / "regular.jsonl", [good, good | change])
    with pytest.raises(BraidError) as error:
        TASKS["entity_tracking_fast"]().open(place)
    assert text in str(error.value)
    assert "A line is {" in str(error.value)


def test_equal_options_are_right_and_counted() -> None:
    items = [Item((("The ", "cat"), ("The ", "cat"), ("The ", "dog")), "a", ("x", "y", "z"))]
    result = RankedOptions(items, "0").evaluate("t", EvaluatedModel(Scorer(MODEL), TOKENIZER))
    assert result.items["chosen"] in ([0], [2])
    assert result.notes["ties"] == 1


def test_options_are_scored_from_where_they_part() -> None:
    requests = [Request([1, 2, 3, 4, 5], 2), Request([1, 2, 3, 6], 2), Request([1, 2, 3], 2)]
    assert [request.first for request in from_divergence(requests, [(0, 1, 2)])] == [3, 3, 3]
    unlike = [Request([1, 2, 3, 4], 2), Request([1, 2, 3, 4], 3), Request([5, 2, 3, 4], 3)]
    assert [request.first for request in from_divergence(unlike, [(0, 1), (2,)])] == [2, 3, 4]
    assert [request.first for request in from_divergence(unlike, [(0,), (1, 2)])] == [4, 3, 3], "other contexts"


def test_options_that_are_too_long_lose_the_same_beginning() -> None:
    requests = [Request(list(range(8)), 5), Request([*range(5), 9], 5), Request([1, 2], 1)]
    found = truncate_alike(requests, [(0, 1), (2,)], 4)
    assert [(list(one.ids), one.first) for one in found] == [([3, 4, 5, 6, 7], 2), ([3, 4, 9], 2), ([1, 2], 1)]
    assert truncate_alike(requests, [(0, 1)], None) == requests


def test_a_model_of_bytes_and_a_short_context(tmp_path: Path) -> None:
    """Contexts longer than the model reads: all options after the same rest of it."""
    tokenizer = bytes_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, context=40)
    data = TASKS["entity_tracking_fast"]().open(boxes(tmp_path / "boxes", 6))
    ways = [Scorer(model, tokens_per_pass=1, share=False), Scorer(model)]
    chosen = [data.evaluate("t", EvaluatedModel(way, tokenizer)).items["chosen"] for way in ways]
    assert chosen[0] == chosen[1]


def test_weights_of_splits() -> None:
    sets = ["a_0"] * 4 + ["a_1"] * 2 + ["b_0"] * 2
    right = [True, False, False, False, True, True, False, True]
    found = set_accuracy("t", "m", sets, right, [0.2] * 4 + [0.5] * 4, {"a_0": "a", "a_1": "a", "b_0": "b"})
    assert found.score == pytest.approx((((25 + 100) / 2) + 50) / 2)
    assert found.chance == pytest.approx(100 * (0.25 * 0.2 + 0.25 * 0.5 + 0.5 * 0.5))
    expected = (0.25**2 * 0.25 * 0.75 / 4 + 0.5**2 * 0.25 / 2) ** 0.5
    assert found.standard_error == pytest.approx(100 * expected)
