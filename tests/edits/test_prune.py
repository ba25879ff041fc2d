"""Pruning modules: what goes, what stays as it was, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import braidlm
from braidlm.bridges.model_info import ModelInfo
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer, load_tokenizer
from braidlm.edits.edit import edit
from braidlm.edits.modules import all_modules, calibrate, layers_of, measure_usage, modules_of
from braidlm.edits.prune import Prune
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import TopKRouter
from braidlm.opening.braid import OpenedBraid

TEXT = "The cat sat on the mat. A dog ran after the ball, and the ball ran on. " * 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return path


def model_folder(
    out: Path,
    keys: str = "shared",
    renormalise: bool = False,
    unused: tuple[str, ...] = (),
    scope: str = "all",
    **routing: Any,
) -> Path:
    """A model of two blocks; the modules in `unused` have scores, or a balance, so low that no token chooses them."""
    router = {"top_k": 2, "renormalise": renormalise, "hidden": 8, **routing}
    names = ["a", "b", "c", "d"]
    block = {
        "attention": {
            "kind": "stick_breaking",
            "heads": 2,
            "experts": {"names": names, "keys": keys, "scope": scope, "router": router},
        },
        "feed": {"kind": "mlp", "hidden": 12, "experts": {"names": [*names, "e"], "router": router}},
    }
    tokenizer = bytes_tokenizer()
    architecture = {
        "width": 16,
        "context": 64,
        "positions": "none",
        "block": block,
        "stages": [{"block": {"layers": 2}}],
    }
    torch.manual_seed(0)
    model = BraidForCausalLM(BraidConfig(architecture=architecture, vocab_size=tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for module in model.modules():
            if isinstance(module, TopKRouter):
                for name in unused:
                    lowered = module.scores.bias if module.balance is None else module.balance
                    lowered[module.choices.index(name)] = -40.0
    save_model(model, out, tokenizer, {"made_by": "test"})
    return out


@pytest.mark.parametrize("keys", ["own", "shared"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_modules_that_are_never_used_change_no_logit(tmp_path: Path, text: Path, keys: str, renormalise: bool) -> None:
    source = model_folder(tmp_path / "source", keys, renormalise, unused=("b", "d"))
    edit("prune", source, tmp_path / "out", text=str(text), threshold=0.0)
    before, after = load_model(source), load_model(tmp_path / "out")
    names = [modules.names for layer in layers_of(ModelInfo(after.config)) for modules in modules_of(layer)]
    assert set(names) == {("a", "c"), ("a", "c", "e")}
    ids = torch.tensor([load_tokenizer(source).encode(TEXT)[:64]])
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in before.parameters())


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_router_that_balances_chooses_as_before(tmp_path: Path, text: Path, renormalise: bool) -> None:
    """It ranks by shares of all scores: those of modules that go are still a part of the sum."""
    source = model_folder(tmp_path / "source", "own", renormalise, unused=("b", "d"), balance_rate=0.001)
    model = load_model(source)
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        router.balance[:1] += 0.1
    save_model(model, tmp_path / "balanced", bytes_tokenizer(), {"made_by": "test"})
    edit("prune", tmp_path / "balanced", tmp_path / "out", text=str(text), threshold=0.0)
    ids = torch.tensor([bytes_tokenizer().encode(TEXT)[:60]])
    before, after = (load_model(folder) for folder in (tmp_path / "balanced", tmp_path / "out"))
    assert "d" not in next(module for module in after.modules() if isinstance(module, TopKRouter)).choices
    assert (before(ids).logits - after(ids).logits).abs().max() < 1e-5


def test_fewer_modules_than_were_drawn(tmp_path: Path, text: Path) -> None:
    source = model_folder(tmp_path / "source", unused=("b", "c", "d"), sampled=2)
    edit("prune", source, tmp_path / "out", text=str(text), threshold=0.9)
    routers = [module for module in load_model(tmp_path / "out").modules() if isinstance(module, TopKRouter)]
    assert all(router.config.sampled <= router.config.top_k for router in routers)
    assert any(router.config.sampled < 2 for router in routers)


@torch.no_grad()
def test_the_norm_of_what_experts_say_to_the_tokens_that_chose_them(tmp_path: Path, text: Path) -> None:
    """With `scope: routed` an expert attends to these alone; computed here from what it adds to the stream."""
    folder = model_folder(tmp_path / "source", "own", scope="routed")
    source = OpenedBraid(folder)
    ids, modules = bytes_tokenizer().encode(TEXT)[:40], all_modules(source)
    found = measure_usage(source.load(), modules, [ids], "output_norm")
    model = source.load()
    part: Any = model.get_submodule(modules[0].address)
    parts: list[Any] = []
    part.bank.register_forward_hook(lambda _, __, output: parts.append(output[0]))
    part.register_forward_hook(lambda _, __, output: parts.append(output[1][0]))
    part.router.config.compute = part.compute = "dense"
    model(torch.tensor([ids]), use_cache=False)
    outputs, routing = parts
    wanted = (routing.weights_BTN * outputs.norm(dim=-1).permute(1, 2, 0)).sum((0, 1))
    torch.testing.assert_close(found[modules[0].address].float(), wanted, rtol=1e-4, atol=1e-4)


def test_pruning_twice_keeps_the_weights_of_the_rest(tmp_path: Path, text: Path) -> None:
    """Weights are shares of a softmax over all modules: also those that went the first time still count there."""
    source = model_folder(tmp_path / "source", unused=("b", "d"))
    edit("prune", source, tmp_path / "once", text=str(text), threshold=0.0)
    edit("prune", tmp_path / "once", tmp_path / "twice", text=str(text), keep=0.9)
    once, twice = load_model(tmp_path / "once"), load_model(tmp_path / "twice")
    router = twice.model.stages[0].layers[0].feed.router
    assert router.scores.out_features == 5
    hidden = torch.randn(1, 7, 16)
    before, after = once.model.stages[0].layers[0].feed.router(hidden), router(hidden)
    kept = [before.choices.index(name) for name in after.choices]
    torch.testing.assert_close(after.probabilities_BTN, before.probabilities_BTN[..., kept])


@pytest.mark.parametrize("criterion", ["frequency", "output_norm"])
@pytest.mark.parametrize("normalise", ["max", "sum"])
def test_a_share_of_the_parameters(tmp_path: Path, text: Path, criterion: Any, normalise: Any) -> None:
    source = model_folder(tmp_path / "source")
    out = edit("prune", source, tmp_path / "out", text=str(text), keep=0.8, criterion=criterion, normalise=normalise)
    assert out == tmp_path / "out"
    before, after = (sum(p.numel() for p in load_model(folder).parameters()) for folder in (source, out))
    assert 0.6 * before < after <= 0.8 * before
    lineage = load_lineage(out)
    assert lineage is not None
    assert lineage["made_by"] == "braid edit prune"
    assert lineage["options"]["keep"] == 0.8
    assert lineage["sources"][0]["sha256"]


@pytest.mark.parametrize("criterion", ["frequency", "output_norm"])
@pytest.mark.parametrize("normalise", ["max", "sum"])
def test_the_least_used_modules_go_first(tmp_path: Path, text: Path, criterion: Any, normalise: Any) -> None:
    """No module that went was used more than one that stayed beside another in its layer."""
    source = OpenedBraid(model_folder(tmp_path / "source"))
    _, usage = calibrate(source, str(text), 100_000, criterion)
    plan = Prune(str(text), keep=0.8, criterion=criterion, normalise=normalise).plan(source)
    left = [one.names for layer in layers_of(ModelInfo(plan.model.config)) for one in modules_of(layer)]
    gone, stayed = [], []
    for one, names in zip(all_modules(source), left, strict=True):
        used = usage[one.address]
        shares = (used / (used.max() if normalise == "max" else used.sum())).tolist()
        gone += [share for name, share in zip(one.names, shares, strict=True) if name not in names]
        stayed += [share for name, share in zip(one.names, shares, strict=True) if name in names and len(names) > 1]
    assert gone
    assert max(gone) <= min(stayed)


def test_only_so_many_tokens_of_the_text_count(tmp_path: Path, text: Path) -> None:
    """Of one token a router chooses two modules; all others were never used."""
    plan = Prune(str(text), threshold=0.0, tokens=1).plan(OpenedBraid(model_folder(tmp_path / "source")))
    left = [one.names for layer in layers_of(ModelInfo(plan.model.config)) for one in modules_of(layer)]
    assert [len(names) for names in left] == [2] * 4


def test_frequency_counts_the_tokens_that_chose_a_module(tmp_path: Path, text: Path) -> None:
    model = load_model(model_folder(tmp_path / "source"))
    modules = [one for layer in layers_of(ModelInfo(model.config)) for one in modules_of(layer)]
    texts = [list(range(10)), list(range(5, 30))]
    usage = measure_usage(model, modules, texts, "frequency")
    for one in modules:
        assert usage[one.address].sum().item() == one.router["top_k"] * 35
    together = measure_usage(model, modules, texts, "frequency", batch=1)
    for one in modules:
        torch.testing.assert_close(usage[one.address], together[one.address])


def test_a_dry_run_writes_nothing_and_accounts_for_every_tensor(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_folder(tmp_path / "source", unused=("d",))
    assert braidlm.edit("prune", source, tmp_path / "out", text=str(text), threshold=0.0, dry_run=True) is None
    shown = capsys.readouterr().out
    assert "of 18 modules go" in shown
    assert "feed.bank.up.weight" in shown
    assert "rows 0, 1, 2" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.5, "keep": 0.5}, "give either a threshold or the share"),
        ({}, "give either a threshold or the share"),
        ({"threshold": 1.5}, "threshold: expected a number from 0 to 1"),
        ({"threshold": -0.1}, "threshold: expected a number from 0 to 1"),
        ({"threshold": float("nan")}, "threshold: expected a number from 0 to 1"),
        ({"threshold": 1.0, "normalise": "sum"}, "no module of .* reaches the threshold 1"),
        ({"keep": 0.01}, "with one module in every layer"),
        ({"threshold": 0.1, "criterion": "size"}, "criterion: 'size' is not one of"),
        ({"threshold": 0.1, "treshold": 0.1}, "unknown key 'treshold'"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, text: Path, options: dict[str, Any], message: str) -> None:
    source = model_folder(tmp_path / "source")
    with pytest.raises(BraidError, match=message):
        edit("prune", source, tmp_path / "out", text=str(text), **options)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_pruned(tmp_path: Path, text: Path) -> None:
    source = model_folder(tmp_path / "source")
    for content in ("", "  \n\n"):
        empty = tmp_path / "empty.txt"
        empty.write_text(content)
        with pytest.raises(BraidError, match=f"{empty}: there is no text in"):
            edit("prune", source, tmp_path / "out", text=str(empty), threshold=0.1)
    with pytest.raises(BraidError, match="there is no such file"):
        edit("prune", source, tmp_path / "out", text=str(tmp_path / "nothing.txt"), threshold=0.1)
    with pytest.raises(BraidError, match=r"unknown edit 'prun'\. Did you mean 'prune'"):
        edit("prun", source, tmp_path / "out")
    tokenizer = load_tokenizer(source)
    dense = BraidForCausalLM(BraidConfig({"width": 16, "stages": ["block"]}, vocab_size=tokenizer.vocab_size))
    save_model(dense, tmp_path / "dense", tokenizer, {"made_by": "test"})
    with pytest.raises(BraidError, match="no experts in its blocks"):
        edit("prune", tmp_path / "dense", tmp_path / "out", text=str(text), threshold=0.1)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_with_a_missing_tensor(tmp_path: Path, text: Path) -> None:
    source = model_folder(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.stages.0.layers.1.feed.bank.out.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BraidError, match=r"missing model\.stages\.0\.layers\.1\.feed\.bank\.out\.weight"):
        edit("prune", source, tmp_path / "out", text=str(text), threshold=0.1)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source")
    words = ["edit", "prune", source, "--text", text, "--keep", 0.8, "--out", tmp_path / "out", "--json"]
    assert main(list(map(str, words))) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path / "out")
    assert load_model(tmp_path / "out").config.vocab_size == load_model(source).config.vocab_size
    with pytest.raises(SystemExit, match="2"):
        main(["edit", "prune", str(source), "--threshold", "0.1", "--out", str(tmp_path / "second")])
    assert "required: --text" in capsys.readouterr().err
