"""The speed of a training, by a clock that the test turns."""

import pytest
import torch

from braidlm.training.monitoring import speed
from braidlm.training.monitoring.speed import SpeedMeter


def test_what_is_not_training_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    meter = SpeedMeter(1, torch.device("cpu"), 1)
    meter.start(0)
    now = 2.0
    with meter.paused():
        now = 60.0  # a validation
    now = 64.0
    assert meter.read(120)["tokens_per_second"] == 20.0, "two seconds before the validation, and four after it"
    assert meter.seconds == 6.0
    now = 65.0
    assert meter.read(150)["tokens_per_second"] == 30.0
