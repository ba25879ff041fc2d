"""The card of every kind of folder: its title, what it was made of, its scores, and code that does what it says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidlm.core.models.card import model_card
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits import matrices
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.opening.convert import convert
from braidlm.opening.gated_folders import write_adapter_card
from tests.edits.composed_paths import saved_path
from tests.edits.small_models import BANKS, model_folder, text_file
from tests.tiny_decoders import save_decoder


def trained(home: Path) -> Path:
    return model_folder(home / "trained", stages=[{"block": {"layers": 2}}])


def decoder(home: Path) -> Path:
    tokenizer = bytes_tokenizer()
    tokenizer.save(home / "tokenizer")
    return save_decoder("llama", home / "tokenizer", home / "decoder")


def gates(home: Path, **options: Any) -> Path:
    out = edit("gate", decoder(home), home / "gates", **options)
    assert out is not None
    return out


def composed(home: Path) -> Path:
    return compose([saved_path(home / name, seed) for seed, name in enumerate("ab")], home / "out", join="average")


def pruned(home: Path) -> Path | None:
    return edit("prune", trained(home), home / "out", text=str(text_file(home)), heads=2)


def quantised(home: Path) -> Path | None:
    return edit("quantize", trained(home), home / "out", text=str(text_file(home)))


def exported(home: Path) -> Path:
    convert(trained(home), home / "out", to="llama")
    return home / "out"


FOLDERS: dict[str, tuple[Callable[[Path], Path | None], list[str]]] = {
    "trained": (trained, ["# trained", "made with braid (the python package `braidlm`): test."]),
    "modules": (lambda home: model_folder(home / "m", **BANKS), ["model.switch_off('expert_1')"]),
    "composed": (composed, ["## made of", "| a", "| b", "paths=['a']"]),
    "pruned": (pruned, ["braid edit prune (", "heads 2", "| trained | test |", "| bits per byte of a text |"]),
    "quantised": (quantised, ["scheme int8", "| bits per byte of a text |", "| bytes of weights |"]),
    "gated": (
        lambda home: edit("gate", trained(home), home / "out"),
        ["model.stages.0.layers.1.gate').is_off = true  # this gate", "| trained | test |"],
    ),
    "whole decoder with gates": (
        lambda home: gates(home, full=True),
        ["model.layers.1.gate').is_off = true", "switch parts off"],
    ),
    "export": (exported, ["convert to llama", "| trained | test |", "## use"]),
    "adapter": (gates, ["for the model decoder, which", "gating.without(model, [1])"]),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_card_says_what_it_should_and_its_code_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "speeds", lambda models, length, steps: dict.fromkeys(models, 1.0))
    make, wanted = FOLDERS[kind]
    folder = make(tmp_path)
    assert folder is not None
    text = (folder / "README.md").read_text()
    for part in wanted:
        assert part in text.lower(), part
    assert str(tmp_path) not in text
    monkeypatch.chdir(folder)
    defined: dict[str, Any] = {}
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "peft" not in block]
    assert blocks
    for block in blocks:
        exec(compile(block.replace("max_new_tokens=50", "max_new_tokens=2"), kind, "exec"), defined)
    assert "model" in defined


@torch.no_grad()
def test_what_is_switched_off_changes_what_a_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the card, on a model whose modules matter."""
    folder = model_folder(tmp_path / "m", **BANKS)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    line = next(line for line in (folder / "README.md").read_text().splitlines() if "switch_off('" in line)
    exec(line, {"model": model})
    assert not torch.allclose(model(ids).logits, before)
    model.switch_off()
    assert torch.equal(model(ids).logits, before)


def test_a_checkpoint_has_the_name_of_its_recipe() -> None:
    lineage = {"made_by": "braid train", "recipe": {"name": "stories"}, "training": {"bits_per_byte": 1.25}}
    card = model_card("step-000150", lineage)
    assert "# stories, step-000150\n" in card
    assert "| bits per byte of its training text | - | 1.2500 |" in card
    assert "# mine\n" in model_card("mine", lineage)
    for strange in ({"measured": []}, {"sources": [3, {"model": 4}], "options": [], "training": "x"}):
        assert "# step-1\n" in model_card("step-1", strange)


def test_the_card_of_lora_says_how_to_be_without_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    write_adapter_card(tmp_path, "lora", {"made_by": "braid train"}, "org/base")
    text = (tmp_path / "README.md").read_text()
    assert "adapters for the model org/base" in text
    assert "disable_adapter()" in text
    assert "gating.without" not in text


def test_paths_of_a_machine_are_in_no_card(tmp_path: Path) -> None:
    lineage = {
        "options": {"text": str(tmp_path / "x.txt"), "seed": 1, "keep": 0.5},
        "sources": [{"path": str(tmp_path)}],
    }
    card = model_card("mine", {"made_by": "braid edit prune", **lineage})
    assert str(tmp_path) not in card
    assert "braid edit prune (keep 0.5)." in card
