"""TriviaQA: examples, normalisation, aliases, files of both formats."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.scoring import completions
from braidlm.evals.scoring.completions import Completion
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.trivia import normalised
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
QUESTIONS = [(f"Example {number}?", f"Answer {number}", []) for number in range(5)]
QUESTIONS += [("Which river?", "The Danube", ["Danube", "Donau (river)"]), ("Who?", "St. Louis", ["Saint_Louis"])]


def rows(hub: bool) -> list[dict[str, Any]]:
    if hub:
        return [{"question": q, "answer": {"value": a, "aliases": also}} for q, a, also in QUESTIONS]
    return [{"context": f"Question: {q}\nAnswer:", "answer": a, "aliases": also} for q, a, also in QUESTIONS]


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("shots", [None, 0, 1])
def test_answers_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool, shots: int | None) -> None:
    prompts: list[str] = []

    def complete(model: Any, asked: Sequence[Sequence[int]], *rest: Any, **more: Any) -> list[Completion]:
        prompts.extend(TOKENIZER.decode(ids) for ids in asked)
        return [Completion(text, "finished") for text in (" donau RIVER.\nQuestion: next", " In St. Louis")]

    monkeypatch.setattr(completions, "complete", complete)
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=2000)
    evaluated = EvaluatedModel(Scorer(model), TOKENIZER, settings=Settings(shots=shots))
    task = TASKS["triviaqa"]().open(write(tmp_path / "triviaqa.jsonl", rows(hub)))
    result = task.evaluate("triviaqa", evaluated)
    assert (result.score, result.count, result.metric) == (50.0, 2, "exact match, %")
    assert result.items["right"] == [True, False]
    count = 5 if shots is None else shots
    solved = [f"Question: Example {number}?\nAnswer: Answer {number}\n\n" for number in range(count)]
    assert prompts[0] == "".join(solved) + "Question: Which river?\nAnswer:"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Danube", "danube"),
        ("an  Apple a day", "apple day"),
        ("Rock_'n'_Roll!", "rock n roll"),
        ("theatre", "theatre"),
        ("‘Hello’—a", "hello —"),
    ],
)
def test_normalised_as_by_the_authors(one: str, other: str) -> None:
    assert normalised(one) == other


def test_files_that_are_not_its_data(tmp_path: Path) -> None:
    for lines, what in (
        (rows(False)[:5], "there are no others"),
        ([{"question": "Who?", "answer": "me"}], "'answer' is to be an object"),
        ([{"question": "Who?"}], "there is no 'answer'"),
        ([{"context": "Question: x\nAnswer:", "answer": "y", "aliases": "y"}], "'aliases' is to be"),
    ):
        with pytest.raises(BraidError, match=what):
            TASKS["triviaqa"]().open(write(tmp_path / "a.jsonl", lines))
