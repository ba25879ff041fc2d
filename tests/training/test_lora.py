"""LoRA in the loop: the base stays as it is, checkpoints are ordinary models, the adapter alone is peft's."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.core.reading import read_json
from braidlm.kernels.lowered_parts import Lowered
from braidlm.model.stages import Block
from braidlm.training.loop import Trainer
from braidlm.training.lora import Adapter
from braidlm.training.recipe import LoraTrainingConfig
from braidlm.training.train import train
from tests.tiny_models import random_ids, tiny_model
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes, weights, written

pytest.importorskip("peft")


def models(compute: str) -> dict[str, dict[str, Any]]:
    """Kinds of models; how routed parts are computed is given, since a measured choice would round differently."""
    losses = {"losses": {"load_balance": 0.1}, "balance_rate": 0.01}
    feed_router = {"top_k": 2, "compute": compute, **losses}
    attention_router = {"top_k": 2, "compute": compute, "hidden": 8}
    modules = {
        "attention": {"heads": 2, "experts": {"names": 3, "keys": "shared", "router": attention_router}},
        "feed": {"kind": "mlp", "hidden": 24, "experts": {"names": 4, "router": feed_router}},
    }
    paths = {"layers": 1, "paths": 2, "join": {"kind": "routed", "top_k": 1, "compute": compute}}
    return {"plain": {}, "modules": {"block": modules}, "paths": {"stages": ["block", {"parallel": paths}]}}


MODELS = models("sparse")


@pytest.fixture(scope="module")
def bases(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained models of each kind."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        kind: train(tiny_recipe({"stories": stories}, folder / kind, model=model, training={"budget": "2 steps"})).model
        for kind, model in MODELS.items()
    }


def lora_recipe(data: Path, out: Path, base: Path | None, rank: int = 2, **changes: Any) -> dict[str, Any]:
    """Adapters on a model that was trained before."""
    changes = {"checkpoints": {"every": "12 steps"}, **changes}
    recipe = tiny_recipe({"stories": data}, out, start_from=base and str(base), **changes)
    del recipe["model"]
    recipe["training"]["lora"] = {"rank": rank, **recipe["training"].get("lora", {})}
    return recipe


def changed(model: Path, base: Path) -> set[str]:
    """The tensors that are not the base's."""
    before = weights(base)
    return {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_are_the_base_with_the_adapter_that_is_beside_them(
    kind: str, stories: Path, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    before = weight_bytes(bases[kind])
    run = train(lora_recipe(stories, tmp_path / "run", bases[kind]))
    assert weight_bytes(bases[kind]) == before
    matrices = {name for name, tensor in weights(run.model).items() if "stages" in name and tensor.ndim > 1}
    assert changed(run.model, bases[kind]) == {name for name in matrices if not re.search("router|norm", name)}
    merged = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=True)
    base = AutoModelForCausalLM.from_pretrained(bases[kind], trust_remote_code=True)
    assert (logits(merged) - logits(base)).abs().max() > 1e-3
    loaded = PeftModel.from_pretrained(base, run.model / "adapter")
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=0, atol=1e-5)
    trained = sum(p.numel() for name, p in loaded.named_parameters() if "lora_" in name)
    frozen = sum(p.numel() for name, p in loaded.named_parameters() if "lora_" not in name)
    assert f"trains {trained:,} parameters; {frozen:,} are frozen." in capsys.readouterr().out


def test_the_embedding_is_trained_beside_adapters(
    stories: Path, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    run = train(lora_recipe(stories, tmp_path / "run", bases["modules"], training={"lora": {"embedding": "trained"}}))
    embeddings = {name for name in changed(run.model, bases["modules"]) if "stages" not in name}
    assert embeddings == {name for name in weights(run.model) if "embedding" in name or name == "head.weight"}
    assert "(matrices: 1, banks: 4) with the embedding trains" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(bases["modules"], trust_remote_code=True)
    loaded = PeftModel.from_pretrained(base, run.model / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=True)
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=0, atol=1e-5)


def test_adapters_learn(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    recipe = lora_recipe(stories, tmp_path / "run", bases["modules"], rank=8, training={"budget": "25 steps"})
    train(recipe)
    losses = [record["loss"] for record in records(tmp_path / "run", "train")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("members", [1, 3])
def test_the_adapter_of_a_bank_is_a_low_rank_product_for_each_member(members: int) -> None:
    """Against the formula: each member's matrix [in, out] has scale * (B A) transposed added to it."""
    feed = {"kind": "mlp", "hidden": 24, "experts": {"names": members, "router": {"top_k": 1}}}
    model = tiny_model(block={"feed": feed})
    adapter = Adapter(model, LoraTrainingConfig(rank=2, alpha=6.0), {})
    name = "model.stages.0.layers.0.feed.bank.up"
    layer: Any = model.get_submodule(name)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    a_ERI = layer.lora_A["default"].weight.unflatten(0, (members, 2))
    b_OER = layer.lora_B["default"].weight.unflatten(1, (2, members)).transpose(1, 2)
    delta_EIO = 3.0 * torch.einsum("oer,eri->eio", b_OER, a_ERI)
    if members == 1:  # peft then takes the first side for the outputs
        delta_EIO = delta_EIO.mT
    merged = adapter.merged()
    found: Any = merged.get_submodule(name)
    torch.testing.assert_close(found.weight, adapter.base_weights[f"{name}.weight"] + delta_EIO)
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids).logits, merged.eval()(ids).logits, rtol=0, atol=1e-4)


