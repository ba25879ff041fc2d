"""`braid generate` as a function: continue prompts with the model of a folder."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from braidlm.core.errors import BraidError
from braidlm.core.folders import load_model
from braidlm.core.generation import NextToken, continue_text, next_tokens
from braidlm.core.runs import model_folder
from braidlm.data.tokenizers import load_tokenizer
from braidlm.model.decoding import Sampling


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
    seconds: float = 0.0
    """Without loading."""
    texts: list[Continuation] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(text.tokens for text in self.texts) / self.seconds if self.seconds else 0.0


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
    top_next: int = 0,
    device: str = "auto",
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Continue prompts with a model folder or a run's newest checkpoint; `on_text(prompt, piece)` hears them come."""
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if top_next < 0:
        raise BraidError(f"top_next must be 0 or more, got {top_next}")
    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    folder = model_folder(model)
    loaded = load_model(folder, place := choose_device(device))
    tokenizer = load_tokenizer(folder)
    result = Generation(str(folder), place, texts=[Continuation(prompt) for prompt in prompts])
    if top_next:
        for text, tokens in zip(result.texts, next_tokens(loaded, tokenizer, prompts, top_next), strict=True):
            text.next = tokens
    begun = time.perf_counter()
    for piece in continue_text(loaded, tokenizer, prompts, max_tokens, sampling):
        text = result.texts[piece.prompt]
        text.text += piece.text
        text.tokens, text.stopped = piece.tokens, piece.stopped or ""
        if on_text is not None and piece.text:
            on_text(piece.prompt, piece.text)
    result.seconds = time.perf_counter() - begun
    return result


def choose_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).strip().split("\n")[0]
        raise BraidError(f"there is no device '{name}' here ({reason})", todo="Use auto, cpu or cuda.") from None
    return name
