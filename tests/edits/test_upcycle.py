"""Upcycling Braid models: the function stays for every shape of feed-forward part, and tensors are accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import WEIGHTS, load_model
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from tests.edits.composed_paths import saved_path
from tests.edits.small_models import model_folder
from tests.tiny_models import random_ids

FEEDS: dict[str, dict[str, Any]] = {
    "swiglu": {"kind": "swiglu", "hidden": 24},
    "swiglu with biases and betas": {"kind": "swiglu", "hidden": 20, "bias": True, "learned_beta": True},
    "mlp with biases": {"kind": "mlp", "hidden": 24, "bias": True, "activation": "gelu_new"},
    "geglu": {"kind": "geglu", "hidden": 16},
}
PARALLEL = {"layers": 2, "paths": ["a", "b"]}
STAGES: dict[str, dict[str, Any]] = {
    "paths in a stack": {"stages": ["block", {"parallel": {**PARALLEL, "join": "gumbel_v1"}}]},
    "narrow paths in a stack": {
        "stages": [{"parallel": {**PARALLEL, "paths": {"a": {"width": 8}, "b": {"width": 8}}}}]
    },
    "paths one by one": {"stages": [{"parallel": {**PARALLEL, "stacked": False, "join": "add"}}]},
    "paths that share blocks": {"stages": [{"parallel": {**PARALLEL, "share": "feeds"}}]},
    "paths that stay a stack": {"stages": [{"parallel": {**PARALLEL, "stacked": "with_experts"}}]},
    "paths one by one with experts of attention": {
        "stages": [{"parallel": {**PARALLEL, "attention": {"heads": 2, "experts": 2}}}]
    },
    "paths with experts of attention": {
        "stages": [{"parallel": {**PARALLEL, "stacked": "with_experts", "attention": {"heads": 2, "experts": 2}}}]
    },
    "mixture of depths": {"stages": [{"mixture_of_depths": {"layers": 2}}]},
    "shared feeds": {"stages": [{"block": {"layers": 3, "share": "feeds"}}]},
    "shared blocks with low-rank additions": {
        "stages": [{"block": {"layers": 2, "share": {"kind": "blocks", "lora": 2}}}]
    },
    "a layer that is sparse already": {"stages": ["block", {"block": {"feed": {"experts": 3}}}]},
}


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return load_model(folder)(random_ids(2, 12)).logits


def upcycled(source: Path, out: Path, **options: Any) -> Path:
    folder = edit("upcycle", source, out, **options)
    assert folder is not None
    return folder


def check_unchanged(source: Path, out: Path) -> None:
    torch.testing.assert_close(logits(out), logits(source), rtol=0, atol=1e-5)


@pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS)
def test_no_logit_changes(feed: dict[str, Any], tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source", block={"feed": feed})
    for experts, top_k in ((2, 1), (3, 2), (3, 3)):
        check_unchanged(source, upcycled(source, tmp_path / f"{experts}-{top_k}", experts=experts, top_k=top_k))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(experts=st.integers(2, 6), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_no_logit_changes_for_any_number(tmp_path_factory: Any, experts: int, share: float, seed: int) -> None:
    home = tmp_path_factory.mktemp("any")
    source = model_folder(home / "source", stages=["block"])
    top_k = 1 + round(share * (experts - 1))
    check_unchanged(source, upcycled(source, home / "out", experts=experts, top_k=top_k, seed=seed))


@pytest.mark.parametrize("architecture", STAGES.values(), ids=STAGES)
def test_every_kind_of_stage_keeps_its_function(architecture: dict[str, Any], tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source", **architecture)
    out = upcycled(source, tmp_path / "out", experts=2, top_k=2)
    check_unchanged(source, out)
    stages = json.dumps(load_model(out).config.architecture["stages"])
    assert stages.count('"names": ["expert_1", "expert_2"]') >= 1


@pytest.mark.parametrize("join", ["average", "posterior", "shared_linear"])
@pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS)
def test_composed_models_are_upcycled(feed: dict[str, Any], join: str, tmp_path: Path) -> None:
    paths = [saved_path(tmp_path / name, seed, block={"feed": feed}) for seed, name in enumerate("ab")]
    whole = compose(paths, tmp_path / "whole", join=join)
    check_unchanged(whole, upcycled(whole, tmp_path / "out", experts=3, top_k=2))


def test_experts_of_a_stack_are_copies_of_its_members(tmp_path: Path) -> None:
    stage = {**PARALLEL, "stacked": "with_experts"}
    source = model_folder(tmp_path / "source", stages=[{"parallel": stage}], block={"feed": FEEDS["mlp with biases"]})
    before, after = (load_file(folder / WEIGHTS) for folder in (source, upcycled(source, tmp_path / "out", experts=3)))
    feed = "model.stages.0.layers.0.stack.0.feed"
    for own in ("up.weight", "out.weight", "out.bias"):
        rows = after[f"{feed}.bank.{own}"]
        assert len(rows) == 6
        assert all(torch.equal(rows[i], before[f"{feed}.{own}"][i // 3]) for i in range(6))


def test_experts_are_copies_and_routers_are_fresh(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source", block={"feed": FEEDS["mlp with biases"]})
    out = upcycled(source, tmp_path / "out", experts=3, seed=7)
    before, after = load_file(source / WEIGHTS), load_file(out / WEIGHTS)
    feed = "model.stages.0.layers.0.feed"
    for member in range(3):
        assert torch.equal(after[f"{feed}.bank.up.weight"][member], before[f"{feed}.up.weight"].t())
        assert torch.equal(after[f"{feed}.bank.out.bias"][member], before[f"{feed}.out.bias"])
    router = f"{feed}.router.scores.weight"
    assert after[router].unique().numel() == after[router].numel()
    others = [name for name in before if ".feed." not in name]
    assert all(torch.equal(before[name], after[name]) for name in others)
    lineage = json.loads((out / "lineage.json").read_text())
    assert lineage["made_by"] == "braid edit upcycle"
    assert lineage["options"] == {"seed": 7, "experts": 3, "top_k": 1, "noise": 0.0, "to": None}
    assert lineage["tensors"][router] == "fresh"
    assert lineage["tensors"][f"{feed}.bank.up.weight"] == {
        "from": {"model": f"{feed}.up.weight"},
        "how": "3 copies",
    }
    assert lineage["left_out"] == {}
    other_seed = load_file(upcycled(source, tmp_path / "again", experts=3, seed=8) / WEIGHTS)
    assert not torch.equal(other_seed[router], after[router])


def test_active_parameters_stay_but_for_the_routers(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source")
    costs = [model_cost(load_model(folder)) for folder in (source, upcycled(source, tmp_path / "out", experts=4))]
    routers = 2 * (4 * 16 + 4)  # of two layers, with biases
    feeds = 2 * 3 * 16 * 24
    assert costs[1].parameters == costs[0].parameters + 3 * feeds + routers
    assert costs[1].active_parameters == costs[0].active_parameters + routers


def test_noise_lets_copies_differ_and_says_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source", block={"feed": FEEDS["mlp with biases"]})
    out = upcycled(source, tmp_path / "out", experts=2, noise=0.05)
    before, after = load_file(source / WEIGHTS), load_file(out / WEIGHTS)
    name = "model.stages.0.layers.0.feed.{}out.weight"
    matrix = before[name.format("")]
    for member in after[name.format("bank.")]:
        relative = (member.t() - matrix).std() / matrix.std()
        assert 0.03 < relative < 0.07
    first, second = after[name.format("bank.")]
    assert 0.03 < (first - second).std() / matrix.std() / 2**0.5 < 0.07, "each copy has noise of its own"
    assert torch.equal(after["model.stages.0.layers.0.feed.bank.out.bias"][1], before[name.format("")[:-6] + "bias"])
    said = capsys.readouterr().out
    assert "predictions change" in said
    measured = json.loads((out / "lineage.json").read_text())["measured"]
    change = (logits(out) - logits(source)).abs().max().item()
    assert change > 1e-3
    assert measured["largest_change_of_a_logit"] > 1e-3
    assert f"{measured['largest_change_of_a_logit']:.3g}" in said


def test_plain_transformers_opens_the_result(tmp_path: Path) -> None:
    out = upcycled(model_folder(tmp_path / "source"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(plain(random_ids(2, 12)).logits, logits(out))


def test_a_decoder_that_a_bridge_reads_becomes_a_braid_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    out = upcycled(tmp_path / "gpt2", tmp_path / "out", experts=3, top_k=2)
    with torch.no_grad():
        torch.testing.assert_close(logits(out), theirs(random_ids(2, 12)).logits, rtol=0, atol=1e-5)


def test_training_parts_the_copies(tmp_path: Path) -> None:
    """With top-k 1 the weight is constant, so the router learns from its balance loss alone; with 2 from the text."""
    source = model_folder(tmp_path / "source", stages=["block"])
    ids = random_ids(4, 16)
    for top_k in (1, 2):
        model = load_model(upcycled(source, tmp_path / f"out-{top_k}", experts=2, top_k=top_k)).train()
        feed: Any = model.model.stages[0].layers[0].feed
        output = model(ids, labels=ids)
        output.loss.backward()
        gradients = feed.bank.out.weight.grad
        assert not torch.equal(gradients[0], gradients[1])
        assert feed.router.scores.weight.grad.any()  # the balance loss is in the loss
        model.zero_grad()
        feed.bank.out.weight.data[0] *= 1.5
        routing = feed(torch.randn(1, 6, 16))[1][0]
        (gradient,) = torch.autograd.grad(routing.weights_BTK.square().sum(), feed.router.scores.weight)
        assert bool(gradient.abs().max() > 1e-6) == (top_k == 2)


def test_the_command_shows_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source")
    assert main(["edit", "upcycle", str(source), "--experts", "4", "--top-k", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Upcycle source: 4 experts for each feed-forward part, of which a token takes 2" in said
    assert "4 copies" in said
    assert "routers" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


ROUTED = {"stages": [{"parallel": {"layers": 1, "paths": 2, "join": "routed"}}]}
LOW_RANK = {"compression": [{"low_rank": {"ranks": {"stages.*": 4}}}]}


@pytest.mark.parametrize(
    ("architecture", "options", "text"),
    [
        ({}, {"experts": 1}, "experts"),
        ({}, {"experts": 2, "top_k": 3}, "top_k is 3, and there are only 2 experts"),
        ({}, {"noise": -1}, "noise"),
        ({"block": {"feed": {"experts": 3}}}, {}, "its feed-forward parts are experts already"),
        (ROUTED, {}, "a router chooses among its paths already"),
        (LOW_RANK, {}, "matrices of this model are compressed"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(
    architecture: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(BraidError, match=text):
        edit("upcycle", model_folder(tmp_path / "source", **architecture), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
