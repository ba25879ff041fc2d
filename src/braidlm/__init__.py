"""Braid: small language models as parts."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "prepare": "braidlm.data.packing.prepare",
    "train": "braidlm.training.train",
    "compose": "braidlm.edits.compose",
    "edit": "braidlm.edits.edit",
    "eval": "braidlm.evals.evaluate",
    "exit_curve": "braidlm.evals.curves",
    "prune_curve": "braidlm.studies.prune_curve",
    "routes": "braidlm.inspection.routes",
    "generate": "braidlm.inspection.generate",
    "serve": "braidlm.serving.serve",
    "chat": "braidlm.serving.chat",
    "compare": "braidlm.studies.compare",
    "compare_models": "braidlm.studies.compare_models",
    "convert": "braidlm.opening.convert",
    "push": "braidlm.serving.push",
    "show": "braidlm.studies.show",
    "load": "braidlm.opening.open",
    "load_model": "braidlm.core.models.folders",
    "save_model": "braidlm.core.models.folders",
    "load_tokenizer": "braidlm.data.tokenizing.build",
}
"""The verbs and what their results are read with; each is imported when it is first used, because torch is slow to."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'braidlm' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
