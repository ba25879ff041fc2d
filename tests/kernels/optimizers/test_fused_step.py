"""Clipped AdamW in two passes against torch's AdamW after torch's clipping."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor, nn, optim

from braidlm.kernels.optimizers.fused_step import FusedStep


def model_and_optimizer(device: str, inner: int) -> tuple[nn.Module, optim.AdamW]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, inner), nn.Tanh(), nn.Linear(inner, 8)).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    for group, rate in zip(groups, (0.01, 0.02), strict=True):
        group["lr"] = torch.tensor(rate, device=device)
    return model, optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def step_by_torch(model: nn.Module, optimizer: optim.AdamW, clip: float | None, factor: float = 1.0) -> Tensor:
    """Clip, multiply the first matrix by its factor, and update."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
    next(model.parameters()).data.mul_(factor)
    optimizer.step()
    return norm


@pytest.mark.parametrize("inner", [132, 37], ids=["aligned", "not aligned to four elements"])
def test_fused_adamw_equals_torch(inner: int, device: str) -> None:
    (ours, our_optimizer), (theirs, their_optimizer) = (model_and_optimizer(device, inner) for _ in range(2))
    fused = FusedStep([our_optimizer])
    inputs = torch.randn(16, 40, device=device)
    assert not fused.ready, "torch has made no state yet"
    for step in range(12):
        clip = None if step % 3 == 0 else 1.0
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        assert fused.ready == (step > 0)
        norm = fused.step(clip) if fused.ready else step_by_torch(ours, our_optimizer, clip)
        torch.testing.assert_close(norm, step_by_torch(theirs, their_optimizer, clip), rtol=1e-4, atol=0.0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
        for name, value in their_optimizer.state[b].items():
            torch.testing.assert_close(our_optimizer.state[a][name], value, atol=1e-6, rtol=1e-4)


def test_a_factor_is_read_in_each_step(device: str) -> None:
    (ours, our_optimizer), (theirs, their_optimizer) = (model_and_optimizer(device, 12) for _ in range(2))
    factor = torch.ones((), device=device)
    fused = FusedStep([our_optimizer], {next(ours.parameters()): factor})
    inputs = torch.randn(16, 40, device=device)
    for step in range(6):
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        factor.fill_(1 - 0.05 * step)
        fused.step(1.0) if fused.ready else step_by_torch(ours, our_optimizer, 1.0, factor.item())
        step_by_torch(theirs, their_optimizer, 1.0, factor.item())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_a_factor_alone_is_exact(device: str) -> None:
    model, optimizer = model_and_optimizer(device, 12)
    weight, factor = next(model.parameters()), torch.tensor(0.97, device=device)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    fused = FusedStep([optimizer], {weight: factor})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fused.step(1.0)
    assert torch.equal(weight, before[0] * factor)
    assert all(torch.equal(a, b) for a, b in zip([*model.parameters()][1:], before[1:], strict=True))
