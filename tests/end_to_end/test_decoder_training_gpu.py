"""A decoder of transformers on a GPU: a frozen base in bf16, what is trained in float32, the same after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidlm.model.config.strict import decode
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gating import gates_of
from braidlm.training.decoder import weights_dtype
from braidlm.training.recipe import TrainingConfig
from braidlm.training.train import train
from tests.tiny_decoders import save_decoder, save_gates
from tests.training.tiny_runs import decoder_recipe, records, stopped_after

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        ({"train": "gates"}, torch.bfloat16),
        ({"lora": {}}, torch.bfloat16),
        ({"train": "gates", "precision": "float32"}, torch.float32),
        ({}, torch.float32),
        ({"precision": "pure_bf16"}, torch.bfloat16),
    ],
)
def test_the_type_of_the_decoders_own_weights(training: dict[str, Any], dtype: torch.dtype) -> None:
    config: TrainingConfig = decode(TrainingConfig, {"budget": 1, "batch": 1, **training})
    assert weights_dtype(config, GPU) == dtype


@pytest.mark.parametrize("training", [{"train": "gates"}, {"lora": {"rank": 2}}, {}, {"precision": "pure_bf16"}])
def test_a_run_on_a_gpu_goes_on_as_if_it_had_not_been_stopped(
    training: dict[str, Any], stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_decoder("llama", stories / "tokenizer", tmp_path / "llama")
    gates = save_gates(base, tmp_path / "gates", "matrix")

    def recipe(out: str) -> dict[str, Any]:
        return decoder_recipe(stories, tmp_path / out, gates, training=training)

    whole = train(recipe("whole"))
    stopped_after(7, monkeypatch, recipe("parts"))
    parts = train(recipe("parts"))
    assert records(parts.folder) == records(whole.folder)
    for path in whole.model.glob("*.safetensors"):
        other = load_file(parts.model / path.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(path).items())
    loaded = decoder_by_name(whole.folder).load(GPU, torch.bfloat16)
    assert {p.dtype for gate in gates_of(loaded).values() for p in gate.parameters()} == {torch.float32}
