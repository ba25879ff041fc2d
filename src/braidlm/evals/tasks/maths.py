"""Word problems and competition problems of maths: a model writes a solution, and the answer in it is compared.

Solved examples precede the questions of GSM8K and MATH, as published (`maths_examples.json`). GSM8K: the eight of Wei
and others (2022), "Chain-of-thought prompting elicits reasoning in large language models", table 20. MATH: the four of
Lewkowycz and others (2022), "Solving quantitative reasoning problems with language models", appendix D, which are
problems of MATH's training set.

Decoding is greedy. Where the context is too short for all examples, the prompt has fewer; a prompt that is too long
even without examples is truncated at the beginning. A result's notes have the counts of both.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json
from braidlm.data.corpora.maths import one_step_problem
from braidlm.data.sources.format import ANSWER, QUESTION, TEMPLATE
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.options import TaskItems, accuracy, percentages
from braidlm.evals.results import TaskResult
from braidlm.evals.rows import Row, Rows, TextFile, files_of, rows_of
from braidlm.evals.scoring.requests import contains_any, truncate_at
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.tasks.task import TASKS, HubSource, Task

EXAMPLES: dict[str, list[tuple[str, str]]] = json.loads(
    Path(__file__).with_name("maths_examples.json").read_text(encoding="utf-8")
)
"""Questions and solutions, by task."""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and its attributes in the data."""

    text: str
    answer: str
    part: str | None = None
    by: Mapping[str, str] = field(default_factory=dict)
    """Other attributes beside the part: name and value."""


