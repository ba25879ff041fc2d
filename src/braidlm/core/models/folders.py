"""Model folders: what every checkpoint, edit and import writes, and plain transformers opens."""

import functools
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from braidlm import __version__
from braidlm.core.devices import check_weights_fit
from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import atomic_folder, sha256_of, write_json, write_text
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.card import model_card
from braidlm.core.models.integrity import check_finite, check_hash, opened_weights
from braidlm.core.models.runs import CONFIG
from braidlm.core.reading import read_json
from braidlm.core.tokenizer import Tokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import ADVICE
from braidlm.model.heads.ends import ModelEnd
from braidlm.model.language_model import LanguageModel
from braidlm.model.paths.switches import switch_off_modules, use_paths

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

transformers_logging.disable_progress_bar()

WEIGHTS = "model.safetensors"
GENERATION = "generation_config.json"
_version = functools.cache(version)  # which parses a file for each answer, and every checkpoint asks
IMPORTABLE = ("gpt2", "llama", "mistral", "moduleformer", "moep_lm", "qwen2")
"""The model types of folders that `braid convert` reads; a test keeps it equal to the bridges, which stand higher."""
LINEAGE_KINDS = {"training": dict, "sources": list, "versions": dict, "weights": dict, "tokenizer": str}


def save_model(
    model: "BraidForCausalLM",
    out: Path | str,
    tokenizer: Tokenizer | None,
    lineage: dict[str, Any],
    replace: bool = False,
) -> Path:
    """Write a complete model folder in one atomic step."""
    out = Path(out)
    with atomic_folder(out, replace=replace) as folder:
        write_model_files(model, folder, tokenizer, lineage, name=out.name)
    return out


def write_model_files(
    model: "BraidForCausalLM", folder: Path, tokenizer: Tokenizer | None, lineage: dict[str, Any], name: str
) -> None:
    """The files of a model folder, into a folder that the caller makes final."""
    write_around_weights(model, folder, tokenizer, name)
    model.save_pretrained(folder, max_shard_size="1000TB")  # a model folder has one file of weights
    write_record(model, folder, tokenizer, lineage, name)


def write_around_weights(model: "BraidForCausalLM", folder: Path, tokenizer: Tokenizer | None, name: str) -> None:
    """The tokenizer of a model folder, after a check that the model knows it, and what generation needs to know."""
    config = model.config
    if tokenizer is not None:
        check_vocabulary(config.vocab_size, tokenizer, name)
        for end in (model.model.embedding, model.head):
            if isinstance(end, ModelEnd) and not end.agrees_with(tokenizer.token_bytes):
                what = (
                    f"the model's {type(end).__name__} has not read this tokenizer: it knows other bytes of its tokens"
                )
                todo = "Call `read_tokenizer(model, tokenizer)` of braidlm.core.models.folders before it is trained."
                raise BraidError(what, name, todo)
        set_special_ids(config, tokenizer)
        tokenizer.save(folder)
    model.generation_config = generation = GenerationConfig(
        eos_token_id=config.eos_token_id, bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id
    )
    if tokenizer is not None and tokenizer.pause_id is not None:
        generation.suppress_tokens = [tokenizer.pause_id]  # it was never trained as the next token


def write_record(
    model: "BraidForCausalLM", folder: Path, tokenizer: Tokenizer | None, lineage: dict[str, Any], name: str
) -> None:
    """Lineage and card of a model folder whose weights are written."""
    record = write_lineage(folder, tokenizer, lineage, {"file": WEIGHTS, "sha256": sha256_of(folder / WEIGHTS)})
    write_text(folder / "README.md", model_card(name, record, model))


def write_lineage(
    folder: Path, tokenizer: Tokenizer | None, lineage: dict[str, Any], weights: dict[str, Any]
) -> dict[str, Any]:
    """Write where a folder came from, with its tokenizer, its weights, the time and the versions; gives the record."""
    record = {
        "format": 1,
        **lineage,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "weights": weights,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    write_json(folder / "lineage.json", record)
    return record


def read_tokenizer(model: "BraidForCausalLM", tokenizer: Tokenizer) -> None:
    """Let a new model's embedding and head know the bytes of its tokens, where they read or write these."""
    for end in (model.model.embedding, model.head):
        end.read_tokenizer(tokenizer.token_bytes)


def set_special_ids(config: BraidConfig, tokenizer: Tokenizer) -> None:
    """The tokenizer's ids, unless the configuration has them among its own: a model may end texts in several ways."""
    for role in ("eos", "bos", "pad"):
        name, token = f"{role}_token_id", getattr(tokenizer, f"{role}_id")
        ids = getattr(config, name)
        known = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i < config.vocab_size]
        if token is not None and token not in known:
            known = [token]
        setattr(config, name, known if len(known) > 1 else (known or [None])[0])
    if config.pad_token_id is None:  # batches need one, and what it is has no effect
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos


