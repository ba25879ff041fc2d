"""The fast suite of BabyLM 2025 on its real files, every item, against the definitions.

It runs where `BRAID_DATA` names a folder with the data (`braid list tasks` says what belongs there).
"""

import csv
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.evals.babylm.predictions import AOA_ROWS
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.task_data import find_data
from braidlm.evals.tasks import TASKS
from tests.evals.babylm_plain import fast, gpt2, phrase_sum, small_tokenizer, word_chance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("BRAID_DATA" not in os.environ, reason="BRAID_DATA names no folder with the benchmarks' files"),
]
TOKENIZER = small_tokenizer(600)


@functools.cache
def model() -> Any:
    return gpt2(TOKENIZER, 7, positions=1024)


def evaluated(task: str) -> tuple[TaskResult, Path]:
    place = find_data([task], None, {})[task]
    return TASKS[task]().open(place).evaluate(task, EvaluatedModel(Scorer(model()), TOKENIZER)), place


def rows_in(place: Path) -> list[dict[str, Any]]:
    files = sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]


def sums(pairs: list[tuple[str, str]]) -> list[float]:
    """Of sentences and the completions that they end with."""
    return [phrase_sum(model(), fast(TOKENIZER), sentence, completion) for sentence, completion in pairs]


@pytest.mark.parametrize("task", ["blimp_fast", "supplement_fast"])
def test_pairs(task: str) -> None:
    found, place = evaluated(task)
    pairs = [[row["sentence_good"], row["sentence_bad"]] for row in rows_in(place)]
    expected = [int(np.argmax(sums([(sentence, sentence) for sentence in pair]))) for pair in pairs]
    assert found.items["chosen"] == expected


def test_age_of_acquisition_has_the_rows_of_the_collation() -> None:
    assert TASKS["aoa"]().open(find_data(["aoa"], None, {})["aoa"]).count == AOA_ROWS


def test_world_knowledge() -> None:
    found, place = evaluated("ewok_fast")
    if not place.is_dir():
        pytest.skip("EWoK is not unpacked")
    expected = []
    for row in rows_in(place):
        targets = [" " + row["Target1"], " " + row["Target2"]]
        expected.append(int(np.argmax(sums([(row["Context1"] + target, target) for target in targets]))))
    assert found.items["chosen"] == expected


def test_entities() -> None:
    found, place = evaluated("entity_tracking_fast")
    expected = [
        int(np.argmax(sums([(row["input_prefix"] + option, option) for option in row["options"]])))
        for row in rows_in(place)
    ]
    assert found.items["chosen"] == expected


@pytest.mark.parametrize("task", ["wug_adj", "wug_past"])
def test_made_up_words(task: str) -> None:
    found, place = evaluated(task)
    forms = [row["sentences"].split("\t") for row in rows_in(place)]
    expected = [int(np.argmax(sums([(sentence, sentence) for sentence in some]))) for some in forms]
    assert found.items["chosen"] == expected


def test_reading_times() -> None:
    found, place = evaluated("reading")
    file = place if place.is_file() else next(place.rglob("*.csv"))
    with open(file, newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    expected = [-math.log(word_chance(model(), fast(TOKENIZER), row["item"] or "None", row["word"])) for row in rows]
    np.testing.assert_allclose(found.items["surprisal"], expected, atol=1e-4)
