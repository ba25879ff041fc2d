"""Prompt studies: several models continue the same prompts, and a report shows them side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from braidlm.core.decoding.generation import NextToken
from braidlm.core.decoding.prompts import Prompt
from braidlm.core.report.report import Report, Table, listed


@dataclass
class Continuation:
    """One prompt and its continuation."""

    prompt: str
    text: str = ""
    """The new text alone."""
    tokens: int = 0
    """How many tokens were generated, the end of text included."""
    stopped: str = ""
    """Why it stopped: `end` of text, `max_tokens`, or the model's `limit`."""
    next: list[NextToken] = field(default_factory=list)
    """The most probable tokens after the prompt, if requested."""


@dataclass
class Generation:
    """All continuations, and how long they took."""

    model: str
    """The model folder."""
    device: str
    paths: list[str] | None = None
    """The active paths, if they were chosen."""
    without: list[str] | None = None
    """The modules that are switched off, if any."""
    mean_layer: float | None = None
    """The layer that tokens were chosen after, on average, where they may leave early."""
    accepted: float | None = None
    """The share of drafted tokens that the whole model agreed with, where tokens were drafted."""
    seconds: float = 0.0
    """Without loading."""
    texts: list[Continuation] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(text.tokens for text in self.texts) / self.seconds if self.seconds else 0.0


@dataclass
class PromptStudy:
    """Prompts, and each model's continuations of them."""

    prompts: list[Prompt]
    models: dict[str, Generation] = field(default_factory=dict)
    """By the models' names; each has its texts in the order of the prompts."""

    def blocks(self) -> Iterator[tuple[Prompt, dict[str, Continuation]]]:
        """For each prompt, the continuation of each model."""
        for number, prompt in enumerate(self.prompts):
            yield prompt, {name: generation.texts[number] for name, generation in self.models.items()}


def predictions(tokens: Sequence[NextToken]) -> str:
    """`girl 99.5%, boy 0.5%`."""
    return ", ".join(f"{_shown(token.text)} {_percent(token.probability)}" for token in tokens)


def next_rows(texts: Mapping[str, Continuation]) -> list[list[str | None]]:
    """The next tokens that any model predicts, the most probable first: their probability by each model, if known."""
    by_model = [{token.text: token.probability for token in text.next} for text in texts.values()]
    best: dict[str, float] = {}
    for known in by_model:
        for token, probability in known.items():
            best[token] = max(probability, best.get(token, 0.0))
    return [
        [_shown(token), *(_percent(known[token]) if token in known else None for known in by_model)]
        for token in sorted(best, key=lambda token: -best[token])
    ]


def _shown(token: str) -> str:
    """A token as a word of a list; one that is invisible or ambiguous there is quoted."""
    word = token.strip()
    return repr(token) if not word or "," in word or not word.isprintable() else word


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"


def study_report(study: PromptStudy) -> Report:
    """A section for each prompt, with every model's continuation; for programs, a row for each prompt and model."""
    subtitle = f"The same prompts ({len(study.prompts)}), continued by {listed(list(study.models))}"
    report = Report("Prompt study", subtitle, tables=[_data_table(study)])
    for number, (prompt, texts) in enumerate(study.blocks(), 1):
        words = " ".join((f"{prompt.name}: {prompt.text}" if prompt.name else prompt.text).split())
        report.heading(f"{number}. {words}" if len(words) <= 80 else f"{number}. {words[:77]}...")
        if prompt.domain:
            report.text(f"Domain: {prompt.domain}")
        for name, text in texts.items():
            note = f"next token predictions: {predictions(text.next)}" if text.next else ""
            report.quote(text.text, name, prompt=text.prompt, note=note)
        if len(texts) > 1 and (rows := next_rows(texts)):
            caption = "The probability that each model gives a token that any predicts."
            report.table(Table(["next token", *texts], rows, caption))
    return report


def _data_table(study: PromptStudy) -> Table:
    """Two columns for each of the most probable next tokens."""
    max_next = max((len(text.next) for _, texts in study.blocks() for text in texts.values()), default=0)
    columns = ["prompt", "domain", "model", "continuation", "tokens", "stopped"]
    columns += [f"{what}_{rank + 1}" for rank in range(max_next) for what in ("next", "probability")]
    rows = []
    for prompt, texts in study.blocks():
        for name, text in texts.items():
            following = [value for token in text.next for value in (token.text, f"{token.probability:.6f}")]
            row = [prompt.text, prompt.domain, name, text.text, text.tokens, text.stopped, *following]
            rows.append(row + [None] * (len(columns) - len(row)))
    return Table(columns, rows, name="study")
