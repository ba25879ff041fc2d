"""Dense models with fewer heads, channels and blocks: what adds nothing goes without a trace, what adds most stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import braidlm
from braidlm.bridges.model_info import ModelInfo
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits import matrices
from braidlm.edits.dense import BLOCKS, measure_importance, turned, units_of, with_fewer
from braidlm.edits.edit import edit
from braidlm.edits.modules import layers_of
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.convert import convert
from tests.edits.small_models import TEXT, model_folder, text_file
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _without_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a model is takes most of an edit's time, and these tests ask for other things."""
    monkeypatch.setattr(matrices, "speeds", lambda models, length, steps: dict.fromkeys(models, 1.0))


THREE: dict[str, Any] = {"stages": [{"block": {"layers": 3}}]}
SHAPES: dict[str, dict[str, Any]] = {
    "swiglu": THREE,
    "beta": THREE | {"block": {"attention": {"heads": 4}, "feed": {"hidden": 24, "learned_beta": True, "bias": True}}},
    "gpt2": THREE
    | {
        "positions": "learned",
        "block": {
            "norm": "layer",
            "attention": {"heads": 4, "bias": True},
            "feed": {"kind": "mlp", "hidden": 24, "bias": True},
        },
    },
    "shared_keys": THREE
    | {"block": {"attention": {"heads": 4, "kv_heads": 2}, "feed": {"kind": "geglu", "hidden": 24}}},
    "stick_breaking": THREE
    | {"positions": "none", "block": {"attention": {"kind": "stick_breaking", "heads": 4}, "feed": {"hidden": 24}}},
}


def with_zeros(out: Path, architecture: dict[str, Any]) -> Path:
    """A model of three blocks, in which heads 0 and 1, channels 5 to 12 and the whole second block add nothing."""
    tokenizer = bytes_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, **architecture)
    with torch.no_grad():
        for block in model.model.stages[0].layers:
            block.attention.out.weight[:, :8] = 0.0
            block.feed.out.weight[:, 5:13] = 0.0
        for part in (model.model.stages[0].layers[1].attention, model.model.stages[0].layers[1].feed):
            for parameter in part.out.parameters():
                parameter.zero_()
    return save_model(model, out, tokenizer, {"made_by": "test"})


def ids_of(text: str) -> Tensor:
    return torch.tensor([bytes_tokenizer().encode(text)[:30]])


@torch.no_grad()
def largest_change(before: Path, after: Path) -> float:
    ids = ids_of(TEXT)
    return (load_model(before)(ids).logits - load_model(after)(ids).logits).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_adds_nothing_goes_without_changing_a_logit(tmp_path: Path, shape: str) -> None:
    source = with_zeros(tmp_path / "source", SHAPES[shape])
    numbers = {"heads": 2, "channels": 16, "layers": 2}
    small = edit("prune", source, tmp_path / "small", text=str(text_file(tmp_path)), **numbers)
    assert small is not None
    assert largest_change(source, small) < 1e-5
    info = ModelInfo(load_model(small).config)
    assert (len(info.layers), info.attention.heads, info.attention.head_dim, info.feed_hidden) == (2, 2, 4, 16)
    assert info.parameters < 0.7 * OpenedBraid(source).info.parameters


@pytest.mark.parametrize(("kind", "number"), [("heads", 2), ("channels", 20), ("layers", 2)])
def test_the_edit_checks_what_it_promises(tmp_path: Path, kind: str, number: int, monkeypatch: Any) -> None:
    """If what is measured as nothing were something, the folder would not be written."""
    source = model_folder(tmp_path / "source", **THREE)

    def nothing(*_: Any) -> dict[str, Tensor]:
        return {name: torch.zeros_like(own) for name, own in measure_importance(OpenedBraid(source), [[1, 2]]).items()}

    monkeypatch.setattr("braidlm.edits.prune.measure_importance", nothing)
    with pytest.raises(BraidError, match="promises not to change a logit"):
        edit("prune", source, tmp_path / "small", text=str(text_file(tmp_path)), **{kind: number})
    assert not (tmp_path / "small").exists()


@torch.no_grad()
def output_of(model: Any, address: str, ids: Tensor) -> Tensor:
    """What an attention or feed-forward part adds to the stream."""
    outputs: list[Tensor] = []
    handle = model.get_submodule(address).register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    model(ids)
    handle.remove()
    return outputs[0]


