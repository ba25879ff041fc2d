"""What models made of prompts."""

from dataclasses import dataclass, field

from braidlm.core.decoding.generation import NextToken


@dataclass
class Continuation:
    """One prompt and what the model made of it."""

    prompt: str
    text: str = ""
    """The new text alone."""
    tokens: int = 0
    """How many tokens were made, the end of text included."""
    stopped: str = ""
    """Why it is no longer: `end` of text, `max_tokens`, or the model's `limit`."""
    next: list[NextToken] = field(default_factory=list)
    """The most probable tokens after the prompt, if asked for."""


@dataclass
class Generation:
    """All continuations, and how fast they came."""

    model: str
    """The model folder."""
    device: str
    paths: list[str] | None = None
    """The paths that were heard, if they were chosen."""
    seconds: float = 0.0
    """Without loading."""
    texts: list[Continuation] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(text.tokens for text in self.texts) / self.seconds if self.seconds else 0.0
