"""Sharing the weights of a trained model: every tensor is accounted for, and a LoRA keeps what it can."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import WEIGHTS, load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert
from tests.tiny_models import random_ids, randomised

TOKENIZER = bytes_tokenizer()
BLOCK = {"attention": {"heads": 2}, "feed": {"hidden": 12}}


def folder_of(out: Path, **architecture: Any) -> Path:
    architecture = {"width": 16, "context": 64, "block": BLOCK, "stages": [{"block": {"layers": 4}}], **architecture}
    model = randomised(BraidForCausalLM(BraidConfig(architecture, vocab_size=TOKENIZER.vocab_size, pad_token_id=0)))
    return save_model(model, out, TOKENIZER, {"made_by": "test"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("share") / "source")


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return load_model(folder)(random_ids(2, 12)).logits


def shared(source: Path, out: Path, **options: Any) -> Path:
    folder = edit("share", source, out, **options)
    assert folder is not None
    return folder


@pytest.mark.parametrize("by", ["average", "first"])
def test_a_shared_tensor_is_the_average_or_the_first(source: Path, by: str, tmp_path: Path) -> None:
    out = shared(source, tmp_path / "out", what="feeds", layers="interior", by=by)
    before, after = load_file(source / WEIGHTS), load_file(out / WEIGHTS)
    name = "model.stages.0.layers.{}.feed.out.weight"
    own = [before[name.format(layer)] for layer in (1, 2)]
    assert torch.equal(after[name.format(1)], torch.stack(own).mean(0) if by == "average" else own[0])
    assert name.format(2) not in after
    for layer in (0, 3):
        assert torch.equal(after[name.format(layer)], before[name.format(layer)])
    lineage = json.loads((out / "lineage.json").read_text())
    assert lineage["made_by"] == "braid edit share"
    assert lineage["options"] == {
        "seed": 1,
        "what": "feeds",
        "layers": "interior",
        "by": by,
        "lora": None,
    }
    origin = lineage["tensors"][name.format(1)]
    if by == "average":
        assert origin == {"from": {"model": [name.format(1), name.format(2)]}, "how": "averaged"}
    else:
        assert origin == {"from": {"model": name.format(1)}}
        assert lineage["left_out"]["model"][name.format(2)] == "the first layer's is shared"


@pytest.mark.parametrize("by", ["average", "first"])
@pytest.mark.parametrize("stage", ["block", "parallel"])
def test_a_lora_of_full_rank_loses_nothing(stage: str, by: str, tmp_path: Path) -> None:
    """And one of a lower rank as little as any of its rank can."""
    options = {"block": {"layers": 3}} if stage == "block" else {"parallel": {"layers": 3, "paths": 2}}
    source = folder_of(tmp_path / "source", stages=[options])
    whole = shared(source, tmp_path / "whole", what="feeds", by=by, lora=16)
    torch.testing.assert_close(logits(whole), logits(source), rtol=0, atol=1e-4)
    for rank in (1, 4, 8):
        error, least = _distances(source, shared(source, tmp_path / f"r{rank}", what="feeds", by=by, lora=rank), rank)
        assert error == pytest.approx(least, rel=1e-4)
        assert error > 0.1


def _distances(source: Path, out: Path, rank: int) -> tuple[float, float]:
    """Between what the feed-forward parts' matrices were and what they are with their low-rank additions; and the
    least that additions of this rank can leave, the singular values beyond it."""
    before, total, least = load_model(source).state_dict(), 0.0, 0.0
    after = load_model(out).state_dict()
    for name in (name for name in before if ".feed." in name and name.endswith(".weight")):
        down, up = (after[f"{name.removesuffix('.weight')}.lora.{factor}.weight"] for factor in ("down", "up"))
        now = after[name] + (down @ up if down.ndim == 3 else up @ down)
        total += (now - before[name]).square().sum().item()
        least += torch.linalg.svdvals(before[name] - after[name])[..., rank:].square().sum().item()
    return total, least


def test_a_lora_can_be_trained_where_nothing_was_lost(source: Path, tmp_path: Path) -> None:
    """The first layer's matrix is the shared one: its addition is zero and must not stay so."""
    model = load_model(shared(source, tmp_path / "out", what="feeds", by="first", lora=2)).train()
    ids = random_ids(2, 12)
    model(ids, labels=ids).loss.backward()
    first = model.model.stages[0].layers[0].feed.out.lora
    assert not first.up.weight.any()
    assert first.up.weight.grad.any()


