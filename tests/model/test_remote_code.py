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
from check_folder import LABELS, NEW_TOKENS, TEXTS
from safetensors.torch import load_file
from tiny_folders import TINY, TinyFolders, check_without_braid, save_tiny_folders
from torch import Tensor

import braidlm
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.folders import load_model, save_model
from braidlm.model import bundle as bundling
from braidlm.model.bundle import bundle
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.xdist_group("remote code")  # one worker, for its tests share one process
MAX_BYTES = 200_000
OLD_FOLDERS = sorted((Path(__file__).parent / "folders" / "before_bundle").iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TinyFolders:
    return save_tiny_folders(tmp_path_factory.mktemp("saved") / "folders")


@pytest.fixture(scope="module")
def alone(saved: TinyFolders) -> tuple[Path, dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Where one process without braidlm saved its models, what it says, and what it computed."""
    out = saved.root.parent / "alone"
    return (out, *check_without_braid(saved.root, out))


@pytest.mark.parametrize("name", TINY)
def test_a_folder_computes_the_same_without_braidlm(name: str, saved: TinyFolders, alone: Any) -> None:
    _, facts, measured = alone
    assert facts["modules"] == []
    assert facts[name]["classes"] == ["BraidForCausalLM", "BraidModel", "BraidForSequenceClassification"]
    assert measured[name].keys() == saved.measured[name].keys()
    different = [key for key, tensor in saved.measured[name].items() if not torch.equal(tensor, measured[name][key])]
    assert not different
    assert facts[name]["text"] == saved.text[name]
    assert facts[name]["example"].startswith("Once upon a time")
    assert facts[name]["new_head"] == [len(TEXTS), LABELS]
    assert max(facts[name]["half"]) < 0.05


@pytest.mark.parametrize("name", TINY)
def test_transformers_generates_what_the_decoder_does(name: str, saved: TinyFolders, alone: Any) -> None:
    generated, model = alone[2][name]["generated"], saved.models[name]
    prompt = generated[:1, :-NEW_TOKENS]  # the first text has no padding
    eos = model.config.eos_token_id
    decoder = Decoder(model, 1, generated.shape[1])
    decoded = [t[0] for t, _ in decode_tokens(decoder, prompt.tolist(), NEW_TOKENS, Sampling(0), eos_id=eos)]
    assert generated[0, prompt.shape[1] :].tolist()[: len(decoded)] == decoded


@pytest.mark.parametrize("name", TINY)
def test_what_is_saved_again_is_whole(name: str, saved: TinyFolders, alone: Any) -> None:
    out, facts, _ = alone
    assert facts[name]["code"] == ["modeling_braid.py"]
    assert facts[name]["again"]
    assert (out / name / "modeling_braid.py").read_text() == bundle()
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load_model(out / name)(ids).logits, saved.models[name](ids).logits)


def test_a_folder_has_one_file_of_code(saved: TinyFolders) -> None:
    for name in TINY:
        (code,) = (saved.root / name).rglob("*.py")
        assert code.name == "modeling_braid.py"
        assert code.stat().st_size <= MAX_BYTES


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


def test_a_name_may_be_defined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundling, "ROOT", tmp_path)
    monkeypatch.setattr(bundling, "LAST", tmp_path / "modeling_braid.py")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text('"""A."""\n\nSIZE = 1\n')
    (tmp_path / "modeling_braid.py").write_text('"""B."""\n\nfrom .room.a import SIZE\n\nprint(SIZE)\n')
    assert bundle.__wrapped__().endswith("SIZE = 1\n\n\n# modeling_braid.py\n# B.\n\n\nprint(SIZE)\n")
    (tmp_path / "room" / "b.py").write_text('"""C."""\n\n\ndef SIZE() -> None: ...\n')
    with pytest.raises(RuntimeError, match=r"'SIZE' is defined in .*a\.py and in .*b\.py"):
        bundle.__wrapped__()


def test_the_model_names_no_kernel() -> None:
    for path in Path(bundling.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btriton\b|braidlm\.kernels", path.read_text(), re.IGNORECASE), path


@pytest.mark.parametrize("folder", OLD_FOLDERS, ids=lambda folder: folder.name)
def test_folders_with_many_code_files_still_open(folder: Path, tmp_path: Path) -> None:
    """Earlier folders carried each file of the model; these hold what such a folder has beside its code."""
    expected = load_file(folder / "expected.safetensors")
    model = load_model(folder)
    with torch.no_grad():
        assert torch.equal(model(expected["input_ids"]).logits, expected["logits"])
    again = save_model(model, tmp_path / "again", None, {})
    assert [path.name for path in again.glob("*.py")] == ["modeling_braid.py"]


def test_the_same_ids_give_the_same_logits_after_a_round_trip_through_auto_classes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model, ids = tiny_model(), random_ids(1, 6)
    folder = save_model(model, tmp_path / "model", None, {})
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).vocab_size == 37
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
