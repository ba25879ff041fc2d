"""Models leave an average for good: what is left is the average of the others, and their weights are gone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_model, save_model
from braidlm.edits import withdraw
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.model.paths.average import MixtureHead
from tests.edits.composed_paths import EXPERTS, GPT2, MODULES, TOKENIZER, blocks, double, ids, saved_path
from tests.tiny_models import tiny_config

BIASED = {"tie_embeddings": False, "head": {"kind": "linear", "bias": True}}
HALF_ROUTED = {"stages": [{"block": {"layers": 1}}, {"block": {"layers": 2, **EXPERTS["block"]}}]}
CASES: dict[str, list[dict[str, Any]]] = {
    "one shape": [{}, {}, {}],
    "learned positions": [GPT2, GPT2, GPT2],
    "biases": [BIASED, BIASED, BIASED],
    "two shapes": [{}, {}, {"width": 24}],
    "experts": [EXPERTS, EXPERTS, EXPERTS],
    "modules": [MODULES, MODULES, MODULES],
    "dense, then experts": [HALF_ROUTED, HALF_ROUTED, HALF_ROUTED],
    "dense, and dense, then experts": [blocks(3), HALF_ROUTED, HALF_ROUTED],
    "depths": [blocks(3), blocks(2), blocks(2)],
}


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The average of a, b and c."""
    home = tmp_path_factory.mktemp("models")
    folders = [saved_path(home / name, i, **CASES[request.param][i]) for i, name in enumerate("cab")]
    return compose(folders, home / "whole", join="average")


def log_probabilities(model: Any) -> torch.Tensor:
    return model(ids()).logits.log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gone", ["b", "c", "ab"])
@torch.no_grad()
def test_the_others_are_averaged(whole: Path, gone: str, tmp_path: Path) -> None:
    out = edit("withdraw", whole, tmp_path / "out", paths=list(gone))
    rest = [name for name in "abc" if name not in gone]
    folders = [whole.parent / name for name in rest]
    found, wanted = log_probabilities(double(out)), log_probabilities(load_model(whole, paths=rest).double())
    assert (found - wanted).abs().max() < 1e-12
    alone = [double(folder)(ids()).logits.softmax(-1) for folder in folders]
    assert (found.exp() - sum(alone) / len(rest)).abs().max() < 1e-12
    size = sum(t.numel() for f in folders for t in load_file(f / "model.safetensors").values())
    assert sum(t.numel() for t in load_file(out / "model.safetensors").values()) == size
    if len(rest) == 1:  # it is the ordinary model that it was, and may be composed with others again
        architecture = load_config(out).decoded
        assert {stage.kind for stage in architecture.stages} == {"block"}
        assert (architecture.norm, architecture.head.kind) == (load_config(folders[0]).decoded.norm, "linear")
        before, after = (dict(sorted(load_file(folder / "model.safetensors").items())) for folder in (folders[0], out))
        assert all(torch.equal(old, new) for old, new in zip(before.values(), after.values(), strict=True))
        compose([out, whole.parent / gone[0]], tmp_path / "again", join="posterior")


def pair(tmp_path: Path) -> list[Path]:
    return [saved_path(tmp_path / name, i) for i, name in enumerate("ab")]


@torch.no_grad()
def test_learned_shares_of_the_others_stay(tmp_path: Path) -> None:
    folders = [*pair(tmp_path), saved_path(tmp_path / "c", 2)]
    whole = compose(folders, tmp_path / "whole", join="mixture")
    model = load_model(whole)
    assert isinstance(model.head, MixtureHead)
    model.head.mixture.bias.copy_(torch.tensor([0.1, 2.0, -1.0]))
    trained = save_model(model, tmp_path / "trained", TOKENIZER, {"made_by": "braid train"})
    out = edit("withdraw", trained, tmp_path / "out", paths=["b"])
    assert torch.equal(load_model(out).head.mixture.bias, torch.tensor([0.1, -1.0]))
    wanted = load_model(trained, paths=["a", "c"]).double()(ids()).logits
    assert (double(out)(ids()).logits - wanted).abs().max() < 1e-12


