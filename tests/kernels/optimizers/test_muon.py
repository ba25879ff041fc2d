"""Muon by kernels: torch's clipping and BatchedMuon's step, for matrices and banks of many shapes together."""

from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor, nn, optim

from braidlm.kernels.optimizers.fused_step import FusedStep
from braidlm.kernels.optimizers.muon import BatchedMuon

SHAPES = ((8, 12), (72, 24), (3, 24, 72), (2, 72, 24), (68, 140), (1, 5), (136, 120))
UNALIGNED = ((7, 9), (2, 13, 5))


def parameters(shapes: Any, device: str, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def give_gradients(trained: list[nn.Parameter], seed: int) -> None:
    device = str(trained[0].device)
    for parameter, gradient in zip(trained, parameters([p.shape for p in trained], device, seed), strict=True):
        parameter.grad = gradient.detach()


def muon(trained: list[nn.Parameter], device: str, **options: Any) -> BatchedMuon:
    """Of two groups, the second with its own rate and without decay; products are in float32, to be compared."""
    first, second = trained[::2], trained[1::2]
    groups = [
        {"params": first, "lr": torch.tensor(0.02, device=device), "weight_decay": 0.3},
        {"params": second, "lr": torch.tensor(0.05, device=device), "weight_decay": 0.0},
    ]
    return BatchedMuon(groups, dtype=torch.float32, **options)


def step_by_torch(trained: list[nn.Parameter], optimizers: list[optim.Optimizer], clip: float | None) -> Tensor:
    norm = nn.utils.clip_grad_norm_(trained, float("inf") if clip is None else clip)
    for optimizer in optimizers:
        optimizer.step()
    return norm


@pytest.mark.parametrize("shapes", [SHAPES, UNALIGNED], ids=["aligned", "not aligned to four elements"])
@pytest.mark.parametrize(("nesterov", "adjust_lr_fn"), [(True, "match_rms_adamw"), (False, "original")])
def test_fused_muon_equals_clipping_and_batched_muon(
    shapes: Any, nesterov: bool, adjust_lr_fn: str, device: str
) -> None:
    ours, theirs = parameters(shapes, device), parameters(shapes, device)
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "momentum": 0.9, "ns_steps": 3}
    our_muon, their_muon = (muon(trained, device, **options) for trained in (ours, theirs))
    fused = FusedStep([our_muon])
    for step in range(4):
        clip = None if step % 2 == 0 else 1.0
        for trained in (ours, theirs):
            give_gradients(trained, seed=step + 1)
        assert fused.ready == (step > 0), "the momentum is made in the first step"
        norm = fused.step(clip) if fused.ready else step_by_torch(ours, [our_muon], clip)
        torch.testing.assert_close(norm, step_by_torch(theirs, [their_muon], clip), rtol=1e-5, atol=0.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        momenta = our_muon.state[a]["momentum_buffer"], their_muon.state[b]["momentum_buffer"]
        torch.testing.assert_close(*momenta, atol=1e-6, rtol=1e-5)


def test_muon_and_adamw_are_clipped_together(device: str) -> None:
    shapes = ((24, 16), (16,), (2, 16, 24), (40, 16))
    ours, theirs = parameters(shapes, device), parameters(shapes, device)

    def optimizers(trained: list[nn.Parameter]) -> list[optim.Optimizer]:
        rate = torch.tensor(0.01, device=device)
        adamw = optim.AdamW([trained[1], trained[3]], lr=rate, fused=True)
        return [adamw, BatchedMuon([trained[0], trained[2]], lr=rate, dtype=torch.float32)]

    ours_made, theirs_made = optimizers(ours), optimizers(theirs)
    assert FusedStep.serves(ours_made)
    fused = FusedStep(ours_made)
    for step in range(3):
        for trained in (ours, theirs):
            give_gradients(trained, seed=step)
        norm = fused.step(0.5) if fused.ready else step_by_torch(ours, ours_made, 0.5)
        torch.testing.assert_close(norm, step_by_torch(theirs, theirs_made, 0.5), rtol=1e-5, atol=0.0)
    assert norm > 0.5
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert [ours_made[0].state[ours[i]]["step"].item() for i in (1, 3)] == [3, 3]


def test_members_without_gradient_stay_bit_for_bit(device: str) -> None:
    (bank,) = parameters([(4, 6, 8)], device)
    before = bank.detach().clone()
    optimizer = BatchedMuon([bank], lr=torch.tensor(0.1, device=device), weight_decay=0.0)
    optimizer.dtype = torch.float32
    fused = FusedStep([optimizer])
    for step in range(3):
        give_gradients([bank], seed=step)
        assert bank.grad is not None
        bank.grad[:2] = 0
        fused.step(1.0) if fused.ready else optimizer.step()
    assert torch.equal(bank[:2], before[:2])
    assert not torch.isclose(bank[2:], before[2:]).all(dim=(1, 2)).any()


def test_what_kernels_cannot_read_is_not_ready(device: str) -> None:
    trained = parameters([(4, 8), (8, 4)], device)
    optimizer = muon(trained, device)
    fused = FusedStep([optimizer])
    give_gradients(trained, seed=1)
    optimizer.step()
    assert fused.ready
    trained[0].grad = torch.ones(8, 4, device=device).T
    assert not fused.ready
    trained[0].grad = None
    assert not fused.ready
    assert not FusedStep.serves([optimizer, optim.SGD(trained)])


@pytest.mark.parametrize("with_gradients", [True, False], ids=["", "without gradients"])
def test_factors_are_read_in_each_step(with_gradients: bool, device: str) -> None:
    """Of a matrix and of a bank; where nothing else changes the weights, to the last bit."""
    ours, theirs = parameters(SHAPES, device), parameters(SHAPES, device)
    our_muon, their_muon = (
        BatchedMuon(trained, lr=torch.tensor(0.02, device=device), weight_decay=0.0, dtype=torch.float32)
        for trained in (ours, theirs)
    )
    factor = torch.ones((), device=device)
    fused = FusedStep([our_muon], {ours[0]: factor, ours[2]: factor})
    for step in range(4):
        for trained in (ours, theirs):
            give_gradients(trained, seed=step + 1)
            for parameter in trained:
                parameter.grad = parameter.grad if with_gradients else torch.zeros_like(parameter)
        if fused.ready:
            factor.fill_(1 - 0.1 * step)
            fused.step(None)
            torch._foreach_mul_([theirs[0].data, theirs[2].data], factor)
        else:
            our_muon.step()
        their_muon.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **({"atol": 1e-5, "rtol": 1e-5} if with_gradients else {"atol": 0, "rtol": 0}))