def test_stages_of_equal_blocks_become_one_that_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source", stages=["block", "block", {"block": {"attention": {"window": 4}}}])
    out = shared(source, tmp_path / "out", what="blocks")
    stages = load_model(out).config.architecture["stages"]
    assert [stage["block"]["layers"] for stage in stages] == [2, 1]
    assert [stage["block"]["share"] and stage["block"]["share"]["kind"] for stage in stages] == ["blocks", None]
    assert "note: stages.0 (block) shares blocks" in capsys.readouterr().out


def test_plain_transformers_opens_the_result(source: Path, tmp_path: Path) -> None:
    out = shared(source, tmp_path / "out", what="attentions", lora=2)
    plain = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(plain(random_ids(2, 12)).logits, logits(out))


def test_the_command_shows_the_plan_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["edit", "share", str(source), "--what", "feeds", "--lora", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Share feeds of all layers of source" in said
    assert "averaged" in said
    assert "low-rank additions" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stages", "options", "text"),
    [
        (["block"], {"what": "feeds"}, "no stage of this model has at least 2 layers of one shape"),
        ([{"block": {"layers": 3}}], {"what": "feeds", "layers": "interior"}, "at least 4 layers, of which 2"),
        ([{"block": {"layers": 2, "share": "feeds"}}], {"what": "feeds"}, "the layers of this stage share weights"),
        ([{"block": {"layers": 2}}], {"what": "feed"}, "'feed' is not one of feeds, attentions, blocks"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    stages: list[Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(BraidError, match=text):
        edit("share", folder_of(tmp_path / "source", stages=stages), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_other_edits_refuse_layers_that_share(tmp_path: Path) -> None:
    block = {**BLOCK, "feed": {"hidden": 8, "experts": 3}}
    source = folder_of(tmp_path / "source", block=block, stages=[{"block": {"layers": 2, "share": "feeds"}}])
    with pytest.raises(BraidError, match="the layers of this stage share weights") as error:
        edit("insert", source, tmp_path / "out", modules=1)
    assert error.value.where == "stages.0"


def test_composing_and_exporting_give_each_layer_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    share = [{"block": {"layers": 2, "share": "feeds"}}]
    paths = [folder_of(tmp_path / name, stages=share) for name in ("a", "b")]
    composed = compose(paths, tmp_path / "composed")
    assert composed is not None
    assert "layers of a, b share weights; here each has a copy of its own" in capsys.readouterr().out
    own = load_file(paths[0] / WEIGHTS)["model.stages.0.layers.0.feed.out.weight"]
    stack = load_model(composed).state_dict()
    (parallel,) = {name.split(".layers.")[0] for name in stack if ".stack." in name}
    for layer in (0, 1):
        assert torch.equal(stack[f"{parallel}.layers.{layer}.stack.0.feed.out.weight"][0], own.t())
    exported = convert(paths[0], tmp_path / "llama", to="llama")
    assert exported is not None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    ids = random_ids(2, 12)
    torch.testing.assert_close(theirs(ids).logits, load_model(paths[0])(ids).logits, rtol=0, atol=1e-4)


def test_a_path_with_low_rank_additions_is_refused(tmp_path: Path) -> None:
    share = {"kind": "feeds", "lora": 2}
    paths = [folder_of(tmp_path / name, stages=[{"block": {"layers": 2, "share": share}}]) for name in ("a", "b")]
    with pytest.raises(BraidError, match=r"a LoRA of each \(share.lora\)"):
        compose(paths, tmp_path / "out")
