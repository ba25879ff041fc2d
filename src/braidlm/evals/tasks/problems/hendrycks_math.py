"""MATH: problems of mathematical competitions."""

import json
from pathlib import Path

from braidlm.core.reading import read_json
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import TextFile, unpacked_files
from braidlm.evals.formats.maths_answers import last_boxed, same_expression, stated_expression
from braidlm.evals.formats.maths_examples import MATH
from braidlm.evals.formats.maths_problems import MathsProblems, Question, QuestionFormat
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"problem": "Find ...", "level": "Level 3", "type": "Algebra", "solution": "... $\\\\boxed{2}$."}'


@TASKS.register("math")
class Math(Task):
    """Hendrycks and others (2021), with their rules for equal answers; asked as in Lewkowycz and others (2022)."""

    description = "MATH: competition problems; a solution is written after 4 examples, and its answer compared"
    size = "5,000 problems (test)"
    licence = "MIT"
    metric = "exact match, %"
    locations = ("maths-and-code/math.test.jsonl", "math.test.jsonl", "MATH/test", "math")
    fetch = (
        "`curl -L https://people.eecs.berkeley.edu/~hendrycks/MATH.tar | tar x -C DATA` gets it; a JSONL file with one "
        f"problem a line will do: {EXAMPLE}."
    )
    uses = ("shots",)

    def open(self, path: Path) -> MathsProblems:
        rows = rows_of(_files(path), path, EXAMPLE)
        question_format = QuestionFormat(
            template="Problem:\n{}\n\nSolution:",
            examples=MATH,
            stop="Problem:",
            max_tokens=512,
            is_right=lambda solution, answer: same_expression(stated_expression(solution), answer),
        )
        return MathsProblems([_question(row) for row in rows], rows.sha256, question_format)


def _files(path: Path) -> list[TextFile]:
    """JSONL, or the original's folders with a file for each problem."""
    paths = sorted(path.rglob("*.json")) if path.is_dir() else []
    if not paths:
        return unpacked_files(path)
    # Each file becomes one line of JSONL.
    return [
        TextFile(f"{path.parent.name}/{path.name}", str(path), json.dumps(read_json(path)).encode()) for path in paths
    ]


def _question(row: Row) -> Question:
    answer = last_boxed(row.text("solution"))
    if answer is None:
        raise row.error("'solution' has no \\boxed{} answer")
    kind, level = row.fields.get("type"), row.fields.get("level")
    return Question(row.text("problem"), answer, str(kind) if kind else None, {"level": str(level)} if level else {})
