"""Gates of Braid models: what they compute, where they may be, and that they travel with the folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.folders import save_model
from braidlm.model.config.strict import decode
from braidlm.model.gates import Gate, GatedLayer, GatesConfig, gated, make_gate
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import BASE, random_ids, tiny_config, tiny_model
from tests.without_braid import run_without_braid

WIDTH = BASE["width"]
KINDS: dict[str, Any] = {
    "matrix": "matrix",
    "matrix with bias": {"kind": "matrix", "bias": True},
    "low rank": {"kind": "matrix", "rank": 3},
    "vector": "vector",
    "scalar": "scalar",
}
LAYERS: list[Any] = [{"block": {"layers": 2}}, {"parallel": {"paths": 2, "layers": 2}}]


def gate_of(kind: Any, dtype: torch.dtype = torch.float64) -> Gate:
    gate = make_gate(decode(GatesConfig, {"kind": kind}).kind, WIDTH).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return gate


def matrix_of(gate: Any) -> tuple[Tensor, Tensor | float]:
    """The reference: every gate is a matrix and a vector."""
    weight = gate.weight if getattr(gate, "down", None) is None else gate.weight @ gate.down
    bias = getattr(gate, "bias", None)
    return weight if weight.ndim == 2 else torch.diag(weight.expand(WIDTH)), 0.0 if bias is None else bias


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_gate_is_a_matrix(kind: Any) -> None:
    gate = gate_of(kind)
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    output = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [hidden, output, *gate.parameters()]
    matrix, bias = matrix_of(gate)
    expected = output + hidden @ matrix.t() + bias
    got = gate(hidden, output)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gate(hidden), expected - output, rtol=0, atol=1e-12)
    weights = torch.randn_like(got)
    ours = torch.autograd.grad((got * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


class Doubled(torch.nn.Module):
    """A layer whose output, alone or in a tuple, is twice its input."""

    def __init__(self, in_tuple: bool):
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, hidden_states: Tensor) -> Any:
        return (hidden_states * 2, "cache") if self.in_tuple else hidden_states * 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("in_tuple", [False, True])
def test_hooks_and_gradients_change_no_bit(kind: Any, in_tuple: bool) -> None:
    """Without gradients neither a layer nor its gate is called as a module, unless somebody listens to it."""
    layer, hidden = gated(Doubled(in_tuple), gate_of(kind, torch.float32)), torch.randn(2, 5, WIDTH)
    heard: list[Tensor] = []

    def output(result: Any) -> Tensor:
        assert not in_tuple or result[1:] == ("cache",)
        return result[0] if in_tuple else result

    with torch.no_grad():
        alone = output(layer(hidden))
        assert torch.equal(output(layer(hidden_states=hidden)), alone)
        for register in (layer.gate.register_forward_hook, layer.gate.register_forward_pre_hook):
            handle = register(lambda gate, inputs, *result: heard.extend([*inputs, *result]))  # type: ignore[operator]
            assert torch.equal(output(layer(hidden)), alone)
            handle.remove()
        assert torch.equal(output(layer(hidden)), alone)
    assert torch.equal(output(layer(hidden)), alone)
    assert len(heard) == 5  # input and output of the layer twice, and what the gate made of them once
    assert all(map(torch.equal, heard, [hidden, hidden * 2, alone, hidden, hidden * 2]))


def test_who_listens_to_a_layer_or_takes_its_place_is_called() -> None:
    layer, hidden = gated(Doubled(False), gate_of("vector", torch.float32)), torch.randn(2, 5, WIDTH)
    heard: list[str] = []

    def hear(module: Any, *_: Any) -> None:
        heard.append(type(module).__name__)

    with torch.no_grad():
        expected = layer(hidden)
        everywhere = (register_module_forward_hook, register_module_forward_pre_hook)
        for register in (layer.register_forward_hook, layer.register_forward_pre_hook, *everywhere):
            handle = register(hear)
            assert torch.equal(layer(hidden), expected)
            handle.remove()
        layer.forward = lambda hidden: -hidden  # type: ignore[method-assign]  # as accelerate does
        assert torch.equal(layer(hidden), -hidden)
    assert heard == ["Doubled", "Doubled", "VectorGate", "Doubled", "Doubled", "VectorGate"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_float32_gates_keep_the_type_of_a_bf16_stream(kind: Any) -> None:
    gate = gate_of(kind, torch.float32)
    hidden, output = torch.randn(2, 1, 5, WIDTH, dtype=torch.bfloat16)
    got = gate(hidden, output)
    assert got.dtype == torch.bfloat16
    matrix, bias = matrix_of(gate)
    torch.testing.assert_close(got.float(), output.float() + hidden.float() @ matrix.t() + bias, rtol=0.02, atol=0.15)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("initialisation", ["normal", "torch", "fan_in"])
def test_a_new_model_computes_what_it_would_without_gates(kind: Any, initialisation: str) -> None:
    """Whatever the initialisation of the other weights is, gates begin at zero."""
    model = BraidForCausalLM(tiny_config(stages=LAYERS, gates={"kind": kind}, initialisation=initialisation)).eval()
    plain = BraidForCausalLM(tiny_config(stages=LAYERS, initialisation=initialisation)).eval()
    plain.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if ".gate." not in name}, strict=True
    )
    ids = random_ids(2, 7)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_the_layers_are_always_listed() -> None:
    config = tiny_config(stages=LAYERS, gates={"kind": "scalar"})
    assert config.architecture["gates"] == {"kind": {"kind": "scalar"}, "layers": [2, 3, 4]}
    model = BraidForCausalLM(config)
    named = [name for name, module in model.named_modules() if isinstance(module, GatedLayer)]
    assert named == ["model.stages.0.layers.1", "model.stages.1.layers.0", "model.stages.1.layers.1"]


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ({"layers": [2, 5]}, "there is no layer 5: the model has 4"),
        ({"layers": [2, 2]}, "listed twice"),
        ({"layers": []}, "no layer is left"),
        ({"layers": [0]}, "from 1 to 1000"),
        ({"kind": "vectr"}, "Did you mean 'vector'"),
        ({"kind": {"kind": "vector", "rank": 2}}, "unknown key 'rank'"),
    ],
    ids=str,
)
def test_layers_and_kinds_that_are_not_there_are_refused(gates: dict[str, Any], words: str) -> None:
    with pytest.raises(BraidError, match=words):
        tiny_config(stages=LAYERS, gates=gates)


def test_a_layer_that_changes_the_width_is_refused() -> None:
    stages = ["block", {"parallel": {"paths": 2, "layers": 2, "to": 32}}]
    skeleton(tiny_config(stages=stages, gates={"layers": [1, 2]}, tie_embeddings=False))
    with pytest.raises(BraidError, match="layer 3 changes the stream's width, from 16 to 32"):
        skeleton(tiny_config(stages=stages, gates={"layers": [3]}, tie_embeddings=False))


@pytest.mark.parametrize(
    ("kind", "parameters", "products"),
    [
        ("matrix", WIDTH**2, WIDTH**2),
        ({"kind": "matrix", "bias": True}, WIDTH**2 + WIDTH, WIDTH**2),
        ({"kind": "matrix", "rank": 3}, 6 * WIDTH, 6 * WIDTH),
        ("vector", WIDTH, WIDTH),
        ("scalar", 1, 1),
    ],
    ids=str,
)
def test_gates_are_counted(kind: Any, parameters: int, products: int) -> None:
    plain = model_cost(skeleton(tiny_config(stages=LAYERS)), 16)
    model = model_cost(skeleton(tiny_config(stages=LAYERS, gates={"kind": kind})), 16)
    assert model.parameters - plain.parameters == 3 * parameters
    assert model.flops_per_token - plain.flops_per_token == 3 * 2 * products


ALONE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.arange(8)[None]).logits, sys.argv[2])
"""


def test_a_folder_with_gates_opens_without_braidlm(tmp_path: Path) -> None:
    model = tiny_model(stages=LAYERS, gates={"kind": {"kind": "matrix", "rank": 3, "bias": True}})
    folder = save_model(model, tmp_path / "model", None, {"made_by": "a test"})
    run_without_braid(ALONE, folder, tmp_path / "logits")
    got = torch.load(tmp_path / "logits", weights_only=True)
    torch.testing.assert_close(got, model(torch.arange(8)[None]).logits, rtol=0, atol=1e-6)
