"""Model folders with a tokenizer, for edits that compress."""

from pathlib import Path
from typing import Any

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from tests.tiny_models import tiny_model

TEXT = "The cat sat on the mat. A dog ran after the ball, and the ball ran on.\n\nThe end of it.\n\n" * 4
BANKS: dict[str, Any] = {
    "block": {
        "attention": {"heads": 4, "bias": True, "experts": 3},
        "feed": {"kind": "mlp", "hidden": 24, "bias": True, "experts": 3},
    }
}
PATHS: dict[str, Any] = {
    "tie_embeddings": False,
    "stages": [{"project": {"to": 16}}, {"parallel": {"layers": 2, "paths": 2, "join": "gumbel_v1"}}],
}
SHARED: dict[str, Any] = {"stages": [{"block": {"layers": 3, "share": "feeds"}}]}
KINDS = {"dense": {}, "banks": BANKS, "paths": PATHS, "shared": SHARED}
"""Architectures whose matrices are of all sorts."""


def model_folder(out: Path, **architecture: Any) -> Path:
    tokenizer = bytes_tokenizer()
    return save_model(tiny_model(vocab_size=tokenizer.vocab_size, **architecture), out, tokenizer, {"made_by": "test"})


def text_file(folder: Path) -> Path:
    path = folder / "held-out.txt"
    path.write_text(TEXT)
    return path
