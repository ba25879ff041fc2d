"""A prompt study as a file: Markdown, a page, or a table."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

from braidlm.core.decoding.prompts import Prompt
from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.report.page import Page
from braidlm.serving.prompt_study import PromptStudy, predictions

TITLE = "Prompt study"
MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~])")


def as_markdown(study: PromptStudy) -> str:
    """A section per prompt."""
    lines = [f"# {TITLE}", ""]
    for number, (prompt, made) in enumerate(study.blocks(), 1):
        lines += [f"## {_plain(_heading(number, prompt))}", ""]
        if prompt.domain:
            lines += [f"Domain: {_plain(prompt.domain)}", ""]
        for name, text in made.items():
            lines += [f"**{_plain(name)}**", ""]
            lines += [f"> {_plain(line)}".rstrip() + "  " for line in (text.prompt + text.text).split("\n")]
            lines.append("")
            if text.next:
                lines += [f"Next token predictions: {_plain(predictions(text.next))}", ""]
    return "\n".join(lines)


def as_html(study: PromptStudy) -> str:
    """A page with a section per prompt."""
    page = Page(TITLE, f"The same prompts ({len(study.prompts)}), continued by {_listed(list(study.models))}")
    for number, (prompt, made) in enumerate(study.blocks(), 1):
        page.heading(_heading(number, prompt))
        if prompt.domain:
            page.text(f"Domain: {prompt.domain}")
        for name, text in made.items():
            after = f": next token predictions {predictions(text.next)}" if text.next else ""
            page.quote(text.text, f"{name}{after}", prompt=text.prompt)
    return page.html()


def as_csv(study: PromptStudy) -> str:
    """A row per prompt and model; for each of the likeliest next tokens two columns."""
    most = max((len(text.next) for _, made in study.blocks() for text in made.values()), default=0)
    columns = ["prompt", "domain", "model", "continuation", "tokens", "stopped"]
    columns += [f"{what}_{rank + 1}" for rank in range(most) for what in ("next", "probability")]
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(columns)
    for prompt, made in study.blocks():
        for name, text in made.items():
            following = [value for token in text.next for value in (token.text, f"{token.probability:.6f}")]
            writer.writerow([prompt.text, prompt.domain or "", name, text.text, text.tokens, text.stopped, *following])
    return table.getvalue()


FORMS: dict[str, Callable[[PromptStudy], str]] = {".md": as_markdown, ".html": as_html, ".csv": as_csv}


def check_report(out: str | Path) -> None:
    """Refuse a file that could not be written in the end."""
    path = Path(out)
    if path.suffix not in FORMS:
        raise BraidError(f"a report ends in {', '.join(FORMS)}; its ending says what it is to be", str(out))
    if path.is_dir():
        raise BraidError("this is a folder", str(out), "Give the name of a file in it.")


def write_report(study: PromptStudy, out: str | Path) -> None:
    """The study in the form that the file's ending says."""
    write_text(out, FORMS[Path(out).suffix](study))


def _heading(number: int, prompt: Prompt) -> str:
    text = " ".join(prompt.text.split())
    return f"{number}. {text}" if len(text) <= 80 else f"{number}. {text[:77]}..."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return MARKDOWN.sub(r"\\\1", text)
