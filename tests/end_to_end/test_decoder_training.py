"""Decoders of transformers in the training loop, against plain loops over the same models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from braidlm.core import devices
from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.model.heads.losses import IGNORED
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gating import gates_of
from braidlm.training.decoder import TrainableDecoder, freeze_decoder, plan_decoder_run
from braidlm.training.recipe import TrainingConfig, decode_recipe
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from tests.tiny_decoders import CONFIGS, save_decoder, save_gates
from tests.training.forked_runs import fork
from tests.training.tiny_runs import decoder_recipe, records, stopped_after, tiny_recipe, written

HERE = Rank(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def decoders(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each architecture."""
    folder = tmp_path_factory.mktemp("decoders")

    def of(name: str) -> Path:
        return folder / name if (folder / name).exists() else save_decoder(name, stories / "tokenizer", folder / name)

    return of


@pytest.fixture(scope="module")
def gates(decoders: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """Gates for each architecture, of a kind, at zero."""

    def of(name: str, kind: str) -> Path:
        folder = decoders(name).parent / f"{name}-{kind}"
        return folder if folder.exists() else save_gates(decoders(name), folder, kind)

    return of


def batches(steps: int, rows: int = 4, time: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    tokens = np.random.default_rng(0).integers(2, 300, (steps, rows, time + 1))
    labels = tokens[:, :, 1:].copy()
    labels[:, 0, :5] = IGNORED
    return [(one[:, :-1].copy(), targets) for one, targets in zip(tokens, labels, strict=True)]


def stepped(folder: Path, steps: int, **training: Any) -> tuple[Any, list[float]]:
    """A decoder after some steps through the code that `braid train` runs, and its losses."""
    options = {"budget": steps, "batch": 4, "clip": None, **training}
    config: TrainingConfig = decode(TrainingConfig, options)
    source = decoder_by_name(folder)
    model = source.load()
    freeze_decoder(model, source, config)
    stepper = Stepper(TrainableDecoder(model, source), config, HERE, torch.float32)
    losses = [
        stepper.step(inputs, labels, int((labels != IGNORED).sum()), 1e-2).loss.item()
        for inputs, labels in batches(steps)
    ]
    return model, losses


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_a_plain_loop(name: str, decoders: Callable[[str], Path]) -> None:
    plain = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef")
    changes = {key: 0.0 for key in plain if hasattr(CONFIGS[name], key)}
    folder = decoders(name).parent / f"{name}-without-dropout"
    save_decoder(name, decoders(name), folder, **changes)
    ours, losses = stepped(folder, 3)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for (inputs, labels), loss in zip(batches(3), losses, strict=True):
        logits = model(input_ids=torch.from_numpy(inputs)).logits
        expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=IGNORED)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], tensor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("training", [{"batch": 2, "accumulation": 2}, {"activation_checkpointing": True}])
def test_micro_batches_and_recomputed_layers_change_nothing(
    name: str, training: dict[str, Any], decoders: Callable[[str], Path], gates: Callable[[str, str], Path]
) -> None:
    for folder, train_what in ((decoders(name), "all"), (gates(name, "matrix"), "gates")):
        whole, losses = stepped(folder, 3, train=train_what)
        other, theirs = stepped(folder, 3, train=train_what, **training)
        assert theirs == pytest.approx(losses, abs=1e-5)
        for key, tensor in whole.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], tensor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "vector") for name in CONFIGS), ("llama", "matrix"), ("llama", "scalar")]
)
def test_gates_are_trained_and_the_base_stays(
    name: str, kind: str, decoders: Callable[[str], Path], gates: Callable[[str, str], Path]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(decoders(name)).state_dict()
    model, losses = stepped(gates(name, kind), 4, train="gates")
    assert losses[0] != losses[-1]
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in base.items())
    moved = [bool(parameter.any()) for gate in gates_of(model).values() for parameter in gate.parameters()]
    assert len(moved) == 2
    assert all(moved)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("plain", {}),
    "gates": ("gates", {"train": "gates"}),
    "gates and base": ("gates", {}),
    "lora": ("plain", {"lora": {"rank": 2}}),
    "lora and gates": ("gates", {"lora": {"rank": 2, "dropout": 0.1}}),
    "bf16": ("gates", {"precision": "pure_bf16"}),
}


