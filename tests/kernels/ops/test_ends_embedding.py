"""Embeddings of tokens and positions against torch's."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.ops.ends import Embed, plain_embed
from braidlm.kernels.side_stream import DeferredGradient
from tests.kernels.comparison import TOLERANCES, assert_close, assert_equal_with_gradients


@pytest.mark.parametrize(("width", "context"), [(48, 9), (16, 12), (16, None)])
def test_embed_equals_torch(width: int, context: int | None, device: str, dtype: torch.dtype) -> None:
    tokens, ids = torch.randn(11, width, device=device), torch.randint(0, 11, (20, 9), device=device)
    positions = None if context is None else torch.randn(context, width, device=device)
    assert_equal_with_gradients(lambda *x: Embed.apply(*x, dtype, None), plain_embed, [ids, tokens, positions], dtype)


def test_embed_adds_to_a_deferred_gradient(device: str, dtype: torch.dtype) -> None:
    leaf, of_head = torch.randn(11, 16, device=device, requires_grad=True), torch.randn(11, 16, device=device)
    ids, tied = torch.randint(0, 11, (20, 9), device=device), DeferredGradient()
    tied.write(of_head.clone(), None)
    Embed.apply(ids, leaf, None, dtype, tied).sum().backward()
    expected = of_head.double() + torch.bincount(ids.flatten(), minlength=11)[:, None]
    assert_close(leaf.grad, expected, TOLERANCES[dtype], "gradient of a tied matrix")
