"""The model folders that are evaluated: Braid's or plain transformers', and all checkpoints of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import (
    check_vocabulary,
    check_weights,
    choose_paths,
    errors_of_transformers,
    leave_out_modules,
    load_config,
    load_lineage,
    load_model,
)
from braidlm.core.models.integrity import model_hash, not_finite, not_finite_error
from braidlm.core.models.names import StrPath, model_folder, name_sources
from braidlm.core.models.runs import CHECKPOINTS, is_interruption, is_run
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.babylm.conventions import words_in_name
from braidlm.model.config.braid_config import BraidConfig


@dataclass
class ModelFolder:
    """A model folder that has been checked and not yet loaded."""

    name: str
    path: Path
    is_braid: bool
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

    def load(self, device: str) -> Any:
        """The model in memory, in evaluation mode and in float32."""
        if self.is_braid:
            return load_model(self.path, device, self.paths, without=self.without)
        import torch
        from transformers import AutoModelForCausalLM

        with errors_of_transformers(self.path):
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, trust_remote_code=False)
        model = model.to(device).eval()
        if names := not_finite(model.state_dict().items()):
            raise not_finite_error(names, str(self.path))
        return model


def open_model_folders(
    models: StrPath | Sequence[StrPath] | Mapping[str, StrPath],
    all_checkpoints: bool = False,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> list[ModelFolder]:
    """All models of an evaluation, checked before any of them is loaded.

    `paths` are the active ones, `without` are modules that are switched off.
    """
    named = name_sources(models, any_folder=all_checkpoints)
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


def checkpoint_folders(folder: Path) -> list[Path]:
    """The model folders of a run, or of any folder that holds some."""
    parent = folder / CHECKPOINTS if is_run(folder) else folder
    folders = [path.parent for path in parent.glob("*/config.json") if not path.parent.name.startswith(".")]
    checkpoints = [path for path in folders if not is_interruption(path)]
    if not checkpoints:
        raise BraidError(
            "there are no checkpoints here", str(folder), "Leave out --all-checkpoints to evaluate a single model."
        )
    return sorted(checkpoints)


def open_model_folder(
    name: str,
    path: Path,
    run: str | None = None,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
) -> ModelFolder:
    """Check a model folder by its configuration, its tokenizer and the header of its weights."""
    config = read_json(path / "config.json")
    is_braid = config.get("model_type") == BraidConfig.model_type
    try:
        tokenizer = load_tokenizer(path)
    except BraidError as error:
        todo = (
            "Put the tokenizer.json that the model was trained with into the folder. (Of a model of transformers: "
            "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes it.)"
        )
        raise BraidError("this model folder has no tokenizer that can be read", str(path), todo) from error
    if is_braid:
        braid_config = load_config(path)
        check_weights(path, braid_config)
        check_vocabulary(braid_config.vocab_size, tokenizer, str(path))
        if paths is not None:
            choose_paths(braid_config, paths, path)
        if without:
            leave_out_modules(braid_config, without, path)
    elif paths is not None or without:
        what, option = ("paths to choose from", "--paths") if paths is not None else ("named modules", "--without")
        raise BraidError(f"only Braid's models have {what}", str(path), f"Leave out {option}.")
    elif isinstance(config.get("vocab_size"), int):
        _check_transformers_config(path)
        check_vocabulary(config["vocab_size"], tokenizer, str(path))
    else:
        raise BraidError("this is not the folder of a language model (its config.json has no vocab_size)", str(path))
    training = (load_lineage(path) or {}).get("training") or {}
    return ModelFolder(
        name=name,
        path=path,
        is_braid=is_braid,
        tokenizer=tokenizer,
        sha256=model_hash(path),
        run=run,
        steps=training.get("steps"),
        tokens=training.get("tokens"),
        words=training.get("words") or words_in_name(path.name),
        paths=None if paths is None else list(paths),
        without=list(without) if without else None,
    )


def _check_transformers_config(path: Path) -> None:
    """Let transformers read the configuration; code that the folder brings along is not run."""
    from transformers import AutoConfig

    with errors_of_transformers(path):
        AutoConfig.from_pretrained(path, trust_remote_code=False)
