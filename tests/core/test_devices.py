"""Devices by name: what torch has is taken, and `auto` says why it leaves Apple's GPU alone."""

import pytest
import torch

from braidlm.core import devices
from braidlm.core.devices import choose_device


def test_mps_is_taken_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, device: device)
    assert choose_device("mps") == "mps"


def test_auto_says_once_why_it_does_not_choose_mps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    devices._say_why_not_mps.cache_clear()
    assert choose_device("auto") == choose_device("auto") == "cpu"
    assert capsys.readouterr().out.count("`--device mps` uses this one") == 1
    devices._say_why_not_mps.cache_clear()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    assert not capsys.readouterr().out
