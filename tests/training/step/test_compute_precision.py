"""The type of products on a CPU: bf16 only where there are instructions for it and a measurement says that it pays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braidlm.core.reading import read_json
from braidlm.training.loop import Trainer
from braidlm.training.step import compute
from braidlm.training.step.compute import choose_cpu_dtype, choose_dtype, cpu_is_fast_at_bf16
from braidlm.training.step.parallel import Rank
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import tiny_recipe

CPU, SHAPE = Rank(0, 1, torch.device("cpu")), (2, 8)


def measured(monkeypatch: pytest.MonkeyPatch, bf16: float, has_it: bool = True) -> None:
    """As if a pass took a second in float32 and so many in bf16."""
    monkeypatch.setattr(compute, "cpu_is_fast_at_bf16", lambda: has_it)
    monkeypatch.setattr(compute, "_seconds_of_a_pass", lambda *_: bf16 if torch.is_autocast_enabled("cpu") else 1.0)


def choose(precision: str = "auto", saved: str | None = None, rank: Rank = CPU) -> torch.dtype | None:
    return choose_cpu_dtype(TrainableBraid(tiny_model().train()), SHAPE, rank, precision, saved)


@pytest.mark.parametrize(("bf16", "chosen"), [(0.3, torch.bfloat16), (0.95, torch.float32), (3.0, torch.float32)])
def test_bf16_must_be_clearly_faster(monkeypatch, capsys, bf16, chosen) -> None:
    measured(monkeypatch, bf16)
    assert choose() is chosen
    assert f"bf16 is {1 / bf16:.2g} times as fast here" in capsys.readouterr().out


def test_nothing_is_measured_where_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_seconds_of_a_pass", lambda *_: pytest.fail("nothing is left to measure"))
    monkeypatch.setattr(compute, "cpu_is_fast_at_bf16", lambda: True)
    assert choose("float32") is choose("bf16") is None
    assert choose(rank=Rank(0, 2, torch.device("cpu"))) is choose(rank=Rank(0, 1, torch.device("cuda"))) is None
    assert choose(saved="bf16") is torch.bfloat16
    assert choose(saved="float32") is torch.float32
    monkeypatch.setattr(compute, "cpu_is_fast_at_bf16", lambda: False)
    assert choose() is choose(saved="bf16") is None, "a CPU that lost the instructions goes on in float32"


def test_instructions_are_what_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    known = {"_is_amx_tile_supported": lambda: False, "_is_avx512_bf16_supported": lambda: False}
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**known))
    assert not cpu_is_fast_at_bf16(), "oneDNN computes it on any CPU with AVX-512"
    assert choose_dtype("bf16", CPU.device) is torch.float32
    assert "This CPU is slow at bf16" in capsys.readouterr().out
    known["_is_amx_tile_supported"] = lambda: True
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**known))
    assert cpu_is_fast_at_bf16()
    assert choose_dtype("auto", CPU.device) is torch.float32, "until it is measured"


def test_a_run_takes_the_faster_type_and_a_resumed_one_keeps_it(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, used = Trainer._step, []

    def watched(self: Trainer) -> None:
        used.append(self.stepper.dtype)
        step(self)

    monkeypatch.setattr(Trainer, "_step", watched)
    for bf16, budget in ((0.5, 1), (2.0, 2)):
        measured(monkeypatch, bf16)
        short: dict[str, Any] = {"training": {"budget": budget}, "validation": {"every": 2, "tokens": 50}}
        run = train(tiny_recipe({"stories": stories}, tmp_path / "run", **short))
    assert used == [torch.bfloat16] * 2
    assert read_json(run.folder / "states" / run.model.name / "position.json")["dtype"] == "bf16"
