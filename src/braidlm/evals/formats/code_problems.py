"""Code that a model writes, run against tests: sample, cut, run in a sandbox, count what passes."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.sandbox.languages import LANGUAGES, Workshop, open_workshop
from braidlm.evals.scoring.contestant import Contestant, Settings
from braidlm.evals.scoring.scorer import Advance
from braidlm.evals.statistics.influence import KEY, of_sets
from braidlm.evals.statistics.pass_at_k import pass_at_k

if TYPE_CHECKING:  # torch comes with the first model: `braid list tasks` has no use for it
    from braidlm.core.decoding.decoder import Sampling
    from braidlm.evals.scoring.completions import Completion

KS = (1, 10, 100)
MAX_TOKENS = 512
SEED = 0
SHOWN = 8
"""Kinds of failure that a result names."""


@dataclass(frozen=True)
class Problem:
    """Something to write, and how what was written becomes a program with tests."""

    name: str
    language: str
    prompt: Callable[[int | None], str]
    """With this many examples before it; None for the usual number."""
    is_finished: Callable[[str], bool]
    program: Callable[[str], str]


@dataclass
class CodeProblems:
    """The problems of a task, read and checked."""

    problems: list[Problem]
    sha256: str

    @property
    def count(self) -> int:
        return len(self.problems)

    def check(self, settings: Settings) -> None:
        """What would go wrong later, found before any model is at work."""
        if not settings.allow_code_execution:
            raise BraidError(
                "this task runs programs that the model writes, and that has not been allowed",
                "code execution",
                "Say `--allow-code-execution`: they run in a sandbox, and the documentation says what it enforces.",
            )
        if settings.code_samples < 1:
            raise BraidError(f"code_samples must be at least 1, got {settings.code_samples}")
        if settings.shots is not None and settings.shots < 0:
            raise BraidError(f"shots must be 0 or more, got {settings.shots}")
        self.problems[0].prompt(settings.shots)
        _sampling(settings)
        if settings.code_temperature == 0 and settings.code_samples > 1:
            raise BraidError(
                f"at temperature 0 all {settings.code_samples} samples of a problem are the same",
                todo="Take one sample (`--code-samples 1`), or a temperature above 0.",
            )

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """pass@1 in percent, the mean over languages; pass@10 and pass@100 beside it where there are samples enough."""
        self.check(model.settings)
        languages = list(dict.fromkeys(problem.language for problem in self.problems))
        with open_workshop(languages, model.settings.code_isolation) as workshop:
            problems = [problem for problem in self.problems if problem.language in workshop.languages]
            written, cut_prompts = _written(problems, model, advance)
            failures = _failures(problems, written, workshop)
        return _result(task, problems, failures, written, workshop, model.settings, cut_prompts)


def _sampling(settings: Settings) -> "Sampling":
    from braidlm.core.decoding.decoder import Sampling

    return Sampling(settings.code_temperature, top_p=settings.code_top_p, seed=SEED)


def _written(
    problems: Sequence[Problem], model: Contestant, advance: Advance | None
) -> "tuple[list[list[Completion]], int]":
    """The samples of each problem, and how many prompts lost their beginning."""
    from braidlm.evals.scoring.completions import complete, prompt_ids, room

    space = room(model, MAX_TOKENS)
    shots, samples = model.settings.shots, model.settings.code_samples
    prompts = [prompt_ids(model.tokenizer, problem.prompt(shots)) for problem in problems]
    fitted = [ids if space.prompt is None else ids[-space.prompt :] for ids in prompts]
    found = complete(
        model,
        [ids for ids in fitted for _ in range(samples)],
        space.new,
        [problem.is_finished for problem in problems for _ in range(samples)],
        _sampling(model.settings),
        advance,
    )
    cut = sum(len(ids) < len(before) for ids, before in zip(fitted, prompts, strict=True))
    return [found[at : at + samples] for at in range(0, len(found), samples)], cut


def _failures(
    problems: Sequence[Problem], written: "Sequence[Sequence[Completion]]", workshop: Workshop
) -> list[list[str]]:
    """Why each sample of each problem failed; empty where it passed. Samples of the same text are run once."""
    sources = [
        (problem.language, problem.program(completion.text))
        for problem, completions in zip(problems, written, strict=True)
        for completion in completions
    ]
    distinct = list(dict.fromkeys(sources))
    tests = [workshop.languages[language].test(source) for language, source in distinct]
    outcomes = workshop.sandbox.run_all([test.program for test in tests])
    failure = {key: test.failure(out) for key, test, out in zip(distinct, tests, outcomes, strict=True)}
    said = iter(failure[source] for source in sources)
    return [[next(said) for _ in completions] for completions in written]


def _result(
    task: str,
    problems: Sequence[Problem],
    failures: Sequence[Sequence[str]],
    written: "Sequence[Sequence[Completion]]",
    workshop: Workshop,
    settings: Settings,
    cut_prompts: int,
) -> TaskResult:
    samples = settings.code_samples
    languages = [problem.language for problem in problems]
    passed = [sum(not reason for reason in reasons) for reasons in failures]
    rates: dict[int, dict[str, np.ndarray]] = {}
    for k in [k for k in KS if k <= samples]:
        each = np.array([100 * pass_at_k(samples, count, k) for count in passed])
        rates[k] = {name: each[[other == name for other in languages]] for name in dict.fromkeys(languages)}
    means = {k: float(np.mean([some.mean() for some in rates[k].values()])) for k in rates}
    several = len(rates[1]) > 1 or workshop.missing
    parts = {
        LANGUAGES[name].name + ("" if k == 1 else f", pass@{k}"): Part(float(some.mean()), len(some))
        for k in (rates if several else ())
        for name, some in rates[k].items()
    }
    moves = of_sets([100 * count / samples for count in passed], languages, dict.fromkeys(rates[1], 1 / len(rates[1])))
    completions = [completion for some in written for completion in some]
    return TaskResult(
        task=task,
        metric="pass@1, %",
        score=means[1],
        count=len(problems),
        standard_error=_standard_error(list(rates[1].values())),
        chance=0.0,
        parts=parts,
        also={f"pass@{k}": mean for k, mean in means.items() if k > 1},
        notes={
            "samples": samples,
            "temperature": settings.code_temperature,
            "top_p": settings.code_top_p,
            "failures": dict(Counter(kind(r) for reasons in failures for r in reasons if r).most_common(SHOWN)),
            "unfinished": sum(completion.stopped == "limit" for completion in completions),
            "prompts cut": cut_prompts,
            "not run": workshop.missing,
            "sandbox": workshop.sandbox.statement,
        },
        items={
            "problem": [problem.name for problem in problems],
            "failures": [list(reasons) for reasons in failures],
            KEY: moves,
        },
    )


def kind(reason: str) -> str:
    """A failure without what is particular to it: the kind of error for Python's, else the first words."""
    head, _, rest = reason.partition(": ")
    return rest.partition(":")[0].strip() if head.startswith("ended with") and rest else head


def _standard_error(rates: Sequence[np.ndarray]) -> float | None:
    """Of the mean over languages of means over problems."""
    if any(len(some) < 2 for some in rates):
        return None
    variance = sum(some.var(ddof=1) / len(some) for some in rates) / len(rates) ** 2
    return math.sqrt(variance)