def test_adapters_of_banks_begin_at_zero_on_the_side_of_the_outputs() -> None:
    model = tiny_model(block={"feed": {"kind": "mlp", "hidden": 24, "experts": {"names": 4, "router": {"top_k": 2}}}})
    Adapter(model, LoraTrainingConfig(rank=2), {})
    layer: Any = model.get_submodule("model.stages.0.layers.0.feed.bank.up")
    assert layer.lora_A["default"].weight.shape == (4 * 2, 16)
    assert layer.lora_B["default"].weight.shape == (24, 4 * 2)
    assert not layer.lora_B["default"].weight.any()


STATEFUL = {"activation_checkpointing": True, "accumulation": 2, "batch": 2, "lora": {"dropout": 0.2}}


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("plain", STATEFUL),
        ("modules", {"activation_checkpointing": True}),
        ("paths", {"lora": {"embedding": "trained"}}),
    ],
)
def test_a_stopped_run_goes_on_exactly(
    kind: str,
    training: dict[str, Any],
    stories: Path,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recipe(name: str) -> dict[str, Any]:
        return lora_recipe(stories, tmp_path / name, bases[kind], training=training)

    whole = train(recipe("whole"))
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps in (3, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stop_requested)
    runs = [train(recipe("stopped")) for _ in range(3)]
    assert [run.progress.steps for run in runs] == [3, 7, 12]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (runs[-1].model / file).read_bytes() == (whole.model / file).read_bytes()
    state = f"states/{whole.model.name}/optimizer.safetensors"
    assert (tmp_path / "stopped" / state).read_bytes() == (tmp_path / "whole" / state).read_bytes()
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_finished_run_goes_on(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    constant: dict[str, Any] = {"schedule": "constant", "warmup": 0}
    whole, parts = (
        [
            train(lora_recipe(stories, tmp_path / name, bases["modules"], training={**constant, "budget": budget}))
            for budget in budgets
        ]
        for name, budgets in (("whole", ["8 steps"]), ("parts", ["5 steps", "8 steps"]))
    )
    assert weight_bytes(parts[-1].model) == weight_bytes(whole[0].model)


def test_a_damaged_adapter_is_not_used(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    recipe = lora_recipe(stories, tmp_path / "run", bases["plain"], checkpoints={"every": "4 steps"})
    run = train(recipe)
    expected = weight_bytes(run.model)
    (run.model / "adapter" / "adapter_model.safetensors").write_bytes(b"damaged")
    again = train(recipe)
    assert again.model == run.model
    assert weight_bytes(again.model) == expected


def test_a_base_that_changed_is_noticed(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    first = train(lora_recipe(stories, tmp_path / "a", bases["plain"], training={"budget": "1 steps"}))
    second = train(lora_recipe(stories, tmp_path / "b", bases["plain"], training={"budget": "2 steps"}))
    os.symlink(first.model, base)
    train(lora_recipe(stories, tmp_path / "run", base, training={"budget": "2 steps"}))
    base.unlink()
    os.symlink(second.model, base)
    with pytest.raises(BraidError, match="the model that these adapters were trained on has changed since"):
        train(lora_recipe(stories, tmp_path / "run", base, training={"budget": "4 steps"}))


@pytest.mark.parametrize("kind", ["plain", "modules"])
def test_adapters_work_under_autocast(
    kind: str, stories: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidlm.training.loop.choose_dtype", lambda *_: torch.bfloat16)
    run = train(lora_recipe(stories, tmp_path / "run", bases[kind], training={"budget": "2 steps"}))
    assert all(tensor.dtype == torch.float32 for tensor in weights(run.model).values())


def test_routers_train_only_where_they_are_named(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    targets = {"targets": ["scores", "feed.bank.up"]}
    run = train(lora_recipe(stories, tmp_path / "run", bases["modules"], training={"lora": targets}))
    block = "model.stages.0.layers.0"
    assert changed(run.model, bases["modules"]) == {
        f"{block}.attention.router.scores.weight",
        f"{block}.feed.router.scores.weight",
        f"{block}.feed.bank.up.weight",
    }
    config = read_json(run.model / "adapter" / "adapter_config.json")
    assert config["target_parameters"] == [f"{block}.feed.bank.up.weight"]


def test_targets_can_be_a_regular_expression(bases: dict[str, Path]) -> None:
    adapter = Adapter(load_model(bases["plain"]), LoraTrainingConfig(targets=r".*\.attention\..*"), {})
    assert [name.rpartition(".")[2] for name in adapter.names] == ["qkv", "out"]


def test_frozen_parts_get_no_adapter(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    run = train(lora_recipe(stories, tmp_path / "run", bases["paths"], training={"freeze": ["paths"]}))
    adapted = changed(run.model, bases["paths"])
    assert adapted
    assert not [name for name in adapted if "stages.1" in name]


@pytest.mark.parametrize("kind", MODELS)
def test_kernels_refuse_what_has_adapters(kind: str, bases: dict[str, Path]) -> None:
    model = load_model(bases[kind])
    Adapter(model, LoraTrainingConfig(), {})
    lowered = Lowered(model)
    assert not lowered.serves_layers
    # A block's attention and feed-forward are lowered or refused one by one.
    parts = [part for part in lowered.parts if not isinstance(part, Block)]
    assert not [module for part in parts for module in part.modules() if hasattr(module, "base_layer")]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {"rank": 0}, "training.lora.rank"),
    ("plain", {"alpha": -1}, "training.lora.alpha"),
    ("plain", {"ranks": 2}, "training.lora: unknown key 'ranks'"),
    ("plain", {"targets": ["qvk"]}, "the model has no matrix 'qvk'. Did you mean 'qkv'?"),
    ("plain", {"targets": ["embedding"]}, "the model has no matrix 'embedding'"),
    ("plain", {"targets": []}, "no matrix is named"),
    ("plain", {"targets": "nothing"}, "no matrix has a name that 'nothing' matches"),
    ("plain", {"targets": "("}, "'(' is not a regular expression"),
    ("modules", {"dropout": 0.1}, "adapters of banks (experts, parallel paths) cannot have dropout"),
]


@pytest.mark.parametrize(("kind", "lora", "message"), BAD)
def test_bad_settings_are_refused(
    kind: str, lora: dict[str, Any], message: str, stories: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(BraidError) as caught:
        train(lora_recipe(stories, tmp_path / "run", bases[kind], training={"lora": lora}))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_new_model_has_nothing_to_adapt(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"lora": {"rank": 2}})
    with pytest.raises(BraidError, match=r"training\.lora adapts a trained model"):
        train(recipe)
    assert not (tmp_path / "run").exists()


def test_everything_frozen_is_refused(stories: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    training = {"freeze": ["paths"], "lora": {"targets": [r"stages.1.layers.0.stack.0.attention.qkv"]}}
    with pytest.raises(BraidError, match="every matrix that could have an adapter is frozen"):
        train(lora_recipe(stories, tmp_path / "run", bases["paths"], training=training))
    assert not (tmp_path / "run").exists()


def test_without_peft_the_error_says_what_to_install(
    stories: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BraidError, match="peft, which trains adapters, is not installed") as caught:
        train(lora_recipe(stories, tmp_path / "run", bases["plain"]))
    assert caught.value.todo is not None
    assert "pip install 'braidlm[eval]'" in caught.value.todo
    assert not (tmp_path / "run").exists()


def test_banks_are_not_compiled(
    stories: Path, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(lora_recipe(stories, tmp_path / "run", bases["modules"], training={"compile": True, "budget": "1 steps"}))
    assert "training.compile has no effect: torch cannot compile peft's adapters of banks" in capsys.readouterr().err


def test_the_command_line(stories: Path, bases: dict[str, Path], tmp_path: Path, braid: Callable[..., Any]) -> None:
    recipe = lora_recipe(stories, tmp_path / "run", bases["modules"], training={"budget": "2 steps"})
    del recipe["training"]["lora"], recipe["start_from"]
    file = written(recipe, tmp_path)
    overrides = (f"start_from={bases['modules']}", "training.lora.rank=4", "training.lora.targets=[up]")
    answer = braid("train", file, *overrides)
    assert answer.code == 0, answer.err
    assert "LoRA of rank 4 (matrices: 0, banks: 1) trains 640 parameters; 10,199 are frozen." in answer.out
    assert braid("generate", tmp_path / "run", "Once", "--max-tokens", "3").code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_on_a_gpu_replayed_steps_train_as_eager_ones(kind: str, stories: Path, tmp_path: Path) -> None:
    model = models("dense")[kind]  # sparse products in float32 cannot be replayed
    base = train(
        tiny_recipe({"stories": stories}, tmp_path / "base", model=model, training={"budget": "2 steps"})
    ).model
    losses = {}
    for name, training in {"replayed": {}, "eager": {"graph": False, "compile": False}}.items():
        settings = {"precision": "float32", **training}
        train(lora_recipe(stories, tmp_path / name, base, log={"every": 1}, training=settings))
        losses[name] = [record["loss"] for record in records(tmp_path / name, "train")]
    assert losses["replayed"] == pytest.approx(losses["eager"], abs=1e-3)
