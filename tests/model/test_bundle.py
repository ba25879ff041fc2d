"""A saved folder works where braidlm cannot be imported: plain transformers, with the one file of code it carries."""

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import braidlm
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.folders import load_model, save_model
from braidlm.model import bundle as bundling
from braidlm.model.bundle import bundle
from braidlm.model.config.registry import PARTS
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.compat.check_folder import LABELS, NEW_TOKENS, TEXTS
from tests.compat.tiny_folders import TINY, TinyFolders, check_without_braid, save_tiny_folders
from tests.tiny_models import random_ids, tiny_model

MAX_BYTES = 330_000
OLD_FOLDERS = sorted((Path(__file__).parent / "folders" / "before_bundle").iterdir())


def test_every_tiny_folder_works_without_braidlm(tmp_path: Path) -> None:
    """One test, since all folders are opened in one process."""
    saved = save_tiny_folders(tmp_path / "folders")
    for name in TINY:
        (code,) = (saved.root / name).rglob("*.py")
        assert code.name == "modeling_braid.py"
        assert code.stat().st_size <= MAX_BYTES
    facts, measured = check_without_braid(saved.root, tmp_path / "alone")
    assert facts["imported"] == []
    for name in TINY:
        _assert_same_numbers(name, saved, measured[name])
        _assert_same_decoding(name, saved.models[name], measured[name]["generated"])
        drafted = measured[name]["drafted"][0].tolist()
        assert drafted == measured[name]["generated"][0].tolist()[: len(drafted)], f"{name}: drafts by the first layer"
        _assert_facts(name, saved, facts[name])
        _assert_saved_again(tmp_path / "alone" / name, saved.models[name], facts[name])


def _assert_same_numbers(name: str, saved: TinyFolders, measured: dict[str, Tensor]) -> None:
    expected = saved.measured[name]
    assert measured.keys() == expected.keys(), name
    for key, tensor in expected.items():
        if tensor.is_floating_point():
            # Not to the last digit: on some processors sums round as the memory that they read is aligned.
            torch.testing.assert_close(measured[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{name} {key}")
        else:
            assert torch.equal(measured[key], tensor), f"{name} {key}"


def _assert_same_decoding(name: str, model: BraidForCausalLM, generated: Tensor) -> None:
    """transformers' `generate` and the package's own decoder, which is what `braid generate` runs."""
    prompt = generated[:1, :-NEW_TOKENS]  # the first text has no padding
    eos = model.config.eos_token_id
    decoder = Decoder(model, 1, generated.shape[1])
    decoded = [t[0] for t, _ in decode_tokens(decoder, prompt.tolist(), NEW_TOKENS, Sampling(0), eos_id=eos)]
    assert generated[0, prompt.shape[1] :].tolist()[: len(decoded)] == decoded, name


def _assert_facts(name: str, saved: TinyFolders, facts: dict[str, Any]) -> None:
    assert facts["classes"] == ["BraidForCausalLM", "BraidModel", "BraidForSequenceClassification"], name
    assert facts["text"] == saved.text[name]
    assert facts["example"].startswith("Once upon a time"), name
    assert facts["new_head"] == [len(TEXTS), LABELS], name
    assert max(facts["half"]) < 0.05, name


def _assert_saved_again(folder: Path, model: BraidForCausalLM, facts: dict[str, Any]) -> None:
    assert facts["code"] == ["modeling_braid.py"], folder
    assert facts["again"], folder
    assert (folder / "modeling_braid.py").read_text() == bundle()
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load_model(folder)(ids).logits, model(ids).logits), folder


def test_the_code_is_formatted_and_clean(tmp_path: Path) -> None:
    path = tmp_path / "modeling_braid.py"
    path.write_text(bundle())
    options = ["--isolated", "--no-cache", "--config", "line-length=120", str(path)]
    for command in (["check", "--select", "E,F,I"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *options]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_says_its_version_and_hash() -> None:
    header, body = bundle().split('"""\n\n', 1)
    assert f"Written by braidlm {braidlm.__version__} " in header
    assert re.search(r"SHA-256 .*: ([0-9a-f]{64})", header)[1] == hashlib.sha256(body.encode()).hexdigest()  # type: ignore[index]


def test_the_code_imports_nothing_of_ours() -> None:
    for node in ast.walk(ast.parse(bundle())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else ["." * node.level + str(node.module)]
            )
            roots = {name.split(".")[0] for name in names}
            assert roots <= {"torch", "transformers"} | sys.stdlib_module_names, f"line {node.lineno}"


def test_files_are_joined_in_the_order_of_their_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundling, "ROOT", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "z.py").write_text('"""A."""\n\nimport os\n\nSIZE = 1\n"""Of all."""\n')
    (tmp_path / "modeling_braid.py").write_text('"""B."""\n\nfrom .room.z import SIZE\n\n# Why.\nTWICE = 2 * SIZE\n')
    text = bundle.__wrapped__()
    assert text.endswith(
        'import os\n\n\n# room/z.py\n# A.\n\n\nSIZE = 1\n"""Of all."""\n\n\n# modeling_braid.py\n# B.\n\n\n'
        "# Why.\nTWICE = 2 * SIZE\n"
    )
    part = tmp_path / "room" / "b.py"
    part.write_text('"""C."""\n\n\ndef SIZE() -> None: ...\n')
    with pytest.raises(RuntimeError, match=r"'SIZE' is defined in .*b\.py and in .*z\.py"):
        bundle.__wrapped__()
    part.write_text('"""C."""\n\nprint(1)\n')
    with pytest.raises(RuntimeError, match=r"b\.py:3: the model's files only define names"):
        bundle.__wrapped__()


def test_a_folder_carries_every_part() -> None:
    for registry in PARTS.values():
        for name in registry:
            part = registry[name]
            if part.__module__.startswith("braidlm.model"):
                assert f"class {part.__name__}(" in bundle() or f"def {part.__name__}(" in bundle(), name


def test_the_model_names_no_kernel() -> None:
    for path in Path(bundling.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btriton\b|braidlm\.kernels", path.read_text(), re.IGNORECASE), path


@pytest.mark.parametrize("folder", OLD_FOLDERS, ids=lambda folder: folder.name)
def test_folders_with_many_code_files_still_open(folder: Path, tmp_path: Path) -> None:
    """Earlier folders carried each file of the model; these hold what such a folder has beside its code."""
    expected = load_file(folder / "expected.safetensors")
    model = load_model(folder)
    with torch.no_grad():
        torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logits"])  # of another processor
    again = save_model(model, tmp_path / "again", None, {})
    assert [path.name for path in again.glob("*.py")] == ["modeling_braid.py"]


def test_the_same_ids_give_the_same_logits_after_a_round_trip_through_auto_classes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model, ids = tiny_model(), random_ids(1, 6)
    folder = save_model(model, tmp_path / "model", None, {})
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).vocab_size == 37
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
