"""Transformer-XL's memory: a chunk attends to the one before as if both were one text, but for the gradient."""

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.features.memory import ChunkMemory, Memory, MemoryCache, empty_memory
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.objective import Objective
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.plain_losses import plain_losses
from tests.tiny_models import random_ids, tiny_model

CPU = torch.device("cpu")
ROWS, TIME = 3, 8

ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"heads": 4},
    "grouped": {"heads": 4, "kv_heads": 2},
    "window": {"heads": 4, "window": 5},
    "stick-breaking": {"kind": "stick_breaking", "heads": 4},
    "stick-breaking-rest": {"kind": "stick_breaking", "heads": 4, "current": False, "rest": "current"},
    "experts": {"heads": 2, "experts": {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}},
    "experts-dense": {"heads": 2, "experts": {"names": 3, "router": {"top_k": 2, "compute": "dense"}}},
    "experts-routed": {"heads": 2, "experts": {"names": 3, "scope": "routed", "router": {"top_k": 1}}},
    "heads": {"heads": 2, "experts": {"names": 3, "keys": "shared", "router": {"top_k": 2, "compute": "sparse"}}},
    "stream": {"kind": "stick_breaking", "heads": 1, "experts": {"names": 3, "keys": "stream", "router": {"top_k": 2}}},
}
POSITIONS: dict[str, Any] = {
    "none": "none",
    "rope": "rope",
    "interleaved": {"kind": "rope", "pairs": "interleaved"},
    "yarn": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, "original_context": 8}},
}
PATHS = [{"name": "a", "width": 8}, {"name": "b", "width": 8}]
STAGES: dict[str, list[Any]] = {
    "paths": [{"parallel": {"layers": 1, "paths": 2, "join": "add"}}],
    "unlike-paths": [
        {"parallel": {"layers": 1, "paths": {"a": {"attention": {"heads": 2}}, "b": None}, "join": "add"}}
    ],
    "routed-paths": [{"parallel": {"layers": 1, "paths": 3, "join": {"kind": "routed", "top_k": 1}}}],
    "routed-scope": [
        {"parallel": {"layers": 1, "paths": 3, "join": {"kind": "routed", "top_k": 1, "scope": "routed"}}}
    ],
}
JUDGED: dict[str, Any] = {
    "stages": [{"parallel": {"layers": 1, "paths": PATHS, "join": "concat"}}],
    "norm": {"kind": "per_path", "paths": PATHS},
    "positions": "rope",
}
MODELS: list[dict[str, Any]] = [
    *({"block": {"attention": attention}, "positions": "rope"} for attention in ATTENTIONS.values()),
    *({"positions": positions} for positions in POSITIONS.values()),
    *({"stages": stages, "positions": "rope"} for stages in STAGES.values()),
    *({**JUDGED, "head": {"kind": "posterior", "paths": PATHS, "window": window}} for window in (None, 5)),
]
NAMES = [*ATTENTIONS, *(f"positions-{name}" for name in POSITIONS), *STAGES, "posterior", "posterior-window"]


def model_of(layers: int = 1, **architecture: Any) -> BraidForCausalLM:
    return tiny_model(**{"stages": ["block"] * layers, "positions": "rope", **architecture}).train()


def tokens(chunks: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and labels [row, chunks x time]."""
    ids = random_ids(rows, chunks * TIME + 1, seed=4)
    return ids[:, :-1], ids[:, 1:]


def read(model: BraidForCausalLM, length: int, chunks: int) -> list[Any]:
    """The losses of one chunk after the other, each with the memory of those before."""
    objective, memory = Objective(model), empty_memory(model, length, ROWS, CPU, torch.float32)
    found = []
    for index, (inputs, labels) in enumerate(zip(*(x.split(TIME, 1) for x in tokens(chunks)), strict=True)):
        goes_on = torch.full((ROWS,), int(index > 0))
        losses = objective(inputs, labels, torch.tensor(float(labels.numel())), memory, goes_on)
        found.append(losses)
        memory = losses.memory
    return found


def gradients(model: BraidForCausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("architecture", MODELS, ids=NAMES)
def test_one_layer_reads_chunks_as_one_text(architecture: dict[str, Any]) -> None:
    """Keys and values of a first layer depend on their own tokens alone: chunks and text are one function."""
    model = model_of(**architecture)
    losses = read(model, length=2 * TIME, chunks=3)
    inputs, labels = tokens(3)
    for index, chunk in enumerate(losses):
        only = torch.full_like(labels, IGNORED)
        part = slice(index * TIME, (index + 1) * TIME)
        only[:, part] = labels[:, part]
        text, _, _ = plain_losses(model, inputs, only)
        torch.testing.assert_close(chunk.text, text, atol=2e-5, rtol=1e-5)
    alone = plain_losses(model, inputs[:, TIME : 2 * TIME], labels[:, TIME : 2 * TIME])[0]
    assert abs(alone - losses[1].text) > 1e-4, "the memory has an effect"


@pytest.mark.parametrize("length", [3, TIME])
@pytest.mark.parametrize("architecture", MODELS, ids=NAMES)
def test_layers_read_a_detached_cache(architecture: dict[str, Any], length: int) -> None:
    """Losses and gradients are those of transformers' cache of the chunk before, shortened and without gradients."""
    layers = {} if "stages" in architecture else {"layers": 2}
    model = model_of(**layers, **architecture)
    (inputs, after), (_, labels) = (x.split(TIME, 1) for x in tokens(2))
    cache = DynamicCache()
    with torch.no_grad():
        model.run(inputs, cache=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, -length:], layer.values[:, :, -length:]
    positions = torch.arange(TIME, 2 * TIME)[None]
    done = model.run(after, position_ids=positions, cache=cache)
    expected = model.head.loss(done.hidden, labels, **done.read)
    actual = read(model, length, chunks=2)[1].text
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(model, actual), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-3)


