"""Clipped AdamW in one pass against torch's own: run as a script in Triton's interpreter, or called on a device."""

import torch
from torch import Tensor, nn, optim

from braidlm.kernels.adamw import ClippedAdamW


def made(device: str, inner: int) -> tuple[nn.Module, optim.AdamW]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, inner), nn.Tanh(), nn.Linear(inner, 8)).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    for group, rate in zip(groups, (0.01, 0.02), strict=True):
        group["lr"] = torch.tensor(rate, device=device)
    return model, optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def by_torch(model: nn.Module, optimizer: optim.AdamW, clip: float | None) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
    optimizer.step()
    return norm


def check(device: str) -> None:
    for inner in (132, 37):  # the second is not aligned to four numbers
        (ours, our_optimizer), (theirs, their_optimizer) = made(device, inner), made(device, inner)
        clipped = ClippedAdamW(our_optimizer)
        inputs = torch.randn(16, 40, device=device)
        assert not clipped.ready, "torch has made no state yet"
        for step in range(12):
            clip = None if step % 3 == 0 else 1.0
            for model in (ours, theirs):
                model.zero_grad()
                model(inputs).square().sum().backward()
            assert clipped.ready == (step > 0)
            found = clipped.step(clip) if clipped.ready else by_torch(ours, our_optimizer, clip)
            torch.testing.assert_close(found, by_torch(theirs, their_optimizer, clip), rtol=1e-4, atol=0.0)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
            for name, value in their_optimizer.state[b].items():
                torch.testing.assert_close(our_optimizer.state[a][name], value, atol=1e-6, rtol=1e-4)


if __name__ == "__main__":
    check("cpu")
    print("equal")
