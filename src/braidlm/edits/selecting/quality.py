"""What a whole model predicts of a text, with some of its gates switched off."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import HeldOutText
from braidlm.evals.scoring.scorer import Scorer
from braidlm.opening.gating import without


@dataclass(frozen=True)
class Quality:
    """Of a whole model on a text."""

    bits_per_byte: float
    perplexity: float
    """Per token."""


def quality(
    model: Any, tokenizer: BraidTokenizer, folder: Path | None, text: HeldOutText, off: Iterable[int] = ()
) -> Quality:
    """Bits per byte and perplexity, without the gates of the layers `off`."""
    evaluated = EvaluatedModel(Scorer(model), tokenizer, folder)
    with without(model, off), console.progress("bits per byte", None, "tokens") as advance:
        result = text.evaluate("bits_per_byte", evaluated, lambda done, total: advance(done, ""))
    bits = result.score * result.notes["bytes"] / result.notes["tokens"]
    return Quality(result.score, 2.0**bits)
