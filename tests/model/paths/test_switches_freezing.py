"""Frozen parts: what training leaves as it is, whole tensors and rows of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.kernels.lowered_parts import Lowered
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM, BraidModel
from braidlm.model.paths.switches import freeze
from braidlm.model.routing.router import TopKRouter
from braidlm.training.step.optimizers.contract import OptimizerConfig, make_adamw
from tests.model.parallel_layers import path_model
from tests.tiny_models import random_ids, tiny_model

WHOLE: dict[str, Any] = {
    "positions": "learned",
    "tie_embeddings": False,
    "stages": [
        "block",
        {"project": {"to": 8}},
        {"parallel": {"paths": ["a", "b"], "layers": 2, "join": {"kind": "gumbel_v1", "norm": "rms"}}},
        {"parallel": {"paths": {"a": {"width": 16}, "b": {}}, "to": 16}},
    ],
    "block": {"attention": {"heads": 2}},
}
FROZEN: dict[str, tuple[str, ...]] = {
    "paths": (".stack.", ".paths."),
    "joins": (".join.", ".linear.", ".enter.", "model.norm."),
    "embedding": ("model.embedding.", "model.positions."),
    "head": ("head.",),
}
"""The tensors of each part: those whose names have one of these in them."""


@pytest.mark.parametrize("part", FROZEN)
def test_a_part_is_frozen_by_name_and_nothing_else(part: str) -> None:
    model = tiny_model(**WHOLE)
    freeze(model, [part])
    for name, parameter in model.named_parameters():
        theirs = any(mark in name for mark in FROZEN[part])
        assert parameter.requires_grad != theirs, name
    assert any(not p.requires_grad for p in model.parameters())


ROUTED: dict[str, Any] = {
    "stages": [
        {"project": {"to": 16, "experts": 2}},
        {"parallel": {"paths": ["a", "b"], "join": "routed"}},
        {"parallel": {"paths": ["a", "b"], "join": {"kind": "routed", "per": "sublayer"}}},
    ],
}


def test_routed_paths_are_frozen_without_their_routers() -> None:
    model = tiny_model(**ROUTED)
    freeze(model, ["paths"])
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != (".stack." in name or ".bank." in name), name
    model = tiny_model(**ROUTED)
    freeze(model, ["joins"])
    for name, parameter in model.named_parameters():
        theirs = ".router." in name or name.startswith(("model.stages.0.", "model.norm.")) or "2.layers.0." in name
        assert parameter.requires_grad != (theirs and ".bank." not in name), name


def test_experts_of_a_plain_block_are_no_paths() -> None:
    experts = {"block": {"attention": {"heads": 4, "experts": 2}, "feed": {"hidden": 8, "experts": 2}}}
    model = tiny_model(stages=[experts, {"parallel": {"paths": ["a", "b"], "join": "routed"}}])
    freeze(model, ["paths", "joins"])
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in model.named_parameters() if name.startswith("model.stages.0.")} <= left
    assert not any(name.startswith("model.stages.1.") for name in left)


def test_parts_together_leave_the_plain_blocks() -> None:
    model = tiny_model(**WHOLE)
    freeze(model, FROZEN)
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert left
    assert all(name.startswith("model.stages.0.layers.0.") for name in left)


def test_a_tied_head_is_frozen_with_its_embedding() -> None:
    model = path_model()
    freeze(model, ["head"])
    assert not model.model.embedding.weight.requires_grad


def test_a_part_that_does_not_exist_cannot_be_frozen() -> None:
    with pytest.raises(BraidError, match=r"'path' cannot be frozen. Did you mean 'paths'\?"):
        freeze(path_model(), ["path"])
    with pytest.raises(BraidError, match=r"'norms' cannot be frozen. There are: blocks, embedding, head, joins"):
        freeze(path_model(), ["norms"])


def test_a_folder_remembers_what_is_frozen(tmp_path: Path) -> None:
    config = BraidConfig(path_model().config.architecture, vocab_size=37, frozen=["paths", "embedding"])
    saved = save_model(BraidForCausalLM(config), tmp_path / "m", None, {"made_by": "a test"})
    with_facts, facts = BraidForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not facts["missing_keys"]
    auto = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    for loaded in (BraidForCausalLM(config), load_model(saved), auto, with_facts, BraidModel.from_pretrained(saved)):
        assert loaded.config.frozen == ["paths", "embedding"]
        for name, parameter in loaded.named_parameters():
            kept = ".stack." in name or "embedding." in name
            assert parameter.requires_grad != kept, name


def inserted_model(attention: str = "own", **feed: Any) -> BraidForCausalLM:
    """A model with one new module in each part of its block, open."""
    router = {"top_k": 1, "new": ["c"], "hidden": 6, "silent": 1, "renormalise": False}
    experts = {"names": ["a", "b", "c"], "router": router}
    block = {
        "attention": {"heads": 4, "bias": True, "experts": {**experts, "keys": attention}},
        "feed": {"hidden": 8, "bias": True, "experts": {**experts, "shared": 4}, **feed},
    }
    model = tiny_model(stages=["block"], block=block)
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        router.open(1.0)
    return model.train()


def new_rows(name: str) -> slice | None:
    """The rows of the new module in a tensor, by the tensor's name; None where it has none."""
    if ".router.scores." in name or any(f".{bank}." in name for bank in ("bank", "queries", "attention.out")):
        return slice(2, 3)
    return None