@pytest.mark.parametrize("shape", ["swiglu", "shared_keys"])
def test_the_most_important_ones_stay(tmp_path: Path, shape: str) -> None:
    """The importance of a head or channel is what the part's output loses on the text when its columns are zero."""
    source = OpenedBraid(model_folder(tmp_path / "source", **SHAPES[shape]))
    ids = ids_of(TEXT)
    importance = measure_importance(source, [ids[0].tolist()])
    model = source.load()
    for units in units_of(source, layers_of(source.info)[1]):
        own, matrix = importance[units.address], model.get_submodule(units.address).out.weight.data
        whole, kept, lost = output_of(model, units.address, ids), matrix.clone(), []
        for i in range(0, len(own), len(own) // 2):
            matrix.chunk(len(own), dim=1)[i].zero_()
            lost.append((whole - output_of(model, units.address, ids)).norm(dim=-1).sum())
            matrix.copy_(kept)
        torch.testing.assert_close(own.float()[:: len(own) // 2], torch.stack(lost), rtol=1e-4, atol=1e-4)
    numbers = {"heads": 2, "channels": 7, "layers": 2}
    smaller = with_fewer(source, numbers, importance)
    left = importance[BLOCKS].argsort(descending=True)[:2].sort().values.tolist()
    for number, old in enumerate(left):
        for part_name in ("attention", "feed"):
            own = importance[f"model.stages.0.layers.{old}.{part_name}"]
            new = f"model.stages.0.layers.{number}.{part_name}.out.weight"
            matrix = smaller.account.derived[new].compute(lambda part: source.read(part.tensor))
            whole = source.read(f"model.stages.0.layers.{old}.{part_name}.out.weight")
            groups = whole.chunk(len(own), dim=1)
            count = matrix.shape[1] // groups[0].shape[1]
            wanted = torch.cat([groups[i] for i in sorted(own.topk(count).indices.tolist())], dim=1)
            assert torch.equal(matrix, wanted)
            assert matrix.shape == smaller.model.get_parameter(new).shape


def test_a_block_counts_by_how_far_it_turns_the_stream() -> None:
    """One that makes it longer or shorter counts nothing: the next norm takes the length away."""
    stream = torch.tensor([[[3.0, 0.0], [3.0, 0.0], [0.0, 5.0]]])
    output = torch.tensor([[[9.0, 0.0], [0.0, 1.0], [0.0, -5.0]]])
    torch.testing.assert_close(turned(None, (stream,), (output,)), torch.tensor([[[0.0], [2**0.5], [2.0]]]))


def test_padding_never_counts(tmp_path: Path) -> None:
    source = OpenedBraid(model_folder(tmp_path / "source", **THREE))
    long, short = list(range(30)), list(range(40, 47))
    together, alone = measure_importance(source, [long, short]), measure_importance(source, [short])
    for address, own in measure_importance(source, [long]).items():
        torch.testing.assert_close(together[address], own + alone[address], rtol=1e-4, atol=1e-4)


def test_it_opens_with_transformers_and_converts(tmp_path: Path) -> None:
    source, text = model_folder(tmp_path / "source", **THREE), text_file(tmp_path)
    small = braidlm.edit("prune", source, tmp_path / "small", text=str(text), heads=2, channels=16, layers=2)
    assert small is not None
    ids = ids_of(TEXT)
    convert(small, tmp_path / "llama", to="llama")
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(small, trust_remote_code=True)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    measured = (load_lineage(small) or {})["measured"]
    assert measured["after"]["weights_bytes"] < measured["before"]["weights_bytes"]
    assert measured["after"]["bits_per_byte"] != measured["before"]["bits_per_byte"]


def test_other_stages_stay_whole(tmp_path: Path) -> None:
    """Paths beside full-width blocks: only the blocks have heads and channels that go."""
    stages = [{"block": {"layers": 2}}, {"parallel": {"layers": 1, "paths": 2, "join": "add"}}, "block"]
    source = model_folder(tmp_path / "source", stages=stages)
    small = edit("prune", source, tmp_path / "small", text=str(text_file(tmp_path)), layers=1, channels=8)
    assert small is not None
    config = load_model(small).config.decoded
    assert [stage.kind for stage in config.stages].count("parallel") == 1
    assert sum(stage.options.layers for stage in config.stages if stage.kind == "block") == 1


def test_the_command_and_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source", **THREE)
    words = ["edit", "prune", source, "--text", text_file(tmp_path), "--heads", 2, "--layers", 2, "--dry-run"]
    assert main(list(map(str, words))) == 0
    shown = capsys.readouterr().out
    assert "to 2 heads, 2 layers" in shown
    assert "2 of 3 blocks stay, without model.stages.0.layers." in shown
    assert main(list(map(str, [*words[:-1], "--out", tmp_path / "out", "--json"]))) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ({}, {"heads": 4, "channels": 24}, "no block has more heads, channels or layers"),
        ({}, {"heads": 2, "keep": 0.5}, "heads, channels and layers are numbers that stay"),
        ({}, {"heads": 2, "criterion": "output_norm"}, "heads, channels and layers are numbers that stay"),
        ({}, {"layers": 0}, "layers: expected"),
        (SHAPES["shared_keys"], {"heads": 3}, "2 query heads share each key head here, so that 3 cannot stay"),
        ({"gates": {"kind": "vector"}}, {"layers": 1}, "gates are of layers by their numbers"),
        ({"stages": [{"block": {"layers": 2, "share": "feeds"}}]}, {"channels": 8}, "share weights"),
        ({}, {}, r"--heads 4 --channels 256 --layers 6"),
        ({}, {"threshold": 0.1}, "no experts in its blocks"),
    ],
)
def test_what_is_refused(tmp_path: Path, architecture: Any, options: dict[str, Any], message: str) -> None:
    source = model_folder(tmp_path / "source", **architecture)
    with pytest.raises(BraidError, match=message):
        edit("prune", source, tmp_path / "out", text=str(text_file(tmp_path)), **options)
    assert not (tmp_path / "out").exists()
