"""A model that a study has made."""

from dataclasses import dataclass, field
from pathlib import Path

from braidlm.studies.models import Kind
from braidlm.training.train import Run


@dataclass
class TrainedModel:
    """One model of a study, made with one seed."""

    name: str
    kind: Kind
    seed: int
    """Of an average of all seeds, the study's first."""
    model: Path
    """Its model folder."""
    run: Run | None = None
    """Its training; None for a model that was only edited or averaged, or that was given."""
    parts: list["TrainedModel"] = field(default_factory=list)
    """Of a composed model: its paths; of an average: its members; of a distilled model: the average."""
