"""Plans are what is measured: memory and traffic of 1, 2 and 4 processes, and what autograd keeps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.training.plan import ModelSize, kept_bytes, model_size, process_memory, step_traffic
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.layout import Layout
from braidlm.training.step.objective import Objective
from braidlm.training.step.parallel import Rank
from braidlm.training.step.spread import local
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.outcome import Outcome
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.step.processes import launch

EXPERTS: dict[str, Any] = {"names": 4, "router": {"top_k": 2, "compute": "sparse"}}
ROUTED = {"block": {"attention": {"heads": 4}, "feed": {"kind": "swiglu", "hidden": 24, "experts": EXPERTS}}}
LENGTH, BATCH, ACCUMULATION = 10, 2, 3
WHOLE = Layout(1, 1)


def size_of(model: Any, **training: Any) -> ModelSize:
    config = decode(TrainingConfig, {"budget": 1, **training})
    recipe: Any = SimpleNamespace(training=config, data=SimpleNamespace(length=LENGTH))
    return model_size(model.config, recipe, config.activation_checkpointing)


def state_and_traffic(rank: Rank, weights: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The bytes of state of this process after a step, and what rings send for its collectives in one more."""
    sent = 0

    def counted(collective: Callable[..., Any], passes: int) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            whole = max(one.nbytes for one in (*arguments, *options.values()) if isinstance(one, torch.Tensor))
            sent += round(passes * whole * (1 - 1 / dist.get_world_size(options.get("group"))))
            return collective(*arguments, **options)

        return run

    model = tiny_model(seed=5, **ROUTED)
    training = {"batch": BATCH, "accumulation": ACCUMULATION, "parallel": weights}
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, {"budget": 2, **training}), rank, torch.float32)
    gradients: list[int] = []  # they are gone after the step
    update = stepper.optimizer.step

    def counting_step() -> None:
        gradients.append(sum(local(p.grad).nbytes for p in stepper.objective.parameters() if p.grad is not None))
        update()

    stepper.optimizer.step = counting_step  # type: ignore[method-assign]
    rows = torch.randint(2, VOCABULARY, (BATCH * ACCUMULATION, LENGTH)).numpy()
    for step in range(2):
        if step:
            for name, passes in {"all_gather_single": 1, "reduce_scatter_single": 1, "all_reduce": 2}.items():
                monkeypatch.setattr(dist, name, counted(getattr(dist, name), passes))
        stepper.begin_step(step, step / 2)
        stepper.step(rows, rows, rows.size * rank.world_size, 0.01, (step + 1) / 2)
    states = [value for part in stepper.optimizer.parts for state in part.state.values() for value in state.values()]
    parameters = [p for p in stepper.objective.parameters() if p.requires_grad]
    return gradients[-1] + sum(local(tensor).nbytes for tensor in [*parameters, *states]), sent


