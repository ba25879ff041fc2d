"""What the tests of verbs share: the command in process, and a tiny model folder and run folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from braidlm.cli import main as command
from braidlm.core.models.folders import save_model
from braidlm.core.models.presets import config_from
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.outcome import Outcome

TINY = ["width=32", "context=64", "stages.0.block.layers=2", "block.attention.heads=4"]


@pytest.fixture
def braid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `braid ...` in this process."""
    monkeypatch.setattr(command, "VERBS", ("generate", "show", "list"))

    def run(*arguments: object) -> Outcome:
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as refused:  # by argparse
            code = int(refused.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = bytes_tokenizer()
    config = config_from("models/gpt2", TINY, vocab_size=tokenizer.vocab_size)
    lineage = {"made_by": "a test", "training": {"steps": 7, "tokens": 700, "words": 70}}
    return save_model(BraidForCausalLM(config), tmp_path_factory.mktemp("models") / "tiny", tokenizer, lineage)


@pytest.fixture
def model_folder(made_model: Path, tmp_path: Path) -> Path:
    """A copy, which a test may damage."""
    return Path(shutil.copytree(made_model, tmp_path / "model"))


RECIPE = """
name: little
model: {width: 32, context: 64, stages: [block]}
data: {length: 64, tokenizer: {kind: bpe, vocab_size: 300}, sets: {stories: {source: stories}}}
training: {budget: 9 steps}
"""


@pytest.fixture
def run_folder(made_model: Path, tmp_path: Path) -> Path:
    """A run with two checkpoints, of which the one with the smaller name is the newer, and one half-written."""
    run = tmp_path / "run"
    for name, steps in (("step-10", 10), ("step-9", 9), (".step-11.part", 11)):
        folder = Path(shutil.copytree(made_model, run / "checkpoints" / name))
        lineage = json.loads((folder / "lineage.json").read_text())
        (folder / "lineage.json").write_text(json.dumps(lineage | {"training": {"steps": steps}}))
    (run / "recipe.yaml").write_text(RECIPE)
    records = [
        {"kind": "train", "step": 9, "loss": 5.0, "tokens": 900},
        {"kind": "train", "step": 10, "loss": 4.5, "tokens": 1000},
        {"kind": "validation", "step": 10, "loss": 4.75},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"kind": "tra')
    return run
