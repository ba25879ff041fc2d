"""Questions of maths: a model writes a solution after some examples, and the answer in it is right or not.

Solutions take the most probable token each time. A context too short for all examples gets fewer of them; what is too
long even then loses its beginning. A result says how often that was so.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braidlm.core.errors import BraidError
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.scoring.contestant import Contestant, Settings
from braidlm.evals.scoring.scorer import Advance
from braidlm.evals.scoring.stops import cut_at, has_any
from braidlm.evals.statistics.influence import KEY, of_mean


@dataclass(frozen=True)
class Question:
    """A question, its answer, and what the data says of it."""

    text: str
    answer: str
    part: str | None = None
    by: tuple[tuple[str, str], ...] = ()
    """What it is sorted by beside parts, and as what."""


@dataclass(frozen=True)
class Manner:
    """How questions are asked and answers read."""

    form: str
    """Of a question, up to where the solution begins; `{}` is the question."""
    examples: Sequence[tuple[str, str]]
    stop: str
    """What begins the next question."""
    max_tokens: int
    is_right: Callable[[str, str], bool]
    """Of a solution and the answer."""
    also: dict[str, Callable[[str, str], bool]]
    """Other ways to read the answer, by name."""

    def prompt(self, question: str, shots: int) -> str:
        """The first `shots` examples, and the question."""
        shown = "".join(f"{self._asked(text)} {solution}\n\n" for text, solution in self.examples[:shots])
        return shown + self._asked(question)

    def _asked(self, question: str) -> str:
        return self.form.replace("{}", question)


@dataclass
class MathsProblems:
    """The questions of a task, read and checked."""

    questions: list[Question]
    manner: Manner
    sha256: str

    @property
    def count(self) -> int:
        return len(self.questions)

    def check(self, settings: Settings) -> None:
        """What would go wrong later, found before any model is at work."""
        most = len(self.manner.examples)
        if settings.shots is not None and not 0 <= settings.shots <= most:
            raise BraidError(f"this task has {most} examples, and {settings.shots} are asked for", "shots")

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Exact match in percent, over all questions and of each set."""
        from braidlm.evals.scoring.completions import complete, room  # with torch, which a list of tasks has no use for

        self.check(model.settings)
        shots = len(self.manner.examples) if model.settings.shots is None else model.settings.shots
        space = room(model, self.manner.max_tokens)
        prompts, fewer, cut_prompts = [], 0, 0
        for question in self.questions:
            ids, used = self._fitted(question, model, shots, space.prompt)
            fewer += used < shots
            cut_prompts += space.prompt is not None and len(ids) > space.prompt
            prompts.append(ids if space.prompt is None else ids[-space.prompt :])
        is_finished = functools.partial(has_any, stops=[self.manner.stop])
        written = complete(model, prompts, space.new, [is_finished] * len(prompts), advance=advance)
        solutions = [cut_at(completion.text, [self.manner.stop]) for completion in written]
        unfinished = sum(completion.stopped == "limit" for completion in written)
        notes = {"shots": shots, "unfinished": unfinished, "with fewer examples": fewer, "prompts cut": cut_prompts}
        return self._result(task, solutions, notes)

    def _fitted(self, question: Question, model: Contestant, shots: int, most: int | None) -> tuple[list[int], int]:
        """A prompt with as many examples as there is room for."""
        from braidlm.evals.scoring.completions import prompt_ids

        for used in range(shots, -1, -1):
            ids = prompt_ids(model.tokenizer, self.manner.prompt(question.text, used))
            if most is None or len(ids) <= most:
                break
        return ids, used

    def _result(self, task: str, solutions: Sequence[str], notes: dict[str, int]) -> TaskResult:
        right = [self.manner.is_right(s, q.answer) for s, q in zip(solutions, self.questions, strict=True)]
        sets: dict[str | None, dict[str, list[bool]]] = {None: {}}
        for question, hit in zip(self.questions, right, strict=True):
            for kind, name in ((None, question.part), *question.by):
                if name is not None:
                    sets.setdefault(kind, {}).setdefault(name, []).append(hit)
        also = {
            name: 100 * sum(rule(s, q.answer) for s, q in zip(solutions, self.questions, strict=True)) / len(solutions)
            for name, rule in self.manner.also.items()
        }
        rate = sum(right) / len(right)
        return TaskResult(
            task=task,
            metric="exact match, %",
            score=100 * rate,
            count=self.count,
            standard_error=100 * math.sqrt(rate * (1 - rate) / len(right)) if len(right) > 1 else None,
            chance=0.0,
            parts=_rates(sets[None]),
            by={kind: _rates(some) for kind, some in sets.items() if kind is not None},
            also=also,
            notes=notes,
            items={"right": right, "solution": list(solutions), KEY: of_mean([100.0 * hit for hit in right])},
        )


def _rates(sets: dict[str, list[bool]]) -> dict[str, Part]:
    return {name: Part(100 * sum(hits) / len(hits), len(hits)) for name, hits in sorted(sets.items())}