PARTS = [{"name": name, "width": width} for name, width in (("c", 8), ("a", 4), ("b", 12))]
APART = {"layers": 2, "join": "concat", "paths": PARTS, "attention": {"heads": 2}}
ENDS: dict[str, Any] = {
    "width": 24,
    "norm": {"kind": "per_path", "paths": PARTS},
    "head": {"kind": "average", "paths": PARTS},
}
RECIPES: dict[str, list[dict[str, Any]]] = {
    "two stages": [{"parallel": APART}, {"parallel": APART}],
    "a norm in the join": [{"parallel": {**APART, "join": {"kind": "concat", "norm": "rms", "residual": True}}}],
    "a width at the end": [{"parallel": {**APART, "to": 24}}],
    "a width left open": [{"parallel": {**APART, "paths": ["c", *PARTS[1:]]}}],
    "shared blocks": [{"parallel": {**APART, "share": {"kind": "blocks", "lora": 2}}}],
}


@pytest.mark.parametrize("gone", ["a", "b", "ac"])
@pytest.mark.parametrize("stages", RECIPES.values(), ids=RECIPES)
@torch.no_grad()
def test_averages_of_a_recipe(tmp_path: Path, stages: list[dict[str, Any]], gone: str) -> None:
    whole = saved_path(tmp_path / "whole", stages=stages, **ENDS)
    out = edit("withdraw", whole, tmp_path / "out", paths=list(gone))
    rest = [name for name in "abc" if name not in gone]
    wanted = log_probabilities(load_model(whole, paths=rest).double())
    assert (log_probabilities(double(out)) - wanted).abs().max() < 1e-12


def test_it_is_told_that_models_were_trained_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for frozen, told in (([], True), (["paths"], False)):
        model = load_model(compose(pair(tmp_path / str(told)), tmp_path / str(told) / "whole", join="average"))
        model.config.frozen = frozen
        record = {"made_by": "braid train", "training": {"steps": 3}}
        trained = save_model(model, tmp_path / str(told) / "trained", TOKENIZER, record)
        edit("withdraw", trained, paths=["b"], dry_run=True)
        assert ("the models of this average were trained together" in capsys.readouterr().out) == told


def test_it_is_told_also_after_another_edit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [*pair(tmp_path), saved_path(tmp_path / "c", 2)]
    model = load_model(compose(folders, tmp_path / "whole", join="average"))
    trained = save_model(model, tmp_path / "trained", TOKENIZER, {"made_by": "braid train", "training": {"steps": 3}})
    for source, told in ((trained, True), (tmp_path / "whole", False)):
        fewer = edit("withdraw", source, tmp_path / f"fewer-{told}", paths=["c"])
        capsys.readouterr()
        edit("withdraw", fewer, paths=["b"], dry_run=True)
        assert ("were trained together" in capsys.readouterr().out) == told


def test_one_model_is_no_average(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="this is one model, and no average of several"):
        edit("withdraw", saved_path(tmp_path / "a"), tmp_path / "out", paths=["a"])


OTHER = [{"name": name, "width": 12} for name in "ab"]


