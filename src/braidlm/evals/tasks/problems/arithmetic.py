"""Arithmetic: word problems of one step whose calculations the corpus of the same name never has."""

import hashlib
from pathlib import Path

from braidlm.data.corpora.maths.arithmetic import one_step_problem
from braidlm.data.sources.format import ANSWER, QUESTION, TEMPLATE
from braidlm.evals.formats.maths_answers import last_number, stated_number
from braidlm.evals.formats.maths_problems import MathsProblems, Question, QuestionFormat
from braidlm.evals.tasks.task import TASKS, Task

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
        question_format = QuestionFormat(
            template=TEMPLATE.removesuffix(ANSWER).rstrip().replace(QUESTION, "{}"),
            examples=(),
            stop="Question:",
            max_tokens=96,
            is_right=lambda solution, answer: (stated_number(solution) or last_number(solution)) == answer,
            after_end=True,
            also={"stated after ####": lambda solution, answer: stated_number(solution) == answer},
        )
        digest = hashlib.sha256("\0".join(f"{item.text}\0{item.answer}" for item in questions).encode())
        return MathsProblems(questions, digest.hexdigest(), question_format)
