"""Distillation in runs: the loss against its formula, one and several teachers, online and stored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.data.packing.prepare import prepare
from braidlm.model.heads.losses import IGNORED
from braidlm.training.features.distill import distillation
from braidlm.training.features.distill.distillation import OnlineDistillation, StoredDistillation, hidden_difference
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers, slices_of
from braidlm.training.features.extra_losses import TrainingPass
from braidlm.training.recipe import decode_recipe
from braidlm.training.step.objective import Objective
from braidlm.training.train import train
from tests.tiny_models import random_ids, tiny_model
from tests.training.features.distill.teaching import braid_teacher, stored_targets, transformers_teacher
from tests.training.forked_runs import fork
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, written


def recipe(stories: Path, out: Path, *teachers: Path, **options: Any) -> dict[str, Any]:
    distill = {"teachers": [str(teacher) for teacher in teachers], **options.pop("distill", {})}
    data = {"cache": str(out.parent / "cache"), **options.pop("data", {})}
    training = {"distill": distill, **options.pop("training", {})}
    return tiny_recipe({"stories": stories}, out, training=training, data=data, log={"every": 1}, **options)


@pytest.fixture(scope="module")
def teacher(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned something."""
    longer = {"budget": "60 steps", "batch": 8}
    return train(tiny_recipe({"stories": stories}, tmp_path_factory.mktemp("t") / "teacher", training=longer)).folder


def config(**options: Any) -> DistillConfig:
    return DistillConfig([TeacherConfig("a")], **options)


def a_pass(model: Any, labels: torch.Tensor, inputs: torch.Tensor) -> TrainingPass:
    hidden = model.model(inputs, use_cache=False).last_hidden_state
    return TrainingPass(model, inputs, labels, torch.tensor(50.0), hidden)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("hidden", [0.0, 0.7])
def test_the_loss_is_its_formula(rows: int, hidden: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "slices_of", lambda n, t, v: slices_of(n, t, v, rows * t * v))
    model, inputs = tiny_model(seed=1), random_ids(4, 8)
    labels = random_ids(4, 8, seed=1).masked_fill(
        torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) < 0.3, IGNORED
    )
    others = [tiny_model(seed=2), tiny_model(seed=3, width=12, block={"attention": {"heads": 2}})]
    loss = OnlineDistillation(config(temperature=3.0, hidden=hidden), model, Teachers(others, [0.4, 0.6], 37, 3.0))
    found = loss(a_pass(model, labels, inputs))
    with torch.no_grad():
        outputs = [other(inputs, output_hidden_states=True) for other in others]
    p = 0.4 * (outputs[0].logits / 3).softmax(-1) + 0.6 * (outputs[1].logits / 3).softmax(-1)
    own = model(inputs, output_hidden_states=True)
    expected = 9 * (p * (p.log() - (own.logits / 3).log_softmax(-1))).sum(-1)
    if hidden:
        states = own.hidden_states[-1]
        expected = expected + 0.7 * 0.4 * hidden_difference(states, outputs[0].hidden_states[-1])
        expected = expected + 0.7 * 0.6 * hidden_difference(loss.projections[1](states), outputs[1].hidden_states[-1])
    expected = (expected * (labels != IGNORED)).sum() / 50
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    parameters = [*model.parameters(), *loss.parameters()]
    assert len(list(loss.parameters())) == (1 if hidden else 0), "only where widths differ"
    gradients = [torch.autograd.grad(each, parameters, allow_unused=True) for each in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_all_stored_tokens_are_the_teachers_online(tmp_path: Path) -> None:
    """With k = vocabulary, but for the rounding of what is stored; in micro-batches as at once."""

    class Batch:
        class whole:
            own_sources = torch.zeros(4).numpy()
            positions = torch.arange(32).view(4, 8).numpy()

    model, other, inputs = tiny_model(seed=1), tiny_model(seed=2), random_ids(4, 8)
    teachers, labels = Teachers([other], [1.0], 37, 2.0), random_ids(4, 8, seed=1)
    expected = OnlineDistillation(config(temperature=2.0), model, teachers)(a_pass(model, labels, inputs))
    stored = stored_targets(tmp_path, teachers.log_probabilities(inputs).flatten(0, 1), 37)
    loss = StoredDistillation(config(top_k=37, temperature=2.0), model, {"stories": stored}, (4, 8, 37))
    for parts in (1, 2):
        loss.read_batch(Batch)  # type: ignore[arg-type]
        pieces = zip(labels.chunk(parts), inputs.chunk(parts), strict=True)
        found = sum(loss(a_pass(model, *piece)) for piece in pieces)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_each_row_is_read_from_its_data_set(tmp_path: Path) -> None:
    logs, stored = {}, {}
    for name in ("maths", "stories"):
        (tmp_path / name).mkdir()
        logs[name] = torch.randn(20, 37).log_softmax(-1)
        stored[name] = stored_targets(tmp_path / name, logs[name], 4)
    loss = StoredDistillation(config(top_k=4), tiny_model(), stored, (3, 2, 4))
    positions = np.array([[7, 8], [0, 19], [5, 2]])
    loss.read_batch(SimpleNamespace(whole=SimpleNamespace(own_sources=np.array([1, 0, 1]), positions=positions)))  # type: ignore[arg-type]
    for row, name in enumerate(("stories", "maths", "stories")):
        best = logs[name][positions[row]].topk(4)
        assert loss.ids[row].tolist() == best.indices.tolist()
        torch.testing.assert_close(loss.logs[row], best.values, rtol=1e-3, atol=0)


def test_nothing_of_a_teacher_is_trained_or_saved() -> None:
    model = tiny_model()
    loss = OnlineDistillation(config(), model, Teachers([tiny_model(seed=2)], [1.0], 37, 2.0))
    assert not list(loss.parameters())
    assert not loss.state_dict()
    assert set(Objective(model, extra={"distill": loss}).parameters()) == set(model.parameters())


def test_a_student_comes_nearer_to_its_teachers(stories: Path, teacher: Path, tmp_path: Path) -> None:
    run = train(recipe(stories, tmp_path / "run", teacher, distill={"weight": 1.0}))
    losses = [record["extra_losses"]["distill"] for record in records(run.folder, "train")]
    assert losses[-1] < losses[0] / 2


def test_the_weight_shares_between_text_and_teachers(stories: Path, teacher: Path, tmp_path: Path) -> None:
    plain = recipe(stories, tmp_path / "plain", teacher)
    del plain["training"]["distill"]
    none = train(recipe(stories, tmp_path / "none", teacher, distill={"weight": 0.0}))
    assert weight_bytes(train(plain).model) == weight_bytes(none.model)
    half = train(recipe(stories, tmp_path / "half", teacher))
    assert weight_bytes(half.model) != weight_bytes(none.model)


@pytest.mark.parametrize("options", [{}, {"hidden": 0.5}, {"top_k": 8}])
def test_two_teachers_teach_and_a_stopped_run_goes_on(
    options: dict[str, Any], stories: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = transformers_teacher(tmp_path / "gpt2", stories)
    dropout = {"dropout": 0.1}
    given = {"distill": options, "model": dropout, "training": {"batch": 2, "accumulation": 2}}
    whole = train(recipe(stories, tmp_path / "whole", teacher, other, **given))
    stopped_after(7, monkeypatch, recipe(stories, tmp_path / "parts", teacher, other, **given))
    parts = train(recipe(stories, tmp_path / "parts", teacher, other, **given))
    assert weight_bytes(parts.model) == weight_bytes(whole.model)
    assert records(parts.folder) == records(whole.folder)
    taught_by = [source for source in (load_lineage(whole.model) or {})["sources"] if source.get("role") == "teacher"]
    assert [source["model"] for source in taught_by] == ["teacher", "gpt2"]
    load_model(whole.model)


def test_stored_targets_train_as_online_ones(stories: Path, teacher: Path, tmp_path: Path) -> None:
    """Not the same: the teachers see other sequences. But the student learns as much."""
    losses = []
    for name, distill in (("online", {}), ("stored", {"top_k": 32})):
        run = train(recipe(stories, tmp_path / name, teacher, distill={"weight": 1.0, **distill}))
        losses.append(records(run.folder, "train")[-1]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"hidden": 0.5}, {"top_k": 8}])