@pytest.mark.parametrize(
    ("architecture", "reasons"),
    [
        ({"stages": ["block", {"parallel": APART}]}, ["stage 0 (block) reads the streams of all models together"]),
        ({"stages": [{"parallel": {**APART, "join": "shared_linear"}}]}, ["stage 0 (parallel) reads the streams of"]),
        (
            {"stages": [{"project": {"to": 24}}, {"parallel": {**APART, "paths": PARTS[::-1]}}], "norm": "rms"},
            [
                "stage 0 (project) reads the streams of all models together",
                "the paths of stage 1 are b (12) + a (4) + c (8), and those of the head c (8) + a (4) + b (12)",
                "the norm before the head (rms) is one for all models",
            ],
        ),
        (
            {"stages": [{"parallel": APART}], "norm": {"kind": "per_path", "paths": OTHER}},
            ["the paths of the norm before the head are a (12) + b (12), and those of the head c (8) + a (4) + b (12)"],
        ),
        (
            {"stages": [{"parallel": APART}], "gates": {}},
            ["gates were added, and each reads the streams of all models together"],
        ),
    ],
)
def test_models_that_are_not_apart_are_refused(
    tmp_path: Path, architecture: dict[str, Any], reasons: list[str]
) -> None:
    whole = saved_path(tmp_path / "whole", **{**ENDS, **architecture})
    with pytest.raises(BraidError) as caught:
        edit("withdraw", whole, tmp_path / "out", paths=["a"])
    said = str(caught.value)
    assert "a model can be withdrawn only where the models share no part" in said
    assert all(f"  - {reason}" in said for reason in reasons)
    assert said.count("  - ") == len(reasons)
    assert "Switch the model off (`--paths`)" in said
    assert not (tmp_path / "out").exists()


def test_an_embedding_of_bytes_is_shared() -> None:
    stages, untied = [{"parallel": APART}], {"tie_embeddings": False}
    info = ModelInfo(tiny_config(stages=stages, embedding="bytes", **untied, **ENDS))
    assert withdraw._shared(info) == ["the embedding (bytes) is one for all models"]
    assert withdraw._shared(ModelInfo(tiny_config(stages=stages, **untied, **ENDS))) == []


def test_a_name_given_twice_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = saved_path(tmp_path / "whole", stages=[{"parallel": APART}], **ENDS)
    edit("withdraw", whole, paths=["a", "a"], dry_run=True)
    edit("withdraw", whole, paths=["b", "a", "b"], dry_run=True)
    said = capsys.readouterr().out
    assert "Withdraw a from whole: c, b stay, " in said
    assert "Withdraw a, b from whole: c stays, " in said


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["d"], "the model has no path 'd'"),
        (["a", "b"], "at least one must stay"),
        ([], "name the models of an average that leave"),
    ],
)
def test_wrong_names(tmp_path: Path, paths: list[str], text: str) -> None:
    whole = compose(pair(tmp_path), tmp_path / "whole", join="average")
    with pytest.raises(BraidError, match=text):
        edit("withdraw", whole, tmp_path / "out", paths=paths)
    assert not (tmp_path / "out").exists()


def test_other_models_are_refused(tmp_path: Path) -> None:
    folders = pair(tmp_path)
    with pytest.raises(BraidError, match="other joins have learned from all their paths"):
        edit("withdraw", compose(folders, tmp_path / "joined"), tmp_path / "out", paths=["a"])
    routed = compose(folders, tmp_path / "routed", join={"kind": "mixture", "per_token": True})
    with pytest.raises(BraidError, match="depend on what all of its models read"):
        edit("withdraw", routed, tmp_path / "out", paths=["a"])


def test_what_it_promises_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compose(pair(tmp_path), tmp_path / "whole", join="average")
    monkeypatch.setattr(withdraw, "use_paths", lambda model, paths: None)
    with pytest.raises(BraidError, match="as if these had been switched off, and a log-probability differs by"):
        edit("withdraw", whole, tmp_path / "out", paths=["a"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_half_precision_are_averaged_withdrawn_from_and_gated(dtype: torch.dtype, tmp_path: Path) -> None:
    """What is promised of the edited model, in float32, is compared with its source in float32."""
    halves = [
        save_model(load_model(folder).to(dtype), tmp_path / f"half-{folder.name}", TOKENIZER, {"made_by": "a test"})
        for folder in pair(tmp_path)
    ]
    whole = compose(halves, tmp_path / "whole", join="average")
    half = save_model(load_model(whole).to(dtype), tmp_path / "half", TOKENIZER, {"made_by": "a test"})
    for name, options in (("withdraw", {"paths": ["half-a"]}), ("gate", {})):
        assert (edit(name, half, tmp_path / name, **options) / "model.safetensors").is_file()