def test_no_gradient_flows_into_a_memory() -> None:
    model = model_of(2)
    memory = read(model, TIME, chunks=1)[0].memory
    assert not any(tensor.requires_grad for tensor in memory.tensors().values())
    assert memory.filled.tolist() == [TIME] * ROWS


def test_a_row_that_begins_a_text_is_read_as_without_memory() -> None:
    model, (inputs, labels) = model_of(2), tokens(1)
    full = empty_memory(model, 5, ROWS, CPU, torch.float32)
    assert full is not None
    for tensor in (*full.keys, *full.values):
        tensor.normal_()
    full.filled.fill_(5)

    def row_losses(cache: MemoryCache | None) -> list[float]:
        options = {} if cache is None else cache.span_options(model.model, inputs.shape[1])
        hidden = model.run(inputs, **options).hidden
        return [model.head.loss(hidden[row : row + 1], labels[row : row + 1]).item() for row in range(ROWS)]

    plain = row_losses(None)
    assert row_losses(MemoryCache(full, torch.zeros(ROWS, dtype=torch.long))) == pytest.approx(plain, abs=1e-5)
    mixed = row_losses(MemoryCache(full, torch.tensor([1, 0, 1])))
    assert mixed[1] == pytest.approx(plain[1], abs=1e-5)
    assert all(abs(mixed[row] - plain[row]) > 1e-3 for row in (0, 2))


def test_a_long_memory_fills_up_and_empties() -> None:
    memory = empty_memory(model_of(), 20, 2, CPU, torch.float32)
    assert memory is not None
    seen = []
    for goes_on in ([0, 0], [1, 1], [1, 0], [1, 1]):
        cache = MemoryCache(memory, torch.tensor(goes_on))
        cache.update(torch.ones(2, 4, TIME, 4), torch.ones(2, 4, TIME, 4), 0)
        memory = cache.after(model_of().model, TIME)
        seen.append(memory.filled.tolist())
    assert seen == [[8, 8], [16, 16], [20, 8], [20, 16]]


def test_without_a_memory_there_is_none() -> None:
    assert empty_memory(model_of(), 0, 2, CPU, torch.float32) is None


def test_learned_positions_are_refused() -> None:
    with pytest.raises(BraidError, match="they count from its own beginning") as caught:
        empty_memory(model_of(positions="learned"), 4, 2, CPU, torch.float32)
    assert caught.value.where == "training.memory"


def with_memory(
    model: BraidForCausalLM, options: dict[str, Any], device: torch.device = CPU
) -> tuple[Stepper, ChunkMemory]:
    config = decode(TrainingConfig, {"memory": TIME, **options})
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, device), torch.float32)
    (memory,) = (one for one in stepper.features if isinstance(one, ChunkMemory))
    return stepper, memory


def stepped(model: BraidForCausalLM, cut: bool = False, **training: Any) -> tuple[list[float], Memory]:
    """Losses of steps over consecutive chunks, one of them cut in two pieces or not, and the memory at the end."""
    options = {"budget": 4, "batch": 4, "optimizer": {"lr": 0.02}} | training
    stepper, memory = with_memory(model, options)
    inputs, labels = (x.numpy() for x in tokens(4, rows=4))
    seen = []
    for index in range(4):
        part = slice(index * TIME, (index + 1) * TIME)
        goes_on = np.array([index > 0, index > 0, index > 0, index not in (0, 2)])
        batch = inputs[:, part].copy(), labels[:, part].copy()
        if cut and index == 1:  # the first piece trains with no rate, so that the second finds the same weights
            memory.go_on(goes_on, keeps=False)
            nothing = stepper.step(batch[0], np.full_like(batch[1], IGNORED), 1, 0.0)
            assert nothing.loss.item() == 0.0
        memory.go_on(goes_on)
        seen.append(stepper.step(*batch, batch[1].size, 0.02).loss.item())
    return seen, memory.memory


