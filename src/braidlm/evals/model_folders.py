"""The model folders that are evaluated: Braid's, decoders of transformers with or without adapters, and all
checkpoints of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.bridges.locate import on_disk
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import (
    check_vocabulary,
    check_weights,
    load_config,
    load_lineage,
    load_model,
    switch,
)
from braidlm.core.models.integrity import model_hash
from braidlm.core.models.names import StrPath, model_folder, name_sources, names_inside
from braidlm.core.models.runs import CHECKPOINTS, CONFIG, is_interruption, is_run, model_folders_in
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.decoders.loading import OpenDecoder, decoder_in
from braidlm.evals.babylm.conventions import words_in_name
from braidlm.model.config.braid_config import BraidConfig


@dataclass
class ModelFolder:
    """A model folder that has been checked and not yet loaded."""

    name: str
    path: Path
    decoder: OpenDecoder | None
    """The decoder of transformers that it is; None for a Braid model."""
    tokenizer: BraidTokenizer
    sha256: str
    run: str | None = None
    steps: int | None = None
    tokens: int | None = None
    words: int | None = None
    paths: list[str] | None = None
    """The active paths, if they were chosen."""
    without: list[str] | None = None
    """The modules that are switched off, if any."""

    @property
    def is_braid(self) -> bool:
        return self.decoder is None

    def load(self, device: str) -> Any:
        """The model in memory, in evaluation mode and in float32."""
        if self.decoder is not None:
            return self.decoder.load(device)
        return load_model(self.path, device, self.paths, without=self.without)


def open_model_folders(
    models: StrPath | Sequence[StrPath] | Mapping[str, StrPath],
    all_checkpoints: bool = False,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> list[ModelFolder]:
    """All models of an evaluation, checked before any of them is loaded.

    `paths` are the active ones, `without` are modules that are switched off.
    """
    named = name_sources(_on_disk(models), any_folder=all_checkpoints)
    if not named:
        raise BraidError("there is no model to evaluate", todo="Name a model folder, a run or a study.")
    if not all_checkpoints:
        return [
            open_model_folder(name, model_folder(folder), paths=paths, without=without)
            for name, folder in named.items()
        ]
    opened = []
    for run, folder in named.items():
        checkpoints = [
            open_model_folder(f"{run}/{path.name}", path, run, paths, without) for path in checkpoint_folders(folder)
        ]
        opened += sorted(checkpoints, key=lambda c: (c.words or 0, c.tokens or 0, c.steps or 0, c.name))
    return opened


def _on_disk(
    models: StrPath | Sequence[StrPath] | Mapping[str, StrPath],
) -> StrPath | Sequence[StrPath] | Mapping[str, StrPath]:
    """The same models, where those that the Hub has (ORG/NAME) are folders here, under their names."""
    if isinstance(models, Mapping):
        return {label: on_disk(name) for label, name in models.items()}
    listed = [models] if isinstance(models, (str, Path)) else list(models)
    found = [on_disk(name) for name in listed]
    if found == listed:
        return models
    return {str(name): folder for name, folder in zip(listed, found, strict=True)}


def checkpoint_folders(folder: Path) -> list[Path]:
    """The model folders of a run, or of any folder that holds some."""
    parent = folder / CHECKPOINTS if is_run(folder) else folder
    checkpoints = [path for path in model_folders_in(parent) if not is_interruption(path)]
    if not checkpoints:
        todo = names_inside(folder) or "Leave out --all-checkpoints to evaluate a single model."
        raise BraidError("there are no checkpoints here", str(folder), todo)
    return checkpoints


def open_model_folder(
    name: str,
    path: Path,
    run: str | None = None,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> ModelFolder:
    """Check a model folder by its configuration, its tokenizer and the header of its weights."""
    is_braid = (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") == BraidConfig.model_type
    decoder = None if is_braid else decoder_in(path)
    try:
        tokenizer = load_tokenizer(path) if decoder is None else decoder.tokenizer
    except BraidError as error:
        todo = (
            "Put the tokenizer.json that the model was trained with into the folder. (Of a model of transformers: "
            "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes it.)"
        )
        raise BraidError("this model folder has no tokenizer that can be read", str(path), todo) from error
    if decoder is None:
        model = skeleton(load_config(path))
        check_weights(path, model)
        check_vocabulary(model.config.vocab_size, tokenizer, str(path))
        switch(model, paths, without, path)
    elif paths is not None or without:
        what, option = ("paths to choose from", "--paths") if paths is not None else ("named modules", "--without")
        raise BraidError(f"only Braid's models have {what}", str(path), f"Leave out {option}.")
    elif isinstance(size := getattr(decoder.config.get_text_config(), "vocab_size", None), int):
        check_vocabulary(size, tokenizer, str(path))
    else:
        raise BraidError("this is not the folder of a language model (its config.json has no vocab_size)", str(path))
    training = (load_lineage(path) or {}).get("training") or {}
    return ModelFolder(
        name=name,
        path=path,
        decoder=decoder,
        tokenizer=tokenizer,
        sha256=model_hash(path) if decoder is None else decoder.sha256,
        run=run,
        steps=training.get("steps"),
        tokens=training.get("tokens"),
        words=training.get("words") or words_in_name(path.name),
        paths=None if paths is None else list(paths),
        without=list(without) if without else None,
    )
