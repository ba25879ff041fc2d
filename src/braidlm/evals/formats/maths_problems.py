"""Questions of maths: a model generates a solution after some examples, and the answer in it is right or not.

Decoding is greedy. Where the context is too short for all examples, the prompt has fewer; a prompt that is too long
even without examples is truncated at the beginning. A result's notes have the counts of both.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from braidlm.core.errors import BraidError
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.options import TaskItems, accuracy, percentages
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.requests import contains_any, truncate_at
from braidlm.evals.scoring.scorer import ProgressCallback


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
    """The questions of a task, read and checked: their prompt, and how answers are read."""

    template: str
    """A question up to where the solution begins; `{}` is the question."""
    stop: str
    """The beginning of the next question."""
    max_tokens: int
    is_right: Callable[[str, str], bool]
    """Whether a solution has the answer."""
    examples: Sequence[tuple[str, str]] = ()
    also: dict[str, Callable[[str, str], bool]] = field(default_factory=dict)
    """Other rules to read the answer, by name."""
    after_end: bool = False
    """Whether an end-of-text token precedes the prompt, as it precedes documents in training."""

    def prompt(self, question: str, shots: int) -> str:
        """The first `shots` examples, and the question."""
        solved = [f"{self.template.replace('{}', text)} {solution}\n\n" for text, solution in self.examples[:shots]]
        return "".join(solved) + self.template.replace("{}", question)

    def check(self, settings: Settings) -> None:
        """Refuse settings that would fail later, before any model runs."""
        count = len(self.examples)
        if settings.shots is not None and not 0 <= settings.shots <= count:
            raise BraidError(f"this task has {count} examples, and {settings.shots} are asked for", "shots")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Exact match in percent, over all questions and of each set."""
        from braidlm.evals.scoring.completions import complete, token_budget  # imports torch

        self.check(model.settings)
        shots = len(self.examples) if model.settings.shots is None else model.settings.shots
        budget = token_budget(model, self.max_tokens)
        prompts, fewer, truncated = [], 0, 0
        for question in self.items:
            ids, used = self._fitted(question, model, shots, budget.prompt)
            fewer += used < shots
            prompts.append(budget.fit(ids))
            truncated += len(prompts[-1]) < len(ids)
        is_finished = functools.partial(contains_any, stops=[self.stop])
        completions = complete(model, prompts, budget.new, [is_finished] * len(prompts), advance=advance)
        solutions = [truncate_at(completion.text, [self.stop]) for completion in completions]
        unfinished = sum(completion.stopped == "limit" for completion in completions)
        notes = {"shots": shots, "unfinished": unfinished, "with fewer examples": fewer, "prompts cut": truncated}
        return self._result(task, solutions, notes)

    def _fitted(
        self, question: Question, model: EvaluatedModel, shots: int, max_length: int | None
    ) -> tuple[list[int], int]:
        """A prompt with as many examples as fit, and their number."""
        from braidlm.evals.scoring.completions import prompt_ids

        for used in range(shots, -1, -1):
            prompt, pauses = self.prompt(question.text, used), model.settings.pauses
            ids = prompt_ids(model.tokenizer, prompt, pauses, self.after_end)
            if max_length is None or len(ids) <= max_length:
                break
        return ids, used

    def _result(self, task: str, solutions: Sequence[str], notes: dict[str, int]) -> TaskResult:
        right = [self.is_right(s, q.answer) for s, q in zip(solutions, self.items, strict=True)]
        kinds = dict.fromkeys(kind for question in self.items for kind in question.by)
        also = {
            name: 100 * sum(rule(s, q.answer) for s, q in zip(solutions, self.items, strict=True)) / len(solutions)
            for name, rule in self.also.items()
        }
        return accuracy(
            task,
            right,
            "exact match, %",
            chance=0.0,
            parts=percentages([question.part for question in self.items], right),
            by={kind: percentages([question.by.get(kind) for question in self.items], right) for kind in kinds},
            also=also,
            notes=notes,
            items={"right": right, "solution": list(solutions)},
        )


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
        boxed = last_boxed(stated)
        return boxed if boxed is not None else _without_dollars(stated)
    return last_boxed(solution)


def last_boxed(solution: str) -> str | None:
    """The contents of the last \\boxed{...} or \\fbox{...}; `\\boxed x` ends at a dollar sign."""
    bare = solution.rfind("\\boxed ")
    if bare >= 0:
        return solution[bare + len("\\boxed ") :].split("$")[0]
    start = solution.rfind("\\boxed")
    start = start if start >= 0 else solution.rfind("\\fbox")
    if start < 0:
        return None
    begin = solution.find("{", start)
    depth = 0
    for end in range(max(begin, 0), len(solution) if begin >= 0 else 0):
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
    text = _without_unit(text).replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:  # "k = 3" is 3
        text = value
    text = _braced_roots(text).replace(" ", "")
    text = _braced_fractions(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    ratio = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))", text)
    if ratio and "-0" not in ratio.groups():
        return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return text


def _without_unit(text: str) -> str:
    """Up to `\\text{ `, with which units begin."""
    before, *after = text.split("\\text{ ")
    if len(after) > 1:
        raise ValueError("two units")
    return before


def _braced_roots(text: str) -> str:
    """\\sqrt3 as \\sqrt{3}."""
    before, *after = text.split("\\sqrt")
    if not all(after):
        raise ValueError("a root of nothing")
    return before + "".join(f"\\sqrt{some}" if some[0] == "{" else f"\\sqrt{{{some[0]}}}{some[1:]}" for some in after)


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


def _without_dollars(text: str) -> str:
    """The part between dollar signs, if there is one."""
    match = re.search(r"\$(.+?)\$", text, re.DOTALL)
    return match[1].strip() if match else text.strip().rstrip(".")
