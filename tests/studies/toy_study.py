"""A study small enough to run in seconds."""

from pathlib import Path
from typing import Any

PATH_MODEL: dict[str, Any] = {
    "width": 16,
    "context": 32,
    "block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24}},
    "stages": [{"block": {"layers": 2}}],
}
WHOLE_MODEL: dict[str, Any] = {**PATH_MODEL, "width": 32}


def toy_study(out: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    """Plain data of a study with two paths, two composed models and one model from scratch."""
    return {
        "name": "toy",
        "out": str(out),
        "licence": "mit",
        "domains": {
            "stories": {"source": "stories", "documents": 60, "holdout": 0.1},
            "maths": {"source": "maths", "documents": 90, "holdout": 0.1},
        },
        "data": {"length": 32, "tokenizer": {"kind": "bpe", "vocab_size": 300}, "cache": str(cache)},
        "epochs": 0.2,
        "paths": {"model": PATH_MODEL, "share": 0.5, "epochs": 0.4},
        "composed": {
            "linear": {"join": "shared_linear", "training": {"optimizer": {"lr": 1e-3}}},
            "routed": {"join": {"kind": "gumbel_v1", "losses": {"load_balance": 0.01}}},
        },
        "whole": {"dense": WHOLE_MODEL},
        "training": {"batch": 8, "optimizer": {"lr": 3e-3}},
        "validation": {"every": "5 steps", "tokens": 500},
        "log": {"every": 1},
    } | changes