@pytest.mark.parametrize(("name", "case"), [*(("gpt2", case) for case in CASES), ("mixtral", "gates and base")])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    name: str,
    case: str,
    stories: Path,
    decoders: Callable[[str], Path],
    gates: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, training = CASES[case]
    decoder = decoders(name) if source == "plain" else gates(name, "vector")
    samples = {"prompts": ["Once"], "tokens": 4}

    def recipe(out: str) -> dict[str, Any]:
        return decoder_recipe(stories, tmp_path / out, decoder, training=training, samples=samples)

    whole = train(recipe("whole"))
    stopped_after(7, monkeypatch, recipe("parts"))
    parts = train(recipe("parts"))
    assert records(parts.folder) == records(whole.folder)
    files = sorted(path.name for path in whole.model.glob("*.safetensors"))
    assert files == sorted(path.name for path in parts.model.glob("*.safetensors"))
    for file in files:
        assert (parts.model / file).read_bytes() == (whole.model / file).read_bytes()
    state = f"states/{whole.model.name}/optimizer.safetensors"
    assert (parts.folder / state).read_bytes() == (whole.folder / state).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_open_as_what_was_trained(
    case: str, stories: Path, decoders: Callable[[str], Path], gates: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source, training = CASES[case]
    decoder = decoders("llama") if source == "plain" else gates("llama", "matrix")
    run = train(decoder_recipe(stories, tmp_path / "run", decoder, training=training))
    names = {path.name for path in run.model.iterdir()}
    expected = {
        "whole": {"model.safetensors", "config.json"},
        "gates": {"gates.safetensors", "gate_config.json"},
        "gates and base": {"model.safetensors", "config.json", "modeling_gated.py"},
        "lora": {"adapter_model.safetensors", "adapter_config.json"},
        "lora and gates": {"adapter_model.safetensors", "adapter_config.json", "gates.safetensors", "gate_config.json"},
        "bf16": {"model.safetensors", "config.json", "modeling_gated.py"},
    }[case]
    ours = {"README.md", "lineage.json", "tokenizer.json", "tokenizer_config.json"}
    assert names - {"generation_config.json"} == expected | ours
    opened = decoder_by_name(run.folder)
    assert bool(gates_of(opened.load())) == (source == "gates")
    assert opened.tokenizer.fingerprint == decoder_by_name(decoder).tokenizer.fingerprint
    again = decoder_recipe(stories, tmp_path / "again", run.folder, training={"budget": 2})
    assert train(again).finished
    lineage = json.loads((run.model / "lineage.json").read_text())
    assert lineage["sources"][1]["sha256"] == decoder_by_name(decoder).sha256
    assert lineage["training"]["bits_per_byte"] == records(run.folder, "validation")[-1]["bits_per_byte"]


def test_the_balance_loss_of_a_decoders_own_experts_is_in_the_loss(stories: Path, tmp_path: Path) -> None:
    folder = save_decoder("mixtral", stories / "tokenizer", tmp_path / "mixtral", router_aux_loss_coef=0.5)
    source = decoder_by_name(folder)
    model = source.load()
    inputs, labels = (torch.from_numpy(array) for array in batches(1)[0])
    count = (labels != IGNORED).sum()
    losses = TrainableDecoder(model, source).objective()(inputs, labels, count)
    aux = model(input_ids=inputs, output_router_logits=True).aux_loss
    torch.testing.assert_close(losses.routing, 0.5 * aux)


def test_memory_is_planned_before_anything_is_loaded(
    stories: Path,
    decoders: Callable[[str], Path],
    gates: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(folder: Path, **training: Any) -> str:
        recipe = decode_recipe(decoder_recipe(stories, tmp_path / "run", folder, training=training)).recipe
        return plan_decoder_run(recipe, torch.device("cpu"))

    monkeypatch.setattr(devices, "free_memory", lambda _: 10**12)
    size = sum(p.numel() for p in decoder_by_name(decoders("llama")).load().parameters())
    assert plan(decoders("llama")).startswith(f"Training {size:,} parameters; 0 are frozen.")
    assert plan(gates("llama", "matrix"), train="gates").startswith(f"Training 512 parameters; {size:,} are frozen.")
    adapters = plan(gates("llama", "matrix"), lora={"rank": 2, "targets": ["q_proj"]})
    assert adapters.startswith(f"Training {512 + 3 * 2 * 32:,} parameters; {size:,} are frozen.")
    monkeypatch.setattr(devices, "free_memory", lambda _: 10 * size)
    with pytest.raises(BraidError, match="weights, gradients and AdamW's two moments need"):
        plan(decoders("llama"))
    plan(decoders("llama"), precision="pure_bf16")
    plan(gates("llama", "vector"), train="gates")


def test_a_base_that_changed_since_is_refused(stories: Path, tmp_path: Path) -> None:
    base = save_decoder("llama", stories / "tokenizer", tmp_path / "base")
    adapters = save_gates(base, tmp_path / "gates")
    recipe = decoder_recipe(stories, tmp_path / "run", adapters, training={"train": "gates"})
    train(recipe)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BraidError, match="are not those that these gates were made for"):
        train(recipe)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no gates": ({"training": {"train": "gates"}}, "training.train is gates, and the model has none"),
    "long": ({"data": {"length": 65}}, "data.length is 65 and the model's context only 64"),
    "freeze": ({"training": {"freeze": ["embedding"]}}, "training.freeze: only Braid's models have this"),
    "memory": ({"data": {"chunking": "consecutive"}}, "data.chunking: only Braid's models have this"),
    "two": ({"start_from": "x"}, "start_from is a Braid model, and decoder is one of transformers"),
    "architecture": ({"model": {"width": 16}}, "decoder: brings its own architecture"),
    "both": ({"training": {"lora": {}, "train": "gates"}}, "give one"),
    "target": ({"training": {"lora": {"targets": ["q_prj"]}}}, "Did you mean 'q_proj'?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_anything_is_written(
    mistake: str, stories: Path, decoders: Callable[[str], Path], tmp_path: Path
) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(BraidError) as caught:
        train(decoder_recipe(stories, tmp_path / "run", decoders("llama"), **changes))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_other_models_are_refused(stories: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(BraidError, match="this is an encoder"):
        train(decoder_recipe(stories, tmp_path / "run", tmp_path / "bert"))
    shutil.copytree(save_decoder("llama", stories / "tokenizer", tmp_path / "llama"), tmp_path / "cut")
    tensors = load_file(tmp_path / "llama" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "q_proj" not in k}, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(BraidError, match="weights are missing that the configuration asks for"):
        train(decoder_recipe(stories, tmp_path / "run", tmp_path / "cut"))


@pytest.mark.slow
def test_two_processes_train_the_gates_of_one(stories: Path, gates: Callable[[str, str], Path], tmp_path: Path) -> None:
    def recipe(out: str) -> dict[str, Any]:
        training = {"budget": "6 steps", "train": "gates", "accumulation": 2}
        return decoder_recipe(stories, tmp_path / out, gates("llama", "matrix"), training=training)

    alone = train(recipe("alone"))
    file = written(recipe("both"), tmp_path)
    fork(tmp_path / "screen", "train", file, "training.batch=2", "--device", "cpu", processes=2).finish()
    ours = load_file(tmp_path / "both/checkpoints" / alone.model.name / "gates.safetensors")
    for name, tensor in load_file(alone.model / "gates.safetensors").items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


def test_the_gates_of_a_braid_model_are_trained_alone_too(stories: Path, tmp_path: Path) -> None:
    model = {"stages": [{"block": {"layers": 3}}], "gates": {"kind": "matrix"}}
    first = train(tiny_recipe({"stories": stories}, tmp_path / "first", model=model, training={"budget": 2})).model
    training = {"budget": 3, "train": "gates"}
    recipe = tiny_recipe({"stories": stories}, tmp_path / "second", start_from=str(first), training=training)
    second = train({key: value for key, value in recipe.items() if key != "model"})
    assert second.trainable == 2 * 16 * 16
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second.model))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if ".gate." in name}
    assert len(changed) == 2


def test_a_damaged_checkpoint_is_not_opened(stories: Path, decoders: Callable[[str], Path], tmp_path: Path) -> None:
    run = train(decoder_recipe(stories, tmp_path / "run", decoders("phi3"), training={"budget": 1}))
    weights = run.model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(BraidError, match="was damaged or changed"):
        decoder_by_name(run.folder).load()
