"""Chains of edits with any options, on models of any parts: a model that works, or an error in words."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, note

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.edits.composing.path_models import composing_joins
from braidlm.edits.edit import edit, edits, load_edits
from braidlm.evals.evaluate import evaluate
from braidlm.inspection.generate import generate
from braidlm.inspection.routes import routes
from braidlm.opening.convert import convert, export_formats
from braidlm.opening.open import open_model
from braidlm.studies.show import show
from tests.edits.small_models import TEXT
from tests.fuzz.choices import CASES, architecture_of, options_of
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import seeded
from tests.tiny_models import tiny_model

load_edits()
USES = ("convert", "convert", "generate", "routes", "eval")
NAMES = ["a", "b", "new", "path_1", "expert_1"]
KNOWN: dict[str, list[Any]] = {
    "kind": ["vector", "scalar", "matrix"],
    "AddGates.layers": [None, [1], [2], [1, 2]],
    "Insert.modules": [1, 2, 8],
    "modules": [("stages.*",), ("stages.*.feed.*",), ("stages.*.attention.qkv",)],
    "share": [0.0, 0.5, 1.0],
    "energy": [0.2, 0.9],
    "rank": [1, 2, 8],
    "tokens": [64, 1],
    "paths": [["a"], ["model-0"], []],
    "name": NAMES,
    "report": [None],
    "text": NAMES,
}
"""What options of these names often are; others go by their types."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(TEXT)
    return path


@seeded(16)
@given(CASES)
def test_edits_of_edits(tmp_path_factory: pytest.TempPathFactory, text: Path, rng: Random) -> None:
    """Whatever an edit writes opens, computes numbers, and can be shown; the next edit begins there."""
    folder, tokenizer = tmp_path_factory.mktemp("chain"), bytes_tokenizer()
    made: list[Path] = []
    architecture = architecture_of(rng)
    note(f"architecture {architecture}")
    with honest():
        model = tiny_model(vocab_size=tokenizer.vocab_size, **architecture)
        made.append(save_model(model, folder / "model-0", tokenizer, {"made_by": "a test"}))
    for number in range(1, rng.randint(1, 4) + 1) if made else ():
        out = folder / f"model-{number}"
        with honest():
            changed(made, out, text, rng)
        if out.exists():
            made.append(out)
            sound(out)
    if made:
        with honest():
            used(made[-1], folder / "out", text, rng)


def changed(made: list[Path], out: Path, text: Path, rng: Random) -> None:
    """Mostly an edit of the last model; sometimes several models composed."""
    if rng.random() < 0.2:
        join = rng.choice(sorted(composing_joins))
        sources = [made[-1], rng.choice(made)]
        note(f"compose {sources} by {join}")
        compose(sources, out, join=join, names=["a", "b"])
        return
    kind = rng.choice(sorted(edits))
    options = options_of(rng, edits[kind], KNOWN)
    options |= {"text": str(text)} if "text" in options else {}
    note(f"edit {kind} {options}")
    edit(kind, made[-1], out, **options)


def sound(folder: Path) -> None:
    """A model that Braid wrote is one that it opens, and no edit makes a model that computes no numbers."""
    show(folder)
    opened = open_model(folder)
    with torch.no_grad():
        assert opened.load()(torch.arange(12)[None] * 7).logits.isfinite().all()


def used(folder: Path, out: Path, text: Path, rng: Random) -> None:
    use = rng.choice(USES)
    note(f"use {use}")
    if use == "convert":
        format_ = rng.choice(export_formats())
        note(f"to {format_}")
        convert(folder, out, to=format_)
    elif use == "generate":
        generate(folder, ["The cat", ""], max_tokens=3, device="cpu", top_next=2)
    elif use == "routes":
        routes([folder], data={"text": str(text)}, tokens=50, out=out, device="cpu")
    else:
        evaluate([folder], ["bits_per_byte"], data_of={"bits_per_byte": str(text)}, device="cpu")
