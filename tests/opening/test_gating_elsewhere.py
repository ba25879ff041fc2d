"""Gated decoders whose weights are elsewhere: offloaded by accelerate, or divided by FSDP among processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gated_folders import register_ours, write_decoder
from braidlm.opening.gating import attach, detach, find_parts, gates_of
from braidlm.training.step.parallel import Rank
from tests.opening.random_decoders import open_gates, tiny_decoder, token_ids
from tests.training.step.processes import launch

ENDS = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
ON_DISK = {**ENDS, **{f"model.layers.{index}": "disk" if index in (1, 2) else "cpu" for index in range(4)}}


@pytest.mark.parametrize("device_map", ["cpu", ON_DISK], ids=["cpu", "disk"])
def test_gates_work_with_a_device_map(device_map: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    gates, ids, model = decode(GatesConfig, {"kind": "matrix"}), token_ids(2, 7), tiny_decoder("llama")
    model.save_pretrained(tmp_path / "base")
    plain = model(ids).logits
    attach(model, gates)
    open_gates(gates_of(model))
    write_decoder(model, tmp_path / "whole")
    register_ours(tmp_path / "whole")
    expected = model(ids).logits

    def opened(name: str) -> Any:
        options = {"device_map": device_map, "offload_folder": str(tmp_path / f"offloaded {name}")}
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, **options)

    assert torch.equal(opened("whole")(ids).logits, expected)
    base = opened("base")
    attach(base, gates)
    assert torch.equal(base(ids).logits, plain)
    open_gates(gates_of(base))
    assert torch.equal(base(ids).logits, expected)
    detach(base)
    assert torch.equal(base(ids).logits, plain)


def stepped(model: Any) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for seed in range(2):
        ids = token_ids(2, 8, seed)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def learn_alone_and_divided(_: Rank) -> None:
    """In each process: one model whole, and one whose layers are divided among the processes."""
    for kind in ("matrix", "vector", "scalar"):
        models = []
        for divided in (False, True):
            model = tiny_decoder("llama").train()
            model.requires_grad_(False)
            attach(model, decode(GatesConfig, {"kind": kind}))
            if divided:
                mesh = init_device_mesh("cpu", (2,))
                for layer in find_parts(model).layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            models.append(stepped(model))
        alone, shared = (gates_of(model) for model in models)
        for number, gate in alone.items():
            for name, parameter in gate.named_parameters():
                whole = shared[number].get_parameter(name).full_tensor()  # type: ignore[operator]
                assert parameter.abs().max() > 0
                torch.testing.assert_close(whole, parameter, rtol=0, atol=1e-6)


def test_gates_are_divided_and_trained_by_fsdp() -> None:
    """Two processes with the same texts learn what one process learns."""
    launch(2, learn_alone_and_divided)