@dataclass
class MathsProblems(TaskItems[Question]):
    """The questions of a task, read and checked."""

    asked: "MathsTask"

    def prompt(self, question: str, shots: int) -> str:
        """The first `shots` examples, and the question."""
        template, examples = self.asked.template, self.asked.examples[:shots]
        solved = [f"{template.replace('{}', text)} {solution}\n\n" for text, solution in examples]
        return "".join(solved) + template.replace("{}", question)

    def check(self, settings: Settings) -> None:
        """Refuse settings that would fail later, before any model runs."""
        count = len(self.asked.examples)
        if settings.shots is not None and settings.shots > count:
            raise BraidError(f"this task has {count} examples, and {settings.shots} are asked for", "shots")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Exact match in percent, over all questions and of each set."""
        from braidlm.evals.scoring.completions import complete, prompt_ids, token_budget  # imports torch

        self.check(model.settings)
        shots = len(self.asked.examples) if model.settings.shots is None else model.settings.shots
        budget = token_budget(model, self.asked.max_tokens)
        prompts, fewer, truncated = [], 0, 0
        for question in self.items:
            for used in range(shots, -1, -1):  # as many examples as fit
                prompt = self.prompt(question.text, used)
                ids = prompt_ids(model.tokenizer, prompt, model.settings.pauses, self.asked.after_end)
                if budget.prompt is None or len(ids) <= budget.prompt:
                    break
            prompts.append(budget.fit(ids))
            fewer += used < shots
            truncated += len(prompts[-1]) < len(ids)
        stops = [self.asked.stop]
        is_finished = functools.partial(contains_any, stops=stops)
        completions = complete(model, prompts, budget.new, [is_finished] * len(prompts), advance=advance)
        unfinished = sum(completion.stopped == "limit" for completion in completions)
        notes = {"shots": shots, "unfinished": unfinished, "with fewer examples": fewer, "prompts cut": truncated}
        return self._result(task, [truncate_at(completion.text, stops) for completion in completions], notes)

    def _result(self, task: str, solutions: list[str], notes: dict[str, int]) -> TaskResult:
        def judged(rule: Callable[[str, str], bool]) -> list[bool]:
            return [rule(solution, item.answer) for solution, item in zip(solutions, self.items, strict=True)]

        right = judged(self.asked.is_right)
        kinds = dict.fromkeys(kind for question in self.items for kind in question.by)
        parts = percentages([question.part for question in self.items], right)
        by = {kind: percentages([question.by.get(kind) for question in self.items], right) for kind in kinds}
        also = {name: 100 * sum(judged(rule)) / len(solutions) for name, rule in self.asked.also.items()}
        fields = {"parts": parts, "by": by, "also": also, "items": {"right": right, "solution": solutions}}
        return accuracy(task, right, "exact match, %", chance=0.0, notes=notes, **fields)


class MathsTask(Task):
    """Questions whose answers a model writes; each is a row of the data."""

    metric = "exact match, %"
    uses: tuple[str, ...] = ("shots",)
    template: str
    """A question up to where the solution begins; `{}` is the question."""
    stop: str
    """The beginning of the next question."""
    max_tokens: int
    examples: Sequence[tuple[str, str]] = ()
    is_right: Callable[[str, str], bool]
    also: Mapping[str, Callable[[str, str], bool]] = {}
    """Other rules to read the answer, by name."""
    after_end = False
    """Whether an end-of-text token precedes the prompt, as it precedes documents in training."""

    def open(self, path: Path) -> MathsProblems:
        rows = self.rows(path)
        return MathsProblems([self.question(row) for row in rows], rows.sha256, self)

    def rows(self, path: Path) -> Rows:
        """The rows that are asked."""
        raise NotImplementedError

    def question(self, row: Row) -> Question:
        """One row as a question with its answer."""
        raise NotImplementedError


@TASKS.register("gsm8k")
class Gsm8k(MathsTask):
    """Cobbe and others (2021), asked as in Wei and others (2022): eight examples that reason in steps."""

    description = "GSM8K: word problems; a solution is written after 8 examples, and its answer compared"
    size = "1,319 problems (test)"
    licence = "MIT"
    locations = (
        *("maths-and-code/gsm8k.test.jsonl", "gsm8k.test.jsonl"),
        *("grade-school-math/grade_school_math/data/test.jsonl", "gsm8k"),
    )
    hub = HubSource("openai/gsm8k", "main", ("test",))
    fetch = f"`git clone https://github.com/openai/grade-school-math DATA/grade-school-math`, or {hub.command}"

    template, stop, max_tokens, examples = "Q: {}\nA:", "Q:", 256, EXAMPLES["gsm8k"]
    is_right = staticmethod(lambda solution, answer: stated_number(solution) == answer)
    also = {"by the last number": lambda solution, answer: last_number(solution) == answer}

    def rows(self, path: Path) -> Rows:
        files = files_of(path, "test.jsonl", below=True)
        return rows_of(files, path, '{"question": "How many?", "answer": "2 + 1 = 3\\n#### 3"}')

    def question(self, row: Row) -> Question:
        _, mark, answer = row.text("answer").rpartition("####")
        if not mark or not plain_number(answer):
            raise row.error("'answer' does not end with #### and a number")
        return Question(row.text("question"), plain_number(answer))


MATH_EXAMPLE = '{"problem": "Find ...", "level": "Level 3", "type": "Algebra", "solution": "... $\\\\boxed{2}$."}'


@TASKS.register("math")
class Math(MathsTask):
    """Hendrycks and others (2021), with their rules for equal answers; asked as in Lewkowycz and others (2022)."""

    description = "MATH: competition problems; a solution is written after 4 examples, and its answer compared"
    size = "5,000 problems (test)"
    licence = "MIT"
    locations = ("maths-and-code/math.test.jsonl", "math.test.jsonl", "MATH/test", "math")
    fetch = (
        "`curl -L https://people.eecs.berkeley.edu/~hendrycks/MATH.tar | tar x -C DATA` gets it; a JSONL file with one "
        f"problem a line will do: {MATH_EXAMPLE}."
    )

    template, stop, max_tokens, examples = "Problem:\n{}\n\nSolution:", "Problem:", 512, EXAMPLES["math"]
    is_right = staticmethod(lambda solution, answer: same_expression(stated_expression(solution), answer))

    def rows(self, path: Path) -> Rows:
        # JSONL, or the original's folders with a file for each problem, each of which becomes one line of JSONL.
        found = sorted(path.rglob("*.json")) if path.is_dir() else ()
        contents = {file: json.dumps(read_json(file)).encode() for file in found}
        originals = [TextFile(f"{file.parent.name}/{file.name}", str(file), contents[file]) for file in found]
        return rows_of(originals or files_of(path, below=True), path, MATH_EXAMPLE)

    def question(self, row: Row) -> Question:
        answer, kind, level = last_boxed(row.text("solution")), row.fields.get("type"), row.fields.get("level")
        if answer is None:
            raise row.error("'solution' has no \\boxed{} answer")
        by = {"level": str(level)} if level else {}
        return Question(row.text("problem"), answer, str(kind) if kind else None, by)


PROBLEMS, SEED = 500, 0


@TASKS.register("arithmetic")
class Arithmetic(MathsTask):
    """Asked as questions with answers are trained: in the default template, without examples, decoded greedily."""

    description = "word problems of one step, for models trained on such questions: the answer's number is compared"
    size = f"{PROBLEMS} problems, which are made here"
    licence = "Braid's own"
    fetch = "It makes its problems itself."
    built_in = True
    uses = ()
    template = TEMPLATE.removesuffix(ANSWER).rstrip().replace(QUESTION, "{}")
    stop, max_tokens, after_end = "Question:", 96, True
    is_right = staticmethod(lambda solution, answer: (stated_number(solution) or last_number(solution)) == answer)
    also = {"stated after ####": lambda solution, answer: stated_number(solution) == answer}

    def open(self, path: Path) -> MathsProblems:
        questions = []
        for problem in (one_step_problem(SEED, index, held_out=True) for index in range(PROBLEMS)):
            answer = str(problem.answer)
            questions.append(Question(problem.question, answer, problem.kind, {"digits": str(len(answer))}))
        digest = hashlib.sha256("\0".join(f"{item.text}\0{item.answer}" for item in questions).encode())
        return MathsProblems(questions, digest.hexdigest(), self)


_STATED = re.compile(r"(?:####|[Tt]he answer is:?|\\boxed\{)\s*\$?\s*(-?\$?[0-9][0-9.,]*|-?\$?\.[0-9]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_FINAL = re.compile(r"Final Answer: The final answer is(.*?)(?:\.\s*I hope|\.?\s*$)", re.DOTALL | re.MULTILINE)


def stated_number(solution: str) -> str | None:
    """The first number that a solution states as its answer."""
    match = _STATED.search(solution)
    return plain_number(match[1]) if match else None


def last_number(solution: str) -> str | None:
    """The last number of any kind: the fallback for a solution that does not state its answer."""
    numbers = [text for text in _NUMBER.findall(solution) if any(character.isdigit() for character in text)]
    return plain_number(numbers[-1]) if numbers else None


def plain_number(text: str) -> str:
    """A number without commas, dollar signs and a full stop at its end."""
    return re.sub(r"[,$]", "", text.strip()).rstrip(".")


def stated_expression(solution: str) -> str | None:
    """What "the final answer is", else what the last box holds."""
    match = _FINAL.search(solution)
    if match and (stated := match[1].strip()):
        boxed, dollars = last_boxed(stated), re.search(r"\$(.+?)\$", stated, re.DOTALL)
        return boxed if boxed is not None else dollars[1].strip() if dollars else stated.rstrip(".")
    return last_boxed(solution)


def last_boxed(solution: str) -> str | None:
    """The contents of the last \\boxed{...} or \\fbox{...}; `\\boxed x` ends at a dollar sign."""
    bare = solution.rfind("\\boxed ")
    if bare >= 0:
        return solution[bare + len("\\boxed ") :].split("$")[0]
    start = solution.rfind("\\boxed")
    start = start if start >= 0 else solution.rfind("\\fbox")
    begin = solution.find("{", start) if start >= 0 else -1
    depth = 0
    for end in range(begin, len(solution)) if begin >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[begin + 1 : end]
    return None


def same_expression(one: str | None, other: str | None) -> bool:
    """Whether two answers are the same after normalising; those that cannot be normalised must be equal as they are."""
    if one is None or other is None:
        return False
    try:
        return normalised(one) == normalised(other)
    except ValueError:
        return one == other


def normalised(text: str) -> str:
    """An answer without layout, units, degrees, currency and percent signs, and with fractions written out."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    if text.count("\\text{ ") > 1:
        raise ValueError("two units")
    text = text.partition("\\text{ ")[0].replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:  # "k = 3" is 3
        text = value
    if re.search(r"\\sqrt(\\sqrt|$)", text):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")  # \sqrt3 is \sqrt{3}
    text = _braced_fractions(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    ratio = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))", text)
    if ratio and "-0" not in ratio.groups():
        return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return text


def _braced_fractions(text: str) -> str:
    """\\frac12, \\frac1b and \\frac1{72} with braces around each part; \\frac{72}1 stays, as in the original."""
    before, *after = text.split("\\frac")
    braced = before
    for some in after:
        if not some:
            raise ValueError("a fraction of nothing")
        if some[0] == "{":
            braced += f"\\frac{some}"
        elif len(some) < 2:
            return text
        else:
            below = some[1] if some[1] == "{" else f"{{{some[1]}}}"
            braced += f"\\frac{{{some[0]}}}{below}{some[2:]}"
    return braced
