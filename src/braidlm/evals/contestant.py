"""A model as tasks see it: in memory with its tokenizer, and how the user wants it to be evaluated."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from braidlm.data.braid_tokenizer import BraidTokenizer
from braidlm.evals.scorer import Scorer


@dataclass(frozen=True)
class Settings:
    """What tasks may need to know beside model and data; part of what a kept result is found by."""

    allow_code_execution: bool = False
    """Whether programs that the model writes may be run."""


@dataclass
class Contestant:
    """One model that is being evaluated."""

    scorer: Scorer
    tokenizer: BraidTokenizer
    folder: Path | None = None
    """Where it was loaded from, if from a folder."""
    settings: Settings = field(default_factory=Settings)

    @property
    def model(self) -> Any:
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        return self.scorer.device
