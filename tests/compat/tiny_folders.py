"""Model folders of every tiny recipe, what the package computes with them, and a process that opens them without it."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from braidlm.core.models.folders import read_tokenizer, save_model
from braidlm.core.models.presets import RecipeModel, read_model
from braidlm.core.recipes import compose_recipe, list_recipes
from braidlm.data.tokenizing.build import bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM, BraidForSequenceClassification
from tests.compat.check_folder import LABELS, TEXTS, encode, measure
from tests.tiny_models import randomised
from tests.warm_python import warm_python
from tests.without_braid import WITHOUT_BRAID


def _with_models_of_their_own() -> dict[str, RecipeModel]:
    """The tiny recipes, without studies, which have several models, and without those that only train another way."""
    found: dict[str, tuple[str, RecipeModel]] = {}
    for name in (name for name, _ in list_recipes() if name.startswith("tiny/")):
        data = compose_recipe(name)
        if "model" in data:
            model = read_model(data, name)
            written = json.dumps(BraidConfig(model.architecture).architecture)
            found.setdefault(written, (name.removeprefix("tiny/"), model))
    return dict(found.values())


TINY = _with_models_of_their_own()
SCRIPT = Path(__file__).with_name("check_folder.py")
ALONE = WITHOUT_BRAID + f"import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"


@dataclass
class TinyFolders:
    """The folders, and by recipe the models they were saved from and what these compute."""

    root: Path
    models: dict[str, BraidForCausalLM]
    measured: dict[str, dict[str, Tensor]]
    text: dict[str, list[str]]


def save_tiny_folders(root: Path) -> TinyFolders:
    """A language model and a classifier of every recipe in recipes/tiny, with random weights."""
    saved = TinyFolders(root, {}, {}, {})
    for name, recipe in TINY.items():
        tokenizer = _tokenizer(name)
        config = BraidConfig(recipe.architecture, recipe.vocab_size or tokenizer.vocab_size)
        model = randomised(BraidForCausalLM(config)).eval()
        read_tokenizer(model, tokenizer)
        folder = save_model(model, root / name, tokenizer, {"made_by": "a test"})
        config = BraidConfig(recipe.architecture, recipe.vocab_size or tokenizer.vocab_size, num_labels=LABELS)
        classifier = randomised(BraidForSequenceClassification(config), seed=1).eval()
        classifier.save_pretrained(root / f"{name}-classes")
        reader = PreTrainedTokenizerFast.from_pretrained(folder)
        saved.models[name] = model
        saved.measured[name] = measure(model, model.model, classifier, encode(reader))
        saved.text[name] = reader.batch_decode(saved.measured[name]["generated"])
    return saved


def check_without_braid(
    folders: Path, out: Path, python: Path | None = None, trains: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The facts and the tensors of check_folder.py, run by a Python of choice with nothing of ours on its path."""
    out.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_MODULES_CACHE": str(out / "cached_code"), "HF_HOME": str(out / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python or warm_python(), "-I", "-c", ALONE, folders, out, *(["--train"] if trains else [])],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads((out / "facts.json").read_text())
    return facts, {name: load_file(out / f"{name}.safetensors") for name in TINY}


def _tokenizer(recipe: str) -> BraidTokenizer:
    """The recipe's kind of tokenizer; a BPE of few tokens, so that the embedding does not hide the rest."""
    if recipe == "bytes":
        return bytes_tokenizer()
    special = SpecialTokens()
    return BraidTokenizer(train_bpe(TEXTS * 2, 300, special.order), special)