@pytest.mark.parametrize("attention", ["own", "shared", "stream"])
@pytest.mark.parametrize("decay", ["matrices", "everything"])
@pytest.mark.parametrize("router", ["all", "rows"])
def test_only_inserted_modules_are_trained(attention: str, decay: Any, router: str) -> None:
    """What is frozen stays bit for bit, whatever the weight decay; what was inserted changes."""
    model = inserted_model(attention, kind="swiglu", learned_beta=True)
    freeze(model, ["blocks", "embedding", "head"] + (["routers"] if router == "rows" else []))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_adamw(model, OptimizerConfig(lr=0.1, weight_decay=0.5, decay=decay))
    for step in range(3):
        ids = random_ids(4, 16, seed=step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = set()
    for name, parameter in model.named_parameters():
        rows = new_rows(name)
        if ".router." in name and router == "all":
            assert not torch.equal(parameter, before[name]), name
        elif rows is None:
            assert torch.equal(parameter, before[name]), name
        else:
            old = [row for row in range(len(parameter)) if row not in range(3)[rows]]
            assert torch.equal(parameter[old], before[name][old]), name
            if not torch.equal(parameter[rows], before[name][rows]):
                changed.add(name.rpartition("layers.0.")[2])
    assert {"feed.bank.beta", "feed.bank.out.weight", "feed.bank.gate_up.bias"} <= changed
    assert {"attention.bank.qkv.weight"} <= changed if attention == "own" else {"attention.queries.weight"} <= changed


def test_partly_frozen_tensors_that_are_folded_are_not_lowered() -> None:
    """Kernels that read folded weights compute the gradient of a whole tensor."""
    experts = {"names": 3, "router": {"compute": "sparse"}}
    model = tiny_model(stages=["block"], positions="learned", block={"attention": {"heads": 1, "experts": experts}})
    attention = model.model.stages[0].layers[0].attention
    assert attention in Lowered(model).parts
    attention.bank.qkv.trained_rows = slice(1, 3)
    assert "it is frozen in part" in Lowered(model).summary()


def test_a_bank_that_cannot_freeze_rows_says_so() -> None:
    model = inserted_model()
    bank = model.model.stages[0].layers[0].feed.bank
    bank.stack, bank.own = 3, torch.nn.Parameter(torch.zeros(3))
    bank.__class__ = type("OtherBank", (torch.nn.Module,), {})
    with pytest.raises(BraidError, match="OtherBank cannot freeze some of its members"):
        freeze(model, ["blocks"])


def test_freezing_everything_leaves_nothing_without_inserted_modules() -> None:
    model = tiny_model(**ROUTED)
    freeze(model, ["blocks"])
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".router." in name or name.startswith(("model.embedding", "head")) for name in left)
    assert any(".router." in name for name in left)
    freeze(model, ["routers", "embedding", "head"])
    assert not any(parameter.requires_grad for parameter in model.parameters())
