"""Gates that are factors by a kernel against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.lower import replace_parts
from braidlm.kernels.lowerings import gates
from braidlm.kernels.lowerings.gates import AddScaled, LoweredVectorGate, add_scaled
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig, make_gate
from tests.kernels.comparison import TOLERANCES, assert_equal_with_gradients


@pytest.mark.parametrize("factors", [24, 1], ids=["vector", "scalar"])
def test_adding_a_scaled_stream_equals_torch(factors: int, device: str, dtype: torch.dtype) -> None:
    output, hidden = (torch.randn(3, 70, 24, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(factors, device=device)
    assert_equal_with_gradients(
        AddScaled.apply, lambda o, h, w: torch.addcmul(o, h, w), [output, hidden, weight], dtype
    )


@pytest.mark.parametrize("kind", ["vector", "scalar", "matrix"])
def test_only_factors_are_lowered_and_zero_changes_nothing(kind: str, device: str, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(make_gate(decode(GatesConfig, {"kind": kind}).kind, 24)).to(device)
    plain, weight = type(model[0]), model[0].weight
    replace_parts(model)
    gate = model[0]
    assert type(gate) is (plain if kind == "matrix" or device == "cpu" else LoweredVectorGate)
    assert gate.weight is weight
    output, hidden = (torch.randn(2, 5, 24, device=device).to(dtype) for _ in range(2))
    assert torch.equal(gate(hidden, output), output)
    assert torch.equal(add_scaled(output, hidden, torch.zeros(24, device=device)), output)


@pytest.mark.gpu
def test_a_large_stream_goes_through_the_kernel() -> None:
    gate = make_gate(decode(GatesConfig, {"kind": "vector"}).kind, 2048).cuda()
    torch.nn.init.normal_(gate.weight)
    output, hidden = (torch.randn(gates.MIN_SIZE // 2048, 2048, device="cuda").bfloat16() for _ in range(2))
    expected = output.double() + hidden.double() * gate.weight.double()
    model = torch.nn.Sequential(gate)
    replace_parts(model)
    gate = model[0]
    actual = gate(hidden, output)
    assert actual.grad_fn.name() == "AddScaledBackward"
    with torch.no_grad():
        assert torch.equal(gate(hidden, output), actual)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCES[torch.bfloat16]
