"""What is evaluated: model folders, Braid's or plain transformers', and all checkpoints of a run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, sha256_of
from braidlm.core.models.folders import (
    check_vocabulary,
    check_weights,
    choose_paths,
    load_config,
    load_lineage,
    load_model,
)
from braidlm.core.models.runs import CHECKPOINTS, is_run, model_folder, short_names
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.babylm.checkpoint_names import words_of_name
from braidlm.model.config.braid_config import BraidConfig

Place = str | Path
COUNTS = (
    "*.safetensors",
    "*.bin",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
"""The files that decide what a model says."""


@dataclass
class Subject:
    """A model folder that has been checked and not yet loaded."""

    name: str
    folder: Path
    is_braid: bool
    tokenizer: BraidTokenizer
    sha256: str
    run: str | None = None
    steps: int | None = None
    tokens: int | None = None
    words: int | None = None
    paths: list[str] | None = None
    """The paths that are heard, if they were chosen."""

    def load(self, device: str) -> Any:
        """The model in memory, in evaluation mode and in float32."""
        if self.is_braid:
            return load_model(self.folder, device, self.paths)
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).to(device).eval()


def open_subjects(
    places: Sequence[Place] | Mapping[str, Place], all_checkpoints: bool = False, paths: Sequence[str] | None = None
) -> list[Subject]:
    """Everything that is to be evaluated, checked before any of it is loaded; `paths` are those to be heard."""
    named = dict(places) if isinstance(places, Mapping) else short_names(places)
    if not named:
        raise BraidError("there is no model to evaluate", todo="Name a model folder or a run folder.")
    if not all_checkpoints:
        return [open_subject(name, model_folder(place), paths=paths) for name, place in named.items()]
    found = []
    for run, place in named.items():
        folders = checkpoint_folders(place)
        subjects = [open_subject(f"{run}/{folder.name}", folder, run, paths) for folder in folders]
        found += sorted(subjects, key=lambda s: (s.words or 0, s.tokens or 0, s.steps or 0, s.name))
    return found


def checkpoint_folders(place: Place) -> list[Path]:
    """The model folders of a run, or of any folder that holds some."""
    folder = Path(place)
    if not folder.is_dir():
        raise BraidError("there is no such folder", str(place), "Give a run folder, or a folder of checkpoints.")
    inside = folder / CHECKPOINTS if is_run(folder) else folder
    found = [path.parent for path in inside.glob("*/config.json") if not path.parent.name.startswith(".")]
    if not found:
        raise BraidError(
            "there are no checkpoints here", str(folder), "Leave out --all-checkpoints to evaluate a single model."
        )
    return sorted(found)


def open_subject(name: str, folder: Path, run: str | None = None, paths: Sequence[str] | None = None) -> Subject:
    """Check a model folder as far as its files' headers tell."""
    config = read_json(folder / "config.json")
    is_braid = isinstance(config, dict) and config.get("model_type") == BraidConfig.model_type
    try:
        tokenizer = load_tokenizer(folder)
    except BraidError as error:
        todo = (
            "Put the tokenizer.json that the model was trained with into the folder. (Of a model of transformers: "
            "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes it.)"
        )
        raise BraidError("this model folder has no tokenizer that can be read", str(folder), todo) from error
    if is_braid:
        known = load_config(folder)
        check_weights(folder, known)
        check_vocabulary(known.vocab_size, tokenizer, str(folder))
        if paths is not None:
            choose_paths(known, paths, folder)
    elif paths is not None:
        raise BraidError("only Braid's models have paths to choose from", str(folder), "Leave out --paths.")
    elif isinstance(config, dict) and isinstance(config.get("vocab_size"), int):
        check_vocabulary(config["vocab_size"], tokenizer, str(folder))
    else:
        raise BraidError("this is not the folder of a language model (its config.json has no vocab_size)", str(folder))
    training = (load_lineage(folder) or {}).get("training") or {}
    return Subject(
        name=name,
        folder=folder,
        is_braid=is_braid,
        tokenizer=tokenizer,
        sha256=model_hash(folder),
        run=run,
        steps=training.get("steps"),
        tokens=training.get("tokens"),
        words=training.get("words") or words_of_name(folder.name),
        paths=None if paths is None else list(paths),
    )


def model_hash(folder: Path) -> str:
    """SHA-256 over all files that decide what the model says."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in COUNTS for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()
