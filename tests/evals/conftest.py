"""What the tests of `braid eval` share: runs with checkpoints, task data in a folder, the command in process."""

import json
import random
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

TINY = ["width=16", "context=64", "stages.0.block.layers=1", "block.attention.heads=2"]
WORDS = {"chck_1M": 1_000_000, "chck_2M": 2_000_000, "chck_10M": 10_000_000, "chck_30M": 30_000_000}


@pytest.fixture
def eval_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `braid eval ...` in this process, on the CPU."""
    monkeypatch.setattr(command, "VERBS", ("eval",))

    def run(*arguments: object) -> Outcome:
        code = command.main(["eval", *map(str, arguments)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four checkpoints with random weights; names do not sort as words do."""
    root, tokenizer = tmp_path_factory.mktemp("runs"), bytes_tokenizer()
    config = config_from("models/gpt2", TINY, vocab_size=tokenizer.vocab_size)
    for seed, run in enumerate(("one", "two")):
        for at, (name, words) in enumerate(WORDS.items()):
            torch.manual_seed(10 * seed + at)
            model = BraidForCausalLM(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0)
            lineage = {"made_by": "a test", "training": {"steps": at + 1, "tokens": 2 * words, "words": words}}
            save_model(model, root / run / "checkpoints" / name, tokenizer, lineage)
        (root / run / "recipe.yaml").write_text("name: little\n")
    return root


@pytest.fixture
def runs(made_runs: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(made_runs, tmp_path / "runs"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder as the BabyLM challenge lays it out, and some text."""
    rng = random.Random(0)
    root = tmp_path / "evaluation-data"
    sets = root / "babylm-2025" / "fast_eval" / "blimp_fast"
    sets.mkdir(parents=True)
    for name in ("agreement", "binding"):
        rows = []
        for _ in range(12):
            stem = "".join(rng.choice("abcdef ") for _ in range(rng.randint(3, 12)))
            good, bad = ("".join(rng.choice("abcdef") for _ in range(4)) for _ in range(2))
            rows.append({"sentence_good": stem + good, "sentence_bad": stem + bad, "field": "syntax", "UID": name})
        (sets / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "dev").mkdir()
    (root / "dev" / "a.txt").write_text("One day a cat sat.\n\nThe end came soon.\n")
    return root
