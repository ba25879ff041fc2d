"""The same prompts continued by several models, and such a study as text, Markdown, HTML or CSV."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from braidlm.core.decoding.generation import NextToken
from braidlm.core.decoding.prompts import Prompt
from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.report.page import Page

TITLE = "Prompt study"
MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~])")


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


def as_text(study: PromptStudy) -> str:
    """For a terminal: one block per prompt, with each model's continuation and its predictions of the next token."""
    lines = []
    for number, (prompt, texts) in enumerate(study.blocks(), 1):
        domain = f"  [{prompt.domain}]" if prompt.domain else ""
        lines += [f"{prompt.name or f'Prompt {number}'}: {prompt.text}{domain}", ""]
        for name, text in texts.items():
            lines += [f"  {name}:", _indented(text.prompt + text.text)]
            if text.next:
                lines.append(f"    next token predictions: {predictions(text.next)}")
            lines.append("")
    return "\n".join(lines[:-1])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def as_markdown(study: PromptStudy) -> str:
    """A section per prompt."""
    lines = [f"# {TITLE}", ""]
    for number, (prompt, texts) in enumerate(study.blocks(), 1):
        lines += [f"## {_plain(_heading(number, prompt))}", ""]
        if prompt.domain:
            lines += [f"Domain: {_plain(prompt.domain)}", ""]
        for name, text in texts.items():
            lines += [f"**{_plain(name)}**", ""]
            lines += [f"> {_plain(line)}".rstrip() + "  " for line in (text.prompt + text.text).split("\n")]
            lines.append("")
            if text.next:
                lines += [f"Next token predictions: {_plain(predictions(text.next))}", ""]
    return "\n".join(lines)


def as_html(study: PromptStudy) -> str:
    """A page with a section per prompt."""
    page = Page(TITLE, f"The same prompts ({len(study.prompts)}), continued by {_listed(list(study.models))}")
    for number, (prompt, texts) in enumerate(study.blocks(), 1):
        page.heading(_heading(number, prompt))
        if prompt.domain:
            page.text(f"Domain: {prompt.domain}")
        for name, text in texts.items():
            after = f": next token predictions {predictions(text.next)}" if text.next else ""
            page.quote(text.text, f"{name}{after}", prompt=text.prompt)
        if len(texts) > 1 and (rows := next_rows(texts)):
            page.table(["next token", *texts], rows, "The probability that each model gives a token that any predicts.")
    return page.html()


def as_csv(study: PromptStudy) -> str:
    """A row per prompt and model, with two columns for each of the most probable next tokens."""
    max_next = max((len(text.next) for _, texts in study.blocks() for text in texts.values()), default=0)
    columns = ["prompt", "domain", "model", "continuation", "tokens", "stopped"]
    columns += [f"{what}_{rank + 1}" for rank in range(max_next) for what in ("next", "probability")]
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(columns)
    for prompt, texts in study.blocks():
        for name, text in texts.items():
            following = [value for token in text.next for value in (token.text, f"{token.probability:.6f}")]
            writer.writerow([prompt.text, prompt.domain or "", name, text.text, text.tokens, text.stopped, *following])
    return table.getvalue()


FORMATS: dict[str, Callable[[PromptStudy], str]] = {".md": as_markdown, ".html": as_html, ".csv": as_csv}


def check_report(out: str | Path) -> None:
    """Refuse a file that could not be written later."""
    path = Path(out)
    if path.suffix not in FORMATS:
        raise BraidError(f"a report ends in {', '.join(FORMATS)}; its extension is its format", str(out))
    if path.is_dir():
        raise BraidError("this is a folder", str(out), "Give the name of a file in it.")


def write_report(study: PromptStudy, out: str | Path) -> None:
    """Write the study in the format of the file's extension."""
    write_text(out, FORMATS[Path(out).suffix](study))


def _heading(number: int, prompt: Prompt) -> str:
    text = " ".join(prompt.text.split())
    return f"{number}. {text}" if len(text) <= 80 else f"{number}. {text[:77]}..."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plain(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    return MARKDOWN.sub(r"\\\1", text)
