"""The arithmetic task: problems of its own, which no corpus has, asked as they are trained and compared by number."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from braidlm.core.errors import BraidError
from braidlm.data.corpora.maths import one_step_problem
from braidlm.data.sources.format import ReadOptions
from braidlm.data.sources.rows import document_of
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluate import evaluate
from braidlm.evals.scoring.completions import prompt_ids
from braidlm.evals.task_data import BUILT_IN, data_here, find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.maths import MathsProblems
from tests.evals.tasks.test_maths import evaluated, said

__all__ = ["said"]
EOS = "<|endoftext|>"


def opened() -> MathsProblems:
    task = TASKS["arithmetic"]().open(BUILT_IN)
    assert isinstance(task, MathsProblems)
    return task


def test_solutions_are_compared_by_their_number(said: dict) -> None:
    data = opened()
    answers = [int(question.answer) for question in data.items]
    texts = [f" Add: {answer}.\n#### {answer}\nQuestion: #### 1" for answer in answers]
    texts[:3] = [f" so it is {answers[0]}", f" {answers[1]}\n#### {answers[1] + 1}", ""]
    said["texts"] = texts
    result = data.evaluate("arithmetic", evaluated())
    assert result.items["right"] == [True, False, False] + [True] * (data.count - 3)
    assert result.also == {"stated after ####": 100 * (data.count - 3) / data.count}
    assert (len(result.parts), result.chance) == (6, 0.0)


def test_problems_are_asked_as_they_are_trained(said: dict) -> None:
    said["texts"] = [""] * opened().count
    opened().evaluate("arithmetic", evaluated())
    row = one_step_problem(0, 0).row
    document = document_of(row, ReadOptions(fields=("question",), answer="answer"), "")
    assert opened().prompt(row["question"], 0) == document.text[: document.prompt].rstrip()
    assert said["prompts"][0] == f"<|endoftext|>Question: {opened().items[0].text}\nAnswer:"


def test_it_needs_no_data(tmp_path: Path) -> None:
    assert find_data(["arithmetic"], tmp_path, {}) == {"arithmetic": BUILT_IN}
    assert data_here("arithmetic", tmp_path) == BUILT_IN
    with pytest.raises(BraidError, match="makes its items itself"):
        evaluate([], "arithmetic", data_of={"arithmetic": tmp_path})
    assert opened().sha256 == opened().sha256


def test_an_end_of_text_precedes_a_prompt_unless_the_tokenizer_begins_it() -> None:
    plain, beginning = bytes_tokenizer(), bytes_tokenizer()
    beginning.backend.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, plain.eos_id)])
    text = plain.encode("1 + 1")
    assert prompt_ids(plain, "1 + 1", after_end=True) == [plain.eos_id, *text]
    assert prompt_ids(plain, "1 + 1") == text
    assert prompt_ids(beginning, "1 + 1", after_end=True) == prompt_ids(beginning, "1 + 1") == [plain.eos_id, *text]
