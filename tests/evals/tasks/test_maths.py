"""Tasks of maths: prompts with examples, room for them, solutions read, files checked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.scoring import completions
from braidlm.evals.scoring.completions import Completion, prompt_ids
from braidlm.evals.scoring.requests import truncate_at
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.maths import EXAMPLES, MathsProblems
from tests.evals.plain_scorer import plain_tokens
from tests.evals.scoring.test_completions import plain
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
WORDS = [
    {"question": "How many legs have 2 cats?", "answer": "2 * 4 = <<2*4=8>>8 legs\n#### 8"},
    {"question": "What is 1000 + 500?", "answer": "It is 1,500.\n#### 1,500"},
]
CONTESTS = [
    {"problem": "Find $x$.", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{\\dfrac{1}{2}}$."},
    {"problem": "Find $y$.", "level": "Level 5", "type": "Algebra", "solution": "So $\\boxed{3}$."},
    {"problem": "Count.", "level": "Level 1", "type": "Counting", "solution": "There are $\\boxed{7}$."},
]


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def gsm8k(tmp_path: Path) -> MathsProblems:
    return TASKS["gsm8k"]().open(jsonl(tmp_path / "gsm8k.test.jsonl", WORDS))


def contests(tmp_path: Path) -> MathsProblems:
    return TASKS["math"]().open(jsonl(tmp_path / "math.jsonl", CONTESTS))


def evaluated(context: int = 6000, **settings: Any) -> EvaluatedModel:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=context)
    return EvaluatedModel(Scorer(model), TOKENIZER, settings=Settings(**settings))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the model is said to write, and what it was asked."""
    talk: dict[str, Any] = {"texts": []}

    def complete(model: Any, prompts: Sequence, max_tokens: int, finished: Sequence, *rest: Any, **more: Any) -> list:
        talk["prompts"] = [TOKENIZER.decode(prompt) for prompt in prompts]
        talk["max_tokens"], talk["finished"] = max_tokens, finished
        return [Completion(text, "finished") for text in talk["texts"]]

    monkeypatch.setattr(completions, "complete", complete)
    return talk


def test_gsm8k(tmp_path: Path, said: dict[str, Any]) -> None:
    said["texts"] = [" 4 + 4 = 8. The answer is 8.\n\nQ: The answer is 9.", " It is 1,500"]
    result = gsm8k(tmp_path).evaluate("gsm8k", evaluated())
    assert (result.score, result.count, result.metric) == (50.0, 2, "exact match, %")
    assert result.also == {"by the last number": 100.0}
    assert result.standard_error == pytest.approx(100 * (0.25 / 2) ** 0.5)
    assert result.items["right"] == [True, False]
    assert result.notes == {"shots": 8, "unfinished": 0, "with fewer examples": 0, "prompts cut": 0}
    prompt = said["prompts"][0]
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.endswith("23 - 15 is 8. The answer is 8.\n\nQ: How many legs have 2 cats?\nA:")
    assert prompt.count("Q: ") == 9
    assert said["max_tokens"] == 256
    assert said["finished"][0](" 8.\n\nQ:")
    assert not said["finished"][0](" 8. Quite")


def test_math(tmp_path: Path, said: dict[str, Any]) -> None:
    right = " so.\nFinal Answer: The final answer is $\\frac12$. I hope it is correct.\n\nProblem:\nmore \\boxed{1}"
    said["texts"] = [right, " it is \\boxed{4}", " it is $\\boxed{7}$"]
    result = contests(tmp_path).evaluate("math", evaluated(shots=1))
    assert result.score == pytest.approx(200 / 3)
    assert {name: (part.score, part.count) for name, part in result.parts.items()} == {
        "Algebra": (50.0, 2),
        "Counting": (100.0, 1),
    }
    assert {name: (part.score, part.count) for name, part in result.by["level"].items()} == {
        "Level 1": (100.0, 2),
        "Level 5": (0.0, 1),
    }
    assert said["max_tokens"] == 512
    question, solution = EXAMPLES["math"][0]
    assert said["prompts"][1] == f"Problem:\n{question}\n\nSolution: {solution}\n\nProblem:\nFind $y$.\n\nSolution:"


def test_solutions_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    data, model = gsm8k(tmp_path), evaluated(300, shots=0)
    result = data.evaluate("gsm8k", model)
    for question, solution in zip(data.items, result.items["solution"], strict=True):
        ids = prompt_ids(TOKENIZER, f"Q: {question.text}\nA:")
        assert solution == truncate_at(plain(model.model, ids, 150), ["Q:"])
        assert plain_tokens(model.model, ids), "the prompt can be read"


def test_a_short_context_gets_fewer_examples(tmp_path: Path, said: dict[str, Any]) -> None:
    said["texts"] = ["", ""]
    question, solution = EXAMPLES["gsm8k"][0]
    first = len(f"Q: {question}\nA: {solution}\n\n")
    result = gsm8k(tmp_path).evaluate("gsm8k", evaluated(first + 100 + 256))
    assert result.notes["with fewer examples"] == 2
    assert [prompt.count("Q: ") for prompt in said["prompts"]] == [2, 2]
    assert said["prompts"][0].startswith("Q: There are 15 trees")
    result = gsm8k(tmp_path).evaluate("gsm8k", evaluated(40))
    assert (result.notes["with fewer examples"], result.notes["prompts cut"]) == (2, 2)
    assert said["prompts"][0] == "Q: How many legs have 2 cats?\nA:"[-20:]
    assert said["max_tokens"] == 20


def test_too_many_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="this task has 8 examples, and 9 are asked for"):
        gsm8k(tmp_path).check(Settings(shots=9))
    with pytest.raises(BraidError, match="this task has 4 examples, and 5 are asked for"):
        contests(tmp_path).check(Settings(shots=5))


def test_math_as_it_was_published(tmp_path: Path) -> None:
    for index, row in enumerate(CONTESTS):
        folder = tmp_path / "test" / row["type"].lower()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.json").write_text(json.dumps(row, indent=2))
    data = TASKS["math"]().open(tmp_path / "test")
    assert [question.answer for question in data.items] == ["\\dfrac{1}{2}", "3", "7"]
    for text, message in (("{", "not valid JSON"), ("[" * 10**5, "levels deep"), ("[]", "expected an object")):
        (tmp_path / "test" / "algebra" / "0.json").write_text(text)
        with pytest.raises(BraidError, match=rf"algebra/0\.json: .*{message}"):
            TASKS["math"]().open(tmp_path / "test")


@pytest.mark.parametrize(
    ("task", "row", "text"),
    [
        ("gsm8k", {"question": "x", "answer": "3"}, "line 2: 'answer' does not end with #### and a number"),
        ("gsm8k", {"question": "x", "answer": "3 ####"}, "line 2: 'answer' does not end with #### and a number"),
        ("gsm8k", {"answer": "#### 3"}, "line 2: there is no 'question'"),
        ("math", {**CONTESTS[0], "solution": "3"}, "line 2: 'solution' has no \\boxed{} answer"),
        ("math", {**CONTESTS[0], "problem": ""}, "line 2: 'problem' is to be a sentence"),
    ],
)
def test_malformed_lines_of_maths(tmp_path: Path, task: str, row: Any, text: str) -> None:
    first = {"gsm8k": WORDS[0], "math": CONTESTS[0]}[task]
    with pytest.raises(BraidError) as error:
        TASKS[task]().open(jsonl(tmp_path / "a.jsonl", [first, row]))
    assert text in str(error.value)
    assert "A line is {" in str(error.value)
