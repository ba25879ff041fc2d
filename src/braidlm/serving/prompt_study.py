"""The same prompts continued by several models: the record of such a study."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from braidlm.core.decoding.generation import NextToken
from braidlm.core.decoding.prompts import Prompt
from braidlm.serving.continuations import Continuation, Generation


@dataclass
class PromptStudy:
    """Prompts, and what each model made of them."""

    prompts: list[Prompt]
    models: dict[str, Generation] = field(default_factory=dict)
    """By the models' names, in the order given; each has its texts in the order of the prompts."""

    def blocks(self) -> Iterator[tuple[Prompt, dict[str, Continuation]]]:
        """For each prompt, what each model made of it."""
        for number, prompt in enumerate(self.prompts):
            yield prompt, {name: made.texts[number] for name, made in self.models.items()}


def predictions(tokens: Sequence[NextToken]) -> str:
    """`girl 99.5%, boy 0.5%`."""
    return ", ".join(f"{_shown(token.text)} {_percent(token.probability)}" for token in tokens)


def _shown(token: str) -> str:
    """A token as a word of a list; what would not be seen or would mislead is quoted."""
    word = token.strip()
    return repr(token) if not word or "," in word or not word.isprintable() else word


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"


def as_text(study: PromptStudy) -> str:
    """For a terminal: one block per prompt, in it each model's continuation and what it thinks comes next."""
    lines = []
    for number, (prompt, made) in enumerate(study.blocks(), 1):
        domain = f"  [{prompt.domain}]" if prompt.domain else ""
        lines += [f"{prompt.name or f'Prompt {number}'}: {prompt.text}{domain}", ""]
        for name, text in made.items():
            lines += [f"  {name}:", _indented(text.prompt + text.text)]
            if text.next:
                lines.append(f"    next token predictions: {predictions(text.next)}")
            lines.append("")
    return "\n".join(lines[:-1])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
