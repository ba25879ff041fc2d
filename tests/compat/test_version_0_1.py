"""Model folders, runs, states and a study that version 0.1.0 wrote open, compute the same, and go on.

`make_version_0_1.py` says how they were made; it runs with the code of that version alone.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import braidlm
from braidlm.cli.main import main

ARCHIVE = Path(__file__).with_name("version_0_1.tar.xz")
TOKENS = torch.arange(24).reshape(2, 12) % 7 + 97
RUNS = [
    "dense", "gated", "inserted", "lora", "losses", "masked", "memory", "modules", "moep", "other", "paths", "pauses",
    "taught",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root / "version_0_1"


@pytest.mark.parametrize("kind", ["parts", "edited"])
def test_a_model_folder_computes_what_it_did(folders: Path, kind: str) -> None:
    found = sorted((folders / kind).iterdir())
    assert len(found) >= {"parts": 55, "edited": 12}[kind]
    differences = {}
    for folder in found:
        model = _opened(folder)
        with torch.no_grad():
            logits = model(TOKENS % model.config.vocab_size).logits.float()
        expected = load_file(folder / "expected.safetensors")["logits"]
        if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-5):
            differences[folder.name] = (logits - expected).abs().max().item()
    assert not differences


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_same_weights(folders: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    run = Path("runs") / name
    if name == "taught":  # by the model that the run `dense` ends with
        assert main(["train", "recipes/dense.yaml", "--quiet"]) == 0
    assert main(["train", f"recipes/{name}.yaml", "--quiet"]) == 0
    for file in run.glob("expected_*.safetensors"):
        reached = load_file(run / "checkpoints" / "step-000006" / file.name.removeprefix("expected_"))
        expected = load_file(file)
        assert reached.keys() == expected.keys()
        for tensor in expected:  # another CPU may add in another order
            torch.testing.assert_close(reached[tensor], expected[tensor], rtol=1e-3, atol=1e-4, msg=tensor)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_study_and_its_models_are_shown(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders)
    names = sorted(
        path.name for path in (folders / "study" / "seed-1").iterdir() if not path.name.endswith("-composed")
    )
    assert {"both", "dense", "grown", "maths", "stories", "together"} <= set(names)
    assert main(["show", "study"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("both", "dense", "together"))
    for name in ("both", "dense", "together"):
        assert main(["show", f"study/{name}"]) == 0
        assert main(["generate", f"study/{name}", "Once", "--max-tokens", "2", "--quiet"]) == 0


def test_packed_data_is_shown(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    assert main(["show", "data/stories"]) == 0


def _opened(folder: Path) -> torch.nn.Module:
    """A folder by the public function, which wants a tokenizer, or else by transformers."""
    if (folder / "tokenizer.json").is_file():
        return braidlm.load(folder)[0]
    from braidlm.model.modeling_braid import BraidForCausalLM

    return BraidForCausalLM.from_pretrained(folder).eval()
