"""GSM8K: word problems of grade-school maths."""

from pathlib import Path

from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import unpacked_files
from braidlm.evals.formats.maths_answers import last_number, plain_number, stated_number
from braidlm.evals.formats.maths_examples import GSM8K
from braidlm.evals.formats.maths_problems import MathsProblems, Question, QuestionFormat
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"question": "How many ...?", "answer": "2 + 1 = 3\\n#### 3"}'
MARK = "####"


@TASKS.register("gsm8k")
class Gsm8k(Task):
    """Cobbe and others (2021), asked as in Wei and others (2022): eight examples that reason in steps."""

    description = "GSM8K: word problems; a solution is written after 8 examples, and its answer compared"
    size = "1,319 problems (test)"
    licence = "MIT"
    metric = "exact match, %"
    locations = (
        "maths-and-code/gsm8k.test.jsonl",
        "gsm8k.test.jsonl",
        "grade-school-math/grade_school_math/data/test.jsonl",
        "gsm8k",
    )
    hub = HubSource("openai/gsm8k", "main", ("test",))
    fetch = f"`git clone https://github.com/openai/grade-school-math DATA/grade-school-math`, or {hub.command}"
    uses = ("shots",)

    def open(self, path: Path) -> MathsProblems:
        rows = rows_of(unpacked_files(path, "test.jsonl"), path, EXAMPLE)
        question_format = QuestionFormat(
            template="Q: {}\nA:",
            examples=GSM8K,
            stop="Q:",
            max_tokens=256,
            is_right=lambda solution, answer: stated_number(solution) == answer,
            also={"by the last number": lambda solution, answer: last_number(solution) == answer},
        )
        return MathsProblems([_question(row) for row in rows], rows.sha256, question_format)


def _question(row: Row) -> Question:
    _, mark, answer = row.text("answer").rpartition(MARK)
    if not mark or not plain_number(answer):
        raise row.error(f"'answer' does not end with {MARK} and a number")
    return Question(row.text("question"), plain_number(answer))