def load_model(
    folder: Path | str,
    device: str | torch.device = "cpu",
    paths: Sequence[str] | None = None,
    config: BraidConfig | None = None,
    without: Sequence[str] | None = None,
) -> "BraidForCausalLM":
    """A model folder in memory, in evaluation mode, after every tensor has been checked against its configuration.

    With `paths`, only these are active; by default those that the folder says, all unless it says otherwise. Modules
    in `without` are switched off. A `config` that is given differs from the folder's own in how the model is trained.
    """
    folder = Path(folder)
    config = load_config(folder) if config is None else deepcopy(config)
    config.name_or_path = str(folder)
    model = skeleton(config)
    switch(model, paths, without, folder)
    check_weights(folder, model)
    check_weights_fit((folder / WEIGHTS).stat().st_size, device)
    with errors_of_transformers(folder):
        if (folder / GENERATION).is_file():
            read_json(folder / GENERATION)  # transformers takes the defaults in place of one that it cannot read
            model.generation_config = GenerationConfig.from_pretrained(folder)
        fill(model, load_file(folder / WEIGHTS)).to(config.dtype)
    return model.to(device)


def fill(model: "BraidForCausalLM", tensors: dict[str, Tensor]) -> "BraidForCausalLM":
    """Give a skeleton its weights, which become its own without a second copy; it is then in evaluation mode.

    What is tied has its tensor under the name that it is saved under.
    """
    model.load_state_dict(tensors | {own: tensors[saved] for own, saved in model.tied.items()}, assign=True)
    model.tie_weights()
    return model.eval()


@contextmanager
def errors_of_transformers(path: Path) -> Iterator[None]:
    """Let what transformers cannot open, for which it raises errors of many kinds, be a BraidError."""
    try:
        yield
    except BraidError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise BraidError(f"transformers cannot open this: {first}", str(path)) from error


def switch(model: LanguageModel, paths: Sequence[str] | None, without: Sequence[str] | None, folder: Path) -> None:
    """Let a model use these paths alone, and have these modules switched off; its configuration says so too."""
    with errors_at(str(folder)):
        if paths is not None:
            use_paths(model, paths)
            model.config.paths = list(paths)
        if without:
            switch_off_modules(model, without)
            model.config.without = list(without)


def model_type(folder: Path) -> str:
    """The kind of model that a folder's config.json names."""
    if not (folder / CONFIG).is_file():
        raise BraidError("this is not a model folder (no config.json)", str(folder))
    kind = read_json(folder / CONFIG).get("model_type")
    if not isinstance(kind, str):
        raise BraidError("this is not a model folder (its config.json has no model_type)", str(folder))
    return kind


def load_config(folder: Path | str) -> BraidConfig:
    """The configuration of a model folder."""
    folder = Path(folder)
    if (kind := model_type(folder)) != BraidConfig.model_type:
        todo = f"Bring it in with `braid convert {folder} --from {kind} --out DIR`."
        if kind not in IMPORTABLE:
            todo = f"Braid imports models of type {', '.join(IMPORTABLE[:-1])} and {IMPORTABLE[-1]} (`braid convert`)."
        raise BraidError(f"this folder holds a '{kind}' model, not a Braid model", str(folder), todo)
    try:
        with errors_of_transformers(folder / "config.json"):
            return BraidConfig.from_pretrained(folder)
    except BraidError as error:
        # Nobody types a saved configuration: a name that is unknown, however near to ours, is another package's.
        unknown = re.search(r": unknown (?!key )", error.what) and ADVICE not in error.what
        where = str(folder / "config.json")
        raise BraidError(f"this configuration cannot be read:\n{error}", where, ADVICE if unknown else None) from error


def load_lineage(folder: Path | str) -> dict[str, Any] | None:
    """Where a model came from, if its folder says."""
    path = Path(folder) / "lineage.json"
    if not path.is_file():
        return None
    lineage, problems = read_json(path), []
    for key, kind in LINEAGE_KINDS.items():
        if not isinstance(lineage.get(key), kind | None):
            problems.append(f"'{key}' is not of the kind that Braid writes")
    if not problems:
        counts = lineage.get("training") or {}
        wrong = [key for key in ("steps", "tokens", "words") if not isinstance(counts.get(key), int | None)]
        problems = [f"'training.{key}' is not a whole number" for key in wrong]
        if not all(isinstance(source, dict) for source in lineage.get("sources") or []):
            problems.append("'sources' is not a list of objects")
    if problems:
        raise BraidError(problems[0], str(path), "Use another copy.")
    return lineage


def check_weights(folder: Path, model: LanguageModel) -> None:
    """Every tensor of a skeleton is there with its shape and finite numbers, none is left over, and the file is the
    saved one."""
    path = folder / WEIGHTS
    with opened_weights(path) as file:
        names = [name for name in file.keys() if name not in model.tied]  # noqa: SIM118
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in model.tied}
    if problems := compare_shapes(expected, stored, "the configuration says"):
        what = f"the weights do not fit the configuration: {listed(problems)}"
        raise BraidError(what, str(folder), "config.json and model.safetensors must come from the same model.")
    check_hash(path, load_lineage(folder))
    check_finite(path)


def check_vocabulary(vocab_size: int, tokenizer: Tokenizer, where: str) -> None:
    """A model may have more rows than the tokenizer has tokens (padding), never fewer."""
    if vocab_size < tokenizer.vocab_size:
        what = f"the model has a vocabulary of {vocab_size}, the tokenizer has {tokenizer.vocab_size} tokens"
        todo = (
            "Leave out model.vocab_size (it is taken from the tokenizer), or use the tokenizer the model was made for."
        )
        raise BraidError(what, where, todo)


def versions() -> dict[str, str]:
    """The versions that made a file."""
    packages = ("torch", "transformers", "tokenizers", "safetensors")
    return {"braidlm": __version__, "python": platform.python_version()} | {name: _version(name) for name in packages}
