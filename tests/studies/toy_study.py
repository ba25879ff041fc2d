"""A study small enough to run in seconds."""

from copy import deepcopy
from pathlib import Path
from typing import Any

PATH_MODEL: dict[str, Any] = {
    "width": 16,
    "context": 32,
    "block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24}},
    "stages": [{"block": {"layers": 2}}],
}
WHOLE_MODEL: dict[str, Any] = {**PATH_MODEL, "width": 32}


def path(domain: str, **train: Any) -> dict[str, Any]:
    """The step of a path: a model of the text that the owner of a domain keeps."""
    return {"model": PATH_MODEL, "train": {"domains": [domain], "text": "kept", **train}}


def composed(*names: str, train: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A step that composes paths and trains what it composed on the text that all share."""
    return {"compose": list(names or ("stories", "maths")), "train": {"text": "shared", **(train or {})}, **options}


PATHS: dict[str, Any] = {domain: path(domain, epochs=0.4) for domain in ("stories", "maths")}
COMPOSED: dict[str, Any] = {
    "linear": composed(join="shared_linear", train={"optimizer": {"lr": 1e-3}}),
    "routed": composed(join={"kind": "gumbel_v1", "losses": {"load_balance": 0.01}}),
}
DENSE: dict[str, Any] = {"dense": {"model": WHOLE_MODEL}}


def toy_study(out: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    """Plain data of a study with two paths, two composed models and one model from scratch."""
    return deepcopy(
        {
            "name": "toy",
            "out": str(out),
            "licence": "mit",
            "domains": {
                "stories": {"source": "stories", "documents": 60, "holdout": 0.1},
                "maths": {"source": "maths", "documents": 90, "holdout": 0.1},
            },
            "data": {"length": 32, "tokenizer": {"kind": "bpe", "vocab_size": 300}, "cache": str(cache)},
            "epochs": 0.2,
            "kept": 0.5,
            "steps": PATHS | COMPOSED | DENSE,
            "training": {"batch": 8, "optimizer": {"lr": 3e-3}},
            "validation": {"every": "5 steps", "tokens": 500},
            "log": {"every": 1},
        }
        | changes
    )
