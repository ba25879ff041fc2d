"""What does not fit into memory is refused with the figure, before any of it is allocated."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core import devices
from braidlm.core.decoding.decoder import Decoder
from braidlm.core.devices import (
    PeakMemory,
    check_training_fits,
    explained_out_of_memory,
    free_memory,
    training_state_bytes,
    weights_bytes,
)
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_facts, skeleton
from braidlm.core.models.folders import load_model, save_model
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.paths.switches import freeze
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
HUGE: dict[str, Any] = {"width": 65_536, "stages": [{"block": {"layers": 100}}]}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)


def test_a_model_larger_than_the_machine_is_refused_with_the_figure() -> None:
    model = skeleton(BraidConfig(HUGE, vocab_size=50_000))
    with pytest.raises(BraidError, match=r"moments need [\d,]{6,} GB of memory, and this machine has [\d.,]+ GB free"):
        check_training_fits(model, CPU)
    assert model_facts(model)["parameters"] > 10**12, "it can still be shown"


def test_training_needs_four_times_the_weights_of_what_is_trained() -> None:
    model = tiny_model(tie_embeddings=True)
    parameters = sum(p.numel() for p in model.parameters())
    assert weights_bytes(model) == weights_bytes(skeleton(model.config)) == 4 * parameters
    assert training_state_bytes(model) == 12 * parameters
    freeze(model, ["embedding"])
    assert training_state_bytes(model) == 12 * (parameters - model.model.embedding.weight.numel())


def test_a_folder_is_not_loaded_into_too_little_memory(
    tmp_path: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tiny_model(), tmp_path / "m", None, {"made_by": "a test"})
    with pytest.raises(BraidError, match="the model's weights need"):
        load_model(folder)


def test_a_cache_of_keys_and_values_is_refused_too(little_memory: None) -> None:
    with pytest.raises(BraidError, match="keys and values need"):
        Decoder(tiny_model(), batch=1, length=10**6)


def write_group(folder: Path, limit: str, used: int, cached: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")
    return folder


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [write_group(tmp_path / "a", "max", 10, 0), write_group(tmp_path / "b", "1000", 700, 200), tmp_path / "c"]
    monkeypatch.setattr(devices, "_memory_groups", lambda: groups)
    assert free_memory(CPU) == 500


def test_what_is_not_known_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_memory_groups", list)
    monkeypatch.setattr(devices, "_machine_free", lambda: None)
    assert free_memory(CPU) is None
    check_training_fits(skeleton(BraidConfig(HUGE, vocab_size=50_000)), CPU)
    assert free_memory(torch.device("meta")) is None


ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), ON_CPU])
def test_running_out_of_memory_is_told(error: Exception) -> None:
    told = pytest.raises(BraidError, match="not enough for a step")
    with told as caught, explained_out_of_memory("for a step", "Less."):
        raise error
    assert caught.value.todo == "Less."


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained_out_of_memory("for a step", "Less."):
        raise RuntimeError("shapes differ")


def test_peak_memory_is_what_was_taken_since_it_was_made() -> None:
    size, memory = 64 << 20, PeakMemory(torch.device("cpu"))
    torch.ones(size // 4).sum()
    large, memory = memory.bytes(), PeakMemory(torch.device("cpu"))
    torch.ones(10).sum()
    if large is None:
        pytest.skip("this system does not tell the peak of a process")
    assert 0.9 * size < large < 2 * size
    assert memory.bytes() < 0.5 * size
