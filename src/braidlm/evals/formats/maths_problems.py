"""Questions of maths: a model generates a solution after some examples, and the answer in it is right or not.

Decoding is greedy. Where the context is too short for all examples, the prompt has fewer; a prompt that is too long
even without examples is truncated at the beginning. A result's notes have the counts of both.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from braidlm.core.errors import BraidError
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.set_accuracy import percentages
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.scoring.stop_strings import contains_any, truncate_at
from braidlm.evals.statistics.influence import INFLUENCE, mean_influences
from braidlm.evals.statistics.standard_errors import percentage_error


@dataclass(frozen=True)
class Question:
    """A question, its answer, and its attributes in the data."""

    text: str
    answer: str
    part: str | None = None
    by: Mapping[str, str] = field(default_factory=dict)
    """Other attributes beside the part: name and value."""


@dataclass(frozen=True)
class QuestionFormat:
    """The prompt of a question, and how answers are read."""

    template: str
    """A question up to where the solution begins; `{}` is the question."""
    examples: Sequence[tuple[str, str]]
    stop: str
    """The beginning of the next question."""
    max_tokens: int
    is_right: Callable[[str, str], bool]
    """Of a solution and the answer."""
    also: dict[str, Callable[[str, str], bool]] = field(default_factory=dict)
    """Other rules to read the answer, by name."""
    after_end: bool = False
    """Whether an end-of-text token precedes the prompt, as it precedes documents in training."""

    def prompt(self, question: str, shots: int) -> str:
        """The first `shots` examples, and the question."""
        solved = "".join(f"{self._filled(text)} {solution}\n\n" for text, solution in self.examples[:shots])
        return solved + self._filled(question)

    def _filled(self, question: str) -> str:
        return self.template.replace("{}", question)


@dataclass
class MathsProblems(TaskItems[Question]):
    """The questions of a task, read and checked."""

    format: QuestionFormat

    def check(self, settings: Settings) -> None:
        """Refuse settings that would fail later, before any model runs."""
        count = len(self.format.examples)
        if settings.shots is not None and not 0 <= settings.shots <= count:
            raise BraidError(f"this task has {count} examples, and {settings.shots} are asked for", "shots")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Exact match in percent, over all questions and of each set."""
        from braidlm.evals.scoring.completions import complete, token_budget  # imports torch

        self.check(model.settings)
        shots = len(self.format.examples) if model.settings.shots is None else model.settings.shots
        budget = token_budget(model, self.format.max_tokens)
        prompts, fewer, truncated = [], 0, 0
        for question in self.items:
            ids, used = self._fitted(question, model, shots, budget.prompt)
            fewer += used < shots
            truncated += budget.prompt is not None and len(ids) > budget.prompt
            prompts.append(ids if budget.prompt is None else ids[-budget.prompt :])
        is_finished = functools.partial(contains_any, stops=[self.format.stop])
        completions = complete(model, prompts, budget.new, [is_finished] * len(prompts), advance=advance)
        solutions = [truncate_at(completion.text, [self.format.stop]) for completion in completions]
        unfinished = sum(completion.stopped == "limit" for completion in completions)
        notes = {"shots": shots, "unfinished": unfinished, "with fewer examples": fewer, "prompts cut": truncated}
        return self._result(task, solutions, notes)

    def _fitted(
        self, question: Question, model: EvaluatedModel, shots: int, max_length: int | None
    ) -> tuple[list[int], int]:
        """A prompt with as many examples as fit, and their number."""
        from braidlm.evals.scoring.completions import prompt_ids

        for used in range(shots, -1, -1):
            prompt, pauses = self.format.prompt(question.text, used), model.settings.pauses
            ids = prompt_ids(model.tokenizer, prompt, pauses, self.format.after_end)
            if max_length is None or len(ids) <= max_length:
                break
        return ids, used

    def _result(self, task: str, solutions: Sequence[str], notes: dict[str, int]) -> TaskResult:
        right = [self.format.is_right(s, q.answer) for s, q in zip(solutions, self.items, strict=True)]
        kinds = dict.fromkeys(kind for question in self.items for kind in question.by)
        also = {
            name: 100 * sum(rule(s, q.answer) for s, q in zip(solutions, self.items, strict=True)) / len(solutions)
            for name, rule in self.format.also.items()
        }
        rate = sum(right) / len(right)
        return TaskResult(
            task=task,
            metric="exact match, %",
            score=100 * rate,
            count=self.count,
            standard_error=percentage_error(rate, len(right)),
            chance=0.0,
            parts=percentages([question.part for question in self.items], right),
            by={kind: percentages([question.by.get(kind) for question in self.items], right) for kind in kinds},
            also=also,
            notes=notes,
            items={
                "right": right,
                "solution": list(solutions),
                INFLUENCE: mean_influences([100.0 * hit for hit in right]),
            },
        )
