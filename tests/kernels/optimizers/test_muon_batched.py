"""Muon for many matrices at once: torch's own for each, however they are grouped."""

from typing import Any

import pytest

pytest.importorskip("hypothesis")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from braidlm.kernels.optimizers.muon import BatchedMuon, in_batches, orthogonalized

SHAPES = ((8, 12), (12, 8), (8, 12), (6, 6), (12, 8), (1, 5))


def parameters(shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(trained: list[nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(trained, parameters([p.shape for p in trained], seed), strict=True):
        parameter.grad = gradient.detach()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("is_tensor", [False, True], ids=["a float rate", "a rate on the device"])
def test_matrices_are_trained_as_torch_does(adjust_lr_fn: str, nesterov: bool, is_tensor: bool) -> None:
    ours, theirs = parameters(), parameters()
    options: Any = {
        "weight_decay": 0.3,
        "momentum": 0.9,
        "nesterov": nesterov,
        "ns_steps": 4,
        "adjust_lr_fn": adjust_lr_fn,
    }
    rate: Any = torch.tensor(0.05) if is_tensor else 0.05
    batched = BatchedMuon(ours, lr=rate, **options)
    single = optim.Muon(theirs, lr=0.05, **options)
    for step in range(6):
        for trained, optimizer in ((ours, batched), (theirs, single)):
            give_gradients(trained, seed=step + 1)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        # Products are rounded to bf16 in both; a product of many matrices may add up in another order.
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
        torch.testing.assert_close(
            batched.state[a]["momentum_buffer"], single.state[b]["momentum_buffer"], atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_each_member_of_a_bank_is_a_matrix_of_its_own(adjust_lr_fn: str) -> None:
    """A bank is [member, inputs, outputs], a single matrix [outputs, inputs]."""
    (bank,) = parameters([(3, 8, 12)])
    members = [nn.Parameter(matrix.T.clone()) for matrix in bank.detach()]
    together, apart = (
        BatchedMuon(params, lr=0.1, adjust_lr_fn=adjust_lr_fn, dtype=torch.float32) for params in ([bank], members)
    )
    for step in range(4):
        give_gradients([bank], seed=step)
        assert bank.grad is not None
        for member, gradient in zip(members, bank.grad, strict=True):
            member.grad = gradient.T.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(bank, torch.stack([member.T for member in members]), atol=1e-5, rtol=1e-5)


def test_members_without_gradient_stay_bit_for_bit() -> None:
    """As those of a bank do into which others were inserted."""
    (bank,) = parameters([(4, 6, 6)])
    before = bank.detach().clone()
    optimizer = BatchedMuon([bank], lr=0.1, weight_decay=0.0)
    for step in range(3):
        give_gradients([bank], seed=step)
        assert bank.grad is not None
        bank.grad[:2] = 0
        optimizer.step()
    assert torch.equal(bank[:2], before[:2])
    assert not torch.isclose(bank[2:], before[2:]).all(dim=(1, 2)).any()


def test_a_parameter_without_gradient_is_left_out() -> None:
    used, unused = parameters([(4, 4), (4, 4)])
    before = unused.detach().clone()
    used.grad = torch.ones(4, 4)
    BatchedMuon([used, unused], lr=0.1).step()
    assert torch.equal(unused, before)


@pytest.mark.parametrize("shape", [(5, 6, 9), (2, 9, 6), (1, 7, 7)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrices, steps=12))
    assert values.min() > 0.6
    assert values.max() < 1.3
    first = torch.linalg.svd(matrices, full_matrices=False)
    aligned = first.U.mT @ orthogonalized(matrices, steps=12) @ first.Vh.mT
    torch.testing.assert_close(aligned, torch.diag_embed(aligned.diagonal(dim1=1, dim2=2)), atol=1e-4, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.one_of(
            st.tuples(st.integers(1, 5), st.integers(1, 5)),
            st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
        ),
        min_size=1,
        max_size=8,
    ),
    adjust_lr_fn=st.sampled_from(["original", "match_rms_adamw"]),
)
def test_grouping_changes_nothing(shapes: list[tuple[int, ...]], adjust_lr_fn: str) -> None:
    together, apart = parameters(shapes), parameters(shapes)
    batches = in_batches(together, adjust_lr_fn)
    assert sorted(map(id, together)) == sorted(id(p) for batch in batches.values() for p in batch)
    joint = BatchedMuon(together, lr=0.1, adjust_lr_fn=adjust_lr_fn, dtype=torch.float32)
    single = [BatchedMuon([p], lr=0.1, adjust_lr_fn=adjust_lr_fn, dtype=torch.float32) for p in apart]
    for step in range(2):
        give_gradients(together, seed=step)
        give_gradients(apart, seed=step)
        for optimizer in (joint, *single):
            optimizer.step()
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_step_reads_its_rate_where_a_graph_would() -> None:
    """The rate is a tensor that is changed in place, and the state keeps its memory."""
    trained = parameters()
    rate = torch.tensor(0.0)
    optimizer = BatchedMuon(trained, lr=rate, weight_decay=0.5)
    give_gradients(trained, seed=1)
    before: list[Tensor] = [p.detach().clone() for p in trained]
    optimizer.step()
    memory = [optimizer.state[p]["momentum_buffer"].data_ptr() for p in trained]
    assert all(torch.equal(a, b) for a, b in zip(trained, before, strict=True))
    rate.fill_(0.1)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(trained, before, strict=True))
    assert memory == [optimizer.state[p]["momentum_buffer"].data_ptr() for p in trained]