def assert_same(a: tuple[list[float], Memory], b: tuple[list[float], Memory], tolerance: float = 2e-5) -> None:
    assert a[0] == pytest.approx(b[0], abs=tolerance)
    for name, tensor in a[1].tensors().items():
        torch.testing.assert_close(tensor, b[1].tensors()[name], atol=20 * tolerance, rtol=1e-3)


@pytest.mark.parametrize(
    "training",
    [{"batch": 2, "accumulation": 2}, {"batch": 1, "accumulation": 4}, {"activation_checkpointing": True}],
    ids=["two-micro-batches", "four-micro-batches", "checkpointing"],
)
def test_however_a_step_is_computed_the_memory_is_the_same(training: dict[str, Any]) -> None:
    assert_same(stepped(model_of(2), **training), stepped(model_of(2)))


def test_a_piece_of_a_batch_leaves_the_memory_where_it_is() -> None:
    without_averages = {"optimizer": {"lr": 0.02, "weight_decay": 0.0, "betas": [0.0, 0.0]}}
    assert_same(stepped(model_of(2), cut=True, **without_averages), stepped(model_of(2), **without_averages))


def test_a_row_that_begins_in_the_midst_forgets() -> None:
    """Row 3 begins anew at the third step, so that the rows' memories differ from those of rows that go on."""
    losses, memory = stepped(model_of(2))
    assert memory.filled.tolist() == [TIME] * 4
    assert len(set(losses)) == 4


def test_evaluation_has_no_memory_and_leaves_it() -> None:
    model = model_of(2)
    stepper, memory = with_memory(model, {"budget": 1, "batch": 4})
    inputs, labels = tokens(1, rows=4)
    stepper.step(inputs.numpy(), labels.numpy(), labels.numel(), 0.0)
    before = {name: tensor.clone() for name, tensor in memory.state().items()}
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=inputs).logits, model_of(2).eval()(input_ids=inputs).logits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state().items())


def test_autocast_keeps_a_memory_in_its_type() -> None:
    dtype, model = torch.bfloat16, model_of(2, block={"attention": ATTENTIONS["stream"]}, positions="none")
    memory = empty_memory(model, TIME, 4, CPU, dtype)
    assert memory is not None
    inputs, labels = tokens(1, rows=4)
    with torch.autocast("cpu", dtype):
        losses = Objective(model)(inputs, labels, torch.tensor(32.0), memory, torch.ones(4, dtype=torch.long))
    kept = ChunkMemory(memory)
    kept.read_pass(losses)
    kept.end_step(1.0)
    assert kept.memory.keys[0].dtype == dtype
    assert losses.text.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [{}, {"block": {"attention": ATTENTIONS["stream"]}, "positions": "none"}])
def test_compiled_equals_eager(architecture: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, differentiated and run as graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    logging.disable(logging.CRITICAL)  # torch's trace of the compiler makes pytest's log slow
    try:
        compiled = stepped(model_of(**architecture), compile=True)
    finally:
        logging.disable(logging.NOTSET)
    assert_same(compiled, stepped(model_of(**architecture)), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [{"compile": False}, {}, {"batch": 2, "accumulation": 2}])
def test_a_replayed_step_carries_the_memory(training: dict[str, Any]) -> None:
    def run(graph: bool) -> list[float]:
        device = torch.device("cuda")
        options = {"budget": 9, "batch": 4, "graph": graph, "compile": None if graph else False} | training
        model = model_of(2).to(device)
        stepper, memory = with_memory(model, options, device)
        assert stepper.lowered is None
        inputs, labels = (x.numpy() for x in tokens(9, rows=4))
        seen = []
        for index in range(9):
            part = slice(index * TIME, (index + 1) * TIME)
            goes_on = np.array([index > 0, index > 0, index > 0, index not in (0, 6)])
            for piece in range(2 if index == 5 else 1):  # once more with the same rows
                batch = inputs[:, part].copy(), labels[:, part].copy()
                memory.go_on(goes_on, keeps=not (index == 5 and piece == 0))
                seen.append(stepper.step(*batch, batch[1].size, 1e-3).loss.item())
        return seen

    assert run(True) == pytest.approx(run(False), abs=1e-4)
