"""LoRA: only adapters and the head are trained, in stacks too, and at the end they are part of the matrices."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.adapters import adaptable, split_stacks
from braidlm.core.models.card import model_card
from braidlm.core.models.presets import config_from
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.classifier import classify, make_classifier
from braidlm.evals.finetuning.loop import LORA, add_adapters, fine_tune, hyperparameters_for, predict
from braidlm.evals.tasks import TASKS
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.evals.labelled_examples import STACKED, evaluated, write_answerable
from tests.tiny_models import tiny_model

QUICK = {"finetune_epochs": 8, "finetune_batch_size": 16, "finetune_learning_rate": 1e-2}
KINDS = pytest.mark.parametrize("architecture", [{}, STACKED], ids=["plain", "stacked"])


def targets(model: Any) -> tuple[list[str], list[str]]:
    return split_stacks(model, adaptable(model))


def test_without_peft_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BraidError, match="peft, which trains adapters, is not installed") as caught:
        TASKS["glue_sst2"]().open(write_answerable(tmp_path)).evaluate("x", evaluated(Settings(finetune="lora")))
    assert caught.value.todo is not None
    assert "braidlm[eval]" in caught.value.todo


def test_stacks_are_found_as_parameters() -> None:
    single, stacked = targets(make_classifier(evaluated(**STACKED).model, 2))
    assert single
    assert {name.rsplit(".", 1)[-1] for name in single} <= {"qkv", "out", "up", "gate_up"}
    assert stacked
    assert all(name.endswith(".weight") for name in stacked)
    assert not targets(make_classifier(evaluated().model, 2))[1]


def test_every_matrix_but_those_of_routers_is_found() -> None:
    attention = {"heads": 4, "experts": {"names": 3, "keys": "shared", "router": {"hidden": 8}}}
    paths = {"parallel": {"layers": 1, "paths": 2, "join": "gumbel_v1"}}
    stages = ["block", {"project": {"to": 8}}, paths]
    model = tiny_model(tie_embeddings=False, block={"attention": attention}, stages=stages)
    names = {name.rsplit(".", 1)[-1] for name in adaptable(model)}
    assert names >= {"queries", "keys_values", "out", "gate_up", "linear", "combine"}
    assert not names & {"router", "scores", "inner", "head", "embedding"}


@pytest.mark.parametrize("recipe", ["tiny/moep", "tiny/paths"])
def test_adapters_land_on_every_stack(recipe: str) -> None:
    pytest.importorskip("peft")
    model: Any = make_classifier(BraidForCausalLM(config_from(recipe, vocab_size=300)), 2)
    stacks = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    assert stacks
    assert set(targets(model)[1]) == stacks
    adapted = add_adapters(model, LORA)
    reached = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert not [stack for stack in stacks if not any(stack.removesuffix(".weight") in name for name in reached)]


@pytest.mark.parametrize("recipe", ["tiny/moep", "tiny/paths"])
def test_the_cards_advice_reaches_every_stack(recipe: str) -> None:
    """The card's own lines, as a reader would run them with plain transformers and PEFT."""
    pytest.importorskip("peft")
    model = BraidForCausalLM(config_from(recipe, vocab_size=300))
    stacks = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    card = model_card("toy", {}, model)
    code = card.split("## Adapters")[1].split("```python\n")[1].split("```")[0]
    variables: dict[str, Any] = {"model": model}
    exec(code, variables)
    adapted = variables["model"]
    ids = torch.randint(0, 300, (2, 8))
    adapted(input_ids=ids, labels=ids).loss.backward()
    reached = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert not [stack for stack in stacks if not any(stack.removesuffix(".weight") in name for name in reached)]


@KINDS
def test_only_adapters_and_the_head_are_trained(architecture: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    model: Any = make_classifier(evaluated(**architecture).model, 2)
    whole = sum(parameter.numel() for parameter in model.parameters())
    single, stacked = targets(model)
    adapted = add_adapters(model, LORA)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or ".score." in name for name in trained)
    assert len([name for name in trained if "lora_A" in name]) == len(single) + len(stacked)
    assert sum(parameter.numel() for parameter in adapted.parameters() if not parameter.requires_grad) == whole
    logits, routing_loss = classify(model, torch.tensor([[1, 2, 3]]), torch.tensor([2]))
    (logits.sum() + routing_loss).backward()
    reached = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert reached == set(trained)


@KINDS
def test_merged_adapters_are_an_ordinary_classifier(architecture: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    model: Any = make_classifier(evaluated(**architecture).model, 2).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapted = add_adapters(model, LORA).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ids, lasts = torch.randint(0, 200, (4, 9)), torch.tensor([8, 3, 0, 5])
    expected, _ = classify(model, ids, lasts)
    merged = adapted.merge_and_unload()
    assert set(merged.state_dict()) == set(before)
    found, _ = classify(merged, ids, lasts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    plain, _ = classify(make_classifier(evaluated(**architecture).model, 2), ids, lasts)
    assert (found - plain).abs().max() > 1e-2
    single, stacked = targets(make_classifier(evaluated(**architecture).model, 2))
    adapted = {*stacked, *(f"{name}.weight" for name in single)}
    for name, weight in merged.state_dict().items():
        assert torch.equal(weight, before[name]) != (name in adapted), name
        if name in adapted:  # what was added has the rank of the adapters, in every member of a stack
            assert torch.linalg.matrix_rank(weight - before[name], rtol=1e-3).max() <= LORA.rank


@KINDS
def test_adapters_learn(tmp_path: Path, architecture: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    task = TASKS["glue_sst2"]().open(write_answerable(tmp_path))
    model = evaluated(Settings(finetune="lora", **QUICK), **architecture)
    before = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    found = task.evaluate("glue_sst2", model)
    assert found.score > 90
    assert found.notes["method"] == "lora"
    assert all(torch.equal(weight, before[name]) for name, weight in model.model.state_dict().items())
    hyperparameters = hyperparameters_for("sst2", model.settings)
    tokenized = task.tokenize(model, hyperparameters)
    tuned = fine_tune(model.model, tokenized, hyperparameters, 42)
    assert tuned.trained == found.notes["trained parameters"]
    assert (
        predict(tuned.classifier, tokenized, tokenized.valid).tolist() == tuned.answers.tolist() == found.items["sst2"]
    )
