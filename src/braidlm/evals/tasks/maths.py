"""Word problems and competition problems of maths: a solution is written, and the answer in it compared.

Solved examples precede the questions of GSM8K and MATH, as published (`maths_examples.json`). GSM8K: the eight of Wei
and others (2022), "Chain-of-thought prompting elicits reasoning in large language models", table 20. MATH: the four of
Lewkowycz and others (2022), "Solving quantitative reasoning problems with language models", appendix D, which are
problems of MATH's training set.
"""

import hashlib
import json
from pathlib import Path

from braidlm.core.reading import read_json
from braidlm.data.corpora.maths.arithmetic import one_step_problem
from braidlm.data.sources.format import ANSWER, QUESTION, TEMPLATE
from braidlm.evals.formats.maths_problems import (
    MathsProblems,
    Question,
    last_boxed,
    last_number,
    plain_number,
    same_expression,
    stated_expression,
    stated_number,
)
from braidlm.evals.rows import Row, TextFile, rows_of, unpacked_files
from braidlm.evals.tasks.task import TASKS, HubSource, Task

EXAMPLES: dict[str, list[tuple[str, str]]] = json.loads(
    Path(__file__).with_name("maths_examples.json").read_text(encoding="utf-8")
)
"""Questions and solutions, by task."""
GSM8K_EXAMPLE = '{"question": "How many ...?", "answer": "2 + 1 = 3\\n#### 3"}'
MARK = "####"


@TASKS.register("gsm8k")
class Gsm8k(Task):
    """Cobbe and others (2021), asked as in Wei and others (2022): eight examples that reason in steps."""

    description = "GSM8K: word problems; a solution is written after 8 examples, and its answer compared"
    size = "1,319 problems (test)"
    licence = "MIT"
    metric = "exact match, %"
    locations = (
        *("maths-and-code/gsm8k.test.jsonl", "gsm8k.test.jsonl"),
        *("grade-school-math/grade_school_math/data/test.jsonl", "gsm8k"),
    )
    hub = HubSource("openai/gsm8k", "main", ("test",))
    fetch = f"`git clone https://github.com/openai/grade-school-math DATA/grade-school-math`, or {hub.command}"
    uses = ("shots",)

    def open(self, path: Path) -> MathsProblems:
        rows = rows_of(unpacked_files(path, "test.jsonl"), path, GSM8K_EXAMPLE)
        return MathsProblems(
            [_gsm8k_question(row) for row in rows],
            rows.sha256,
            template="Q: {}\nA:",
            examples=EXAMPLES["gsm8k"],
            stop="Q:",
            max_tokens=256,
            is_right=lambda solution, answer: stated_number(solution) == answer,
            also={"by the last number": lambda solution, answer: last_number(solution) == answer},
        )


def _gsm8k_question(row: Row) -> Question:
    _, mark, answer = row.text("answer").rpartition(MARK)
    if not mark or not plain_number(answer):
        raise row.error(f"'answer' does not end with {MARK} and a number")
    return Question(row.text("question"), plain_number(answer))


MATH_EXAMPLE = '{"problem": "Find ...", "level": "Level 3", "type": "Algebra", "solution": "... $\\\\boxed{2}$."}'


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
        f"problem a line will do: {MATH_EXAMPLE}."
    )
    uses = ("shots",)

    def open(self, path: Path) -> MathsProblems:
        rows = rows_of(_math_files(path), path, MATH_EXAMPLE)
        return MathsProblems(
            [_math_question(row) for row in rows],
            rows.sha256,
            template="Problem:\n{}\n\nSolution:",
            examples=EXAMPLES["math"],
            stop="Problem:",
            max_tokens=512,
            is_right=lambda solution, answer: same_expression(stated_expression(solution), answer),
        )


def _math_files(path: Path) -> list[TextFile]:
    """JSONL, or the original's folders with a file for each problem."""
    paths = sorted(path.rglob("*.json")) if path.is_dir() else []
    if not paths:
        return unpacked_files(path)
    # Each file becomes one line of JSONL.
    return [
        TextFile(f"{path.parent.name}/{path.name}", str(path), json.dumps(read_json(path)).encode()) for path in paths
    ]


def _math_question(row: Row) -> Question:
    answer = last_boxed(row.text("solution"))
    if answer is None:
        raise row.error("'solution' has no \\boxed{} answer")
    kind, level = row.fields.get("type"), row.fields.get("level")
    return Question(row.text("problem"), answer, str(kind) if kind else None, {"level": str(level)} if level else {})


PROBLEMS, SEED = 500, 0


@TASKS.register("arithmetic")
class Arithmetic(Task):
    """Asked as questions with answers are trained: in the default template, without examples, decoded greedily."""

    description = "word problems of one step, for models trained on such questions: the answer's number is compared"
    size = f"{PROBLEMS} problems, which are made here"
    licence = "Braid's own"
    metric = "exact match, %"
    fetch = "It makes its problems itself."
    built_in = True

    def open(self, path: Path) -> MathsProblems:
        problems = [one_step_problem(SEED, index, held_out=True) for index in range(PROBLEMS)]
        questions = [
            Question(problem.question, str(problem.answer), problem.kind, {"digits": str(len(str(problem.answer)))})
            for problem in problems
        ]
        digest = hashlib.sha256("\0".join(f"{item.text}\0{item.answer}" for item in questions).encode())
        return MathsProblems(
            questions,
            digest.hexdigest(),
            template=TEMPLATE.removesuffix(ANSWER).rstrip().replace(QUESTION, "{}"),
            stop="Question:",
            max_tokens=96,
            is_right=lambda solution, answer: (stated_number(solution) or last_number(solution)) == answer,
            after_end=True,
            also={"stated after ####": lambda solution, answer: stated_number(solution) == answer},
        )