def test_two_processes_learn_what_one_does(
    options: dict[str, Any], stories: Path, teacher: Path, tmp_path: Path
) -> None:
    other = transformers_teacher(tmp_path / "gpt2", stories)

    def asked(name: str, rows: int) -> dict[str, Any]:
        training = {"batch": rows, "budget": "4 steps", "threads": 1}
        return recipe(stories, tmp_path / name, teacher, other, distill=options, training=training)

    one = train(asked("one", 4))
    file = written(asked("two", 2), tmp_path)
    fork(tmp_path / "screen", "train", file, "--device", "cpu", processes=2).finish()
    for single, shared in zip(*(records(tmp_path / name, "train") for name in ("one", "two")), strict=True):
        assert shared["loss"] == pytest.approx(single["loss"], rel=1e-4)
        assert shared["extra_losses"] == pytest.approx(single["extra_losses"], rel=1e-3)
    assert one.finished


def test_text_is_prepared_with_the_tokenizer_of_the_teacher(stories: Path, teacher: Path, tmp_path: Path) -> None:
    asked = recipe(stories, tmp_path / "run", teacher)
    asked["data"]["sets"] = {"maths": {"source": "maths", "documents": 60, "holdout": 0.1}}
    assert train(asked).finished


def test_another_tokenizer_is_refused_before_anything_is_written(stories: Path, tmp_path: Path) -> None:
    prepare("maths", tmp_path / "maths", documents=60, tokenizer="bpe", vocab_size=310, workers=1)
    teacher = braid_teacher(tmp_path / "teacher", tmp_path / "maths")
    with pytest.raises(BraidError, match="another tokenizer than the data"):
        train(recipe(stories, tmp_path / "run", teacher))
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_was_trained_on_is_noticed(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run as a teacher is its newest checkpoint."""
    short = {"schedule": "constant", "warmup": 0}

    def teach(steps: int) -> Path:
        training = {**short, "budget": f"{steps} steps"}
        return train(tiny_recipe({"stories": stories}, tmp_path / "teacher", training=training)).folder

    teacher = teach(2)
    stopped_after(5, monkeypatch, recipe(stories, tmp_path / "run", teacher))
    teach(4)
    with pytest.raises(BraidError, match="another model now"):
        train(recipe(stories, tmp_path / "run", teacher))


def test_stored_targets_are_of_text_without_pauses(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="without pauses"):
        decode_recipe(recipe(stories, tmp_path / "run", tmp_path, distill={"top_k": 4}, data={"pauses": 0.1}))
