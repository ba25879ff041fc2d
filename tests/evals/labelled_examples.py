"""Made-up labelled data in the layouts of GLUE, and models small enough to learn it in a second."""

import json
import random
from pathlib import Path
from typing import Any

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.scoring.scorer import Scorer
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
STACKED = {
    "stages": ["block", {"parallel": {"paths": 2, "join": {"kind": "routed", "top_k": 1, "losses": {"switch": 0.1}}}}]
}
"""A model with parts of one shape in stacks, and a router that asks for balance."""


def evaluated(settings: Settings | None = None, **architecture: Any) -> EvaluatedModel:
    """A tiny model that reads bytes."""
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, **{"context": 48, **architecture})
    return EvaluatedModel(Scorer(model), TOKENIZER, settings=settings or Settings())


def average_of(home: Path, kinds: list[dict[str, Any]]) -> tuple[Path, list[Path]]:
    """The folder of an average of tiny models of these kinds, and those of its members."""
    members = []
    for seed, kind in enumerate(kinds):
        model = tiny_model(seed=seed, vocab_size=TOKENIZER.vocab_size, **{"context": 48, **kind})
        members.append(save_model(model, home / "abc"[seed], TOKENIZER, {"made_by": "braid train"}))
    made = compose(members, home / "made", join="average")
    assert made is not None
    return made, members


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answerable(count: int, seed: int, yes: float = 0.35) -> list[dict[str, Any]]:
    """Sentences whose last letter says the label: a model that reads the last token can learn it, and no other."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        label = int(index < yes * count)
        stem = "".join(rng.choice("abcd ") for _ in range(rng.randint(1, 30)))
        rows.append({"sentence": stem + ("zy"[label]), "label": label, "idx": index})
    rng.shuffle(rows)
    return rows


def write_answerable(folder: Path, train: int = 96, valid: int = 40) -> Path:
    """SST-2 in the BabyLM challenge's layout."""
    write_rows(folder / "sst2.train.jsonl", answerable(train, seed=1))
    write_rows(folder / "sst2.valid.jsonl", answerable(valid, seed=2))
    return folder
