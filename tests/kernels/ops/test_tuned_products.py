"""Products by cuBLASLt's fastest algorithm against float64, and torch's own product elsewhere."""

import pytest
import torch

from braidlm.kernels.ops.tuned_products import _products, tuned_product


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_on_the_device(transposed: bool, biased: bool) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((4096, 512), (512, 1024)))
    bias = torch.randn(1024, device="cuda").bfloat16() if biased else None
    stored = b.t().contiguous() if transposed else b
    expected = a.double() @ b.double() + (0.0 if bias is None else bias.double())
    for _ in range(2):  # the first call tunes
        actual = tuned_product(a, stored, transposed, bias)
        assert ((actual.double() - expected).norm() / expected.norm()) < 4e-3
    assert (4096, 512, 1024, transposed, biased, 0) in _products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elsewhere_it_is_torchs_product(dtype: torch.dtype) -> None:
    a, b, bias = (torch.randn(*shape, dtype=dtype) for shape in ((5, 4), (4, 3), (3,)))
    torch.testing.assert_close(tuned_product(a, b), a @ b)
    actual = tuned_product(a, b.t().contiguous(), transposed=True, bias=bias)
    torch.testing.assert_close(actual, torch.addmm(bias, a, b))