def measure(rank: Rank, out: Path, cases: list[tuple[str, int]]) -> None:
    for weights, here in cases:
        os.environ["LOCAL_WORLD_SIZE"] = str(here)
        with pytest.MonkeyPatch.context() as monkeypatch:
            found = state_and_traffic(rank, weights, monkeypatch)
        if rank.is_main:
            (out / f"{weights}-{rank.world_size}.json").write_text(json.dumps(found))


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(tiny_model(seed=5, **ROUTED))
    state, sent = state_and_traffic(Rank(0, 1, torch.device("cpu")), "auto", monkeypatch)
    assert process_memory(size, WHOLE, 1, BATCH)["state"] == pytest.approx(state, rel=0.01)
    assert sent == sum(step_traffic(size, WHOLE, ACCUMULATION, 60).values()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes(world: int, tmp_path: Path) -> None:
    cases = {"sharded": (world, Layout(1, world)), "replicated": (world, Layout(world, 1))}
    cases |= {"hybrid": (2, Layout(2, 2))} if world == 4 else {}
    launch(world, measure, tmp_path, [(weights, here) for weights, (here, _) in cases.items()])
    size = size_of(tiny_model(seed=5, **ROUTED))
    for weights, (_, layout) in cases.items():
        state, sent = json.loads((tmp_path / f"{weights}-{world}.json").read_text())
        planned = sum(step_traffic(size, layout, ACCUMULATION, 60, gathered=4).values())
        assert process_memory(size, layout, world, BATCH)["state"] == pytest.approx(state, rel=0.03), weights
        assert planned == pytest.approx(sent, rel=0.03), weights


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("architecture", [{}, ROUTED], ids=["dense", "experts"])
def test_what_autograd_keeps(architecture: dict[str, Any], recompute: bool) -> None:
    model = tiny_model(seed=5, **architecture).train()
    if recompute:
        model.gradient_checkpointing_enable()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    counts = []
    for rows in (2, 4):
        kept: dict[int, Any] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, Any] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        ids = torch.randint(2, VOCABULARY, (rows, LENGTH))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Objective(model)(ids, ids, torch.tensor(float(ids.numel())))
        counts.append(sum(storage.nbytes() for storage in kept.values()))
    planned = kept_bytes(model.config, LENGTH, recompute, torch.float32)
    assert planned == pytest.approx((counts[1] - counts[0]) / 2, rel=0.02)


def test_a_plan(braid: Callable[..., Outcome]) -> None:
    answer = braid("show", "tiny/llama", "--gpus", 16, "training.parallel=hybrid", "--utilisation", 0.5, "--json")
    plan = json.loads(answer.out)["plan"]
    assert plan["layout"] == "2 copies x 8 shards"
    assert plan["memory"]["all"] == sum(amount for name, amount in plan["memory"].items() if name != "all")
    assert plan["hours"] * 3600 * plan["tokens_per_second"] == pytest.approx(plan["steps"] * plan["tokens_per_step"])
    assert any("50% of 989 TFLOP/s" in line for line in plan["assumptions"])
    shown = braid("show", "tiny/llama", "--gpus", 16, "--gpu", "A100").out
    assert "memory of each of 16 processes (16 copies)" in shown
    assert "A100: 80 GB" in shown


def test_a_plan_that_does_not_fit_says_what_would(braid: Callable[..., Outcome]) -> None:
    answer = braid("show", "tiny/llama", "--gpus", 8, "--gpu", "T4", "training.batch=100000")
    assert answer.code == 2
    assert "this does not fit: a process needs" in answer.err
    todo = answer.err.strip().split("\n")[-1]
    assert todo.startswith("This would fit: training.batch=")
    changes = [word for word in todo.removeprefix("This would fit: ").rstrip(".").split() if "=" in word]
    assert braid("show", "tiny/llama", "--gpus", 8, "--gpu", "T4", *changes).code == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["tiny/llama", "--gpus", 8, "--gpu", "H20"], "'H20' is not known. Did you mean 'H200'?"),
        (["tiny/owners", "--gpus", 8], "a plan is of one recipe that trains a model of ours, not of a study"),
        (["tiny/llama", "--gpu", "H100"], "--gpus N plans a recipe's training"),
    ],
)
def test_what_cannot_be_planned(arguments: list[Any], problem: str, braid: Callable[..., Outcome]) -> None:
    answer = braid("show", *arguments)
    assert answer.code == 2
    assert problem in answer.err


def test_experts_that_processes_share() -> None:
    size = size_of(tiny_model(seed=5, **ROUTED))
    apart = step_traffic(size, Layout(1, 4, experts=4), 1, 100)
    together = step_traffic(size, Layout(1, 4), 1, 100)
    assert apart["tokens to experts"] == round(2 * 4 * 3 / 4 * size.expert_values * 100)
    assert together["tokens to experts"] == 0
    assert apart["weights gathered"] < together["weights gathered"]
    with pytest.raises(BraidError, match="Give a number that divides 4"):
        Layout(1, 4, experts=3)
