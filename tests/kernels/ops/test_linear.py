"""Low-precision copies of weights, products with them, and folded norms, against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor, nn

from braidlm.kernels.ops.fold import Bank, fold, plain_fold
from braidlm.kernels.ops.linear import Linear, cast_all
from tests.kernels.comparison import TOLERANCES, assert_close, assert_equal_with_gradients


def test_casts_equal_to(device: str, dtype: torch.dtype) -> None:
    parameters = [torch.randn(*shape, device=device) for shape in ((3,), (70, 130), (4, 5, 7), (64, 64))]
    for parameter, cast in cast_all(parameters, dtype).items():
        assert torch.equal(cast, parameter.to(dtype))


@pytest.mark.parametrize("transposed", [False, True], ids=["narrow", "wide"])
def test_linear_equals_a_product_with_the_cast(transposed: bool, device: str, dtype: torch.dtype) -> None:
    rows, weight = torch.randn(40, 24, device=device).to(dtype), torch.randn(16, 24, device=device)
    weight = weight.t().contiguous() if transposed else weight
    cast = cast_all([weight], dtype)[weight]
    rounding = cast.double() - weight.double()

    def plain(r: Tensor, w: Tensor) -> Tensor:
        return r @ (w + rounding if transposed else (w + rounding).t())

    def linear(r: Tensor, w: Tensor) -> Tensor:
        return Linear.apply(r, w, cast, None, None, transposed)

    assert_equal_with_gradients(linear, plain, [rows, weight], dtype)


@pytest.mark.parametrize("concatenated", [False, True], ids=["", "concatenated"])
@pytest.mark.parametrize("parts", [("bias",), ("scale",), ("bias", "scale", "shift")], ids="+".join)
def test_folded_banks_equal_the_reference(
    concatenated: bool, parts: tuple[str, ...], device: str, dtype: torch.dtype
) -> None:
    members, inputs, outputs = 3, 40, 70
    shapes = {"weight": (inputs, outputs), "bias": (outputs,), "scale": (inputs,), "shift": (inputs,)}
    layers = [
        {n: torch.randn(members, *s, device=device) for n, s in shapes.items() if n in ("weight", *parts)}
        for _ in range(2)
    ]
    leaves = [{name: x.clone().requires_grad_() for name, x in layer.items()} for layer in layers]
    exact = [{name: x.double().requires_grad_() for name, x in layer.items()} for layer in layers]
    banks = {nn.Identity(): Bank(**{"bias": None, **layer}, concatenated=concatenated) for layer in leaves}
    actual, expected = [], []
    for folded, layer in zip(fold(banks, dtype).attach().values(), exact, strict=True):
        weight, bias = plain_fold(Bank(**{"bias": None, **layer}))
        weight = weight.transpose(0, 1).flatten(1) if concatenated else weight
        assert_close(folded.cast, weight, TOLERANCES[dtype], "cast")
        actual.append(folded.weight)
        expected.append(weight)
        if bias is not None:
            bias = bias.flatten() if concatenated else bias
            assert_close(folded.bias, bias, TOLERANCES[torch.float32], "bias")
            assert_close(folded.bias_cast, bias, TOLERANCES[dtype], "cast of the bias")
            actual.append(folded.bias)
            expected.append(bias)
    upstream = [torch.randn_like(x) for x in actual]
    ours, theirs = ([x for layer in side for x in layer.values()] for side in (leaves, exact))
    our_gradients = torch.autograd.grad(actual, ours, upstream)
    their_gradients = torch.autograd.grad(expected, theirs, [u.double() for u in upstream])
    for index, (a, e) in enumerate(zip(our_gradients, their_gradients, strict=True)):
        assert_close(a, e, TOLERANCES[torch.float32], f"gradient of part {index}")
