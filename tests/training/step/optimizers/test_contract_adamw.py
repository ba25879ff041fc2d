"""AdamW: what is decayed, that it is torch's, and that its rate can be set."""

import pytest
import torch
from torch import nn, optim

from braidlm.model.config.strict import decode
from braidlm.training.step.optimizers.contract import OptimizerConfig, make_adamw, set_learning_rate, split_by_decay
from tests.tiny_models import tiny_model


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny_model(positions="learned", block={"norm": "layer"})
    decayed, free = split_by_decay(model, OptimizerConfig())
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed} | {names[id(p)] for p in free} == set(names.values())
    assert len(decayed) + len(free) == len(names), "a tied matrix is there once"
    assert all(p.ndim >= 2 for p in decayed)
    assert all(p.ndim == 1 for p in free)
    assert any("norm" in names[id(p)] for p in free)
    optimizer = make_adamw(model, OptimizerConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_everything_decays_when_asked() -> None:
    model = tiny_model()
    config = OptimizerConfig(weight_decay=0.3, decay="everything")
    decayed, free = split_by_decay(model, config)
    assert (len(decayed), free) == (len(list(model.parameters())), [])
    assert [group["weight_decay"] for group in make_adamw(model, config).param_groups] == [0.3]


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_model()
    model.model.embedding.weight.requires_grad_(False)
    listed = [p for group in make_adamw(model, OptimizerConfig()).param_groups for p in group["params"]]
    assert not any(p is model.model.embedding.weight for p in listed)


@pytest.mark.parametrize("decay", ["matrices", "everything"])
def test_it_is_torchs_adamw(decay: str) -> None:
    config = decode(
        OptimizerConfig, {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2, "decay": decay}
    )
    ours, theirs = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = [
        {"params": [theirs[0].weight, theirs[2].weight], "weight_decay": 0.2},
        {"params": [theirs[0].bias, theirs[2].bias], "weight_decay": 0.2 if decay == "everything" else 0.0},
    ]
    plain = optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    made = make_adamw(ours, config)
    x = torch.randn(16, 4)
    for step in range(20):
        rate = 0.01 * (step + 1) / 20
        set_learning_rate(made, rate)
        set_learning_rate(plain, rate)
        for model, optimizer in ((ours, made), (theirs, plain)):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tensor", [False, True])
def test_the_rate_is_set_in_every_group(tensor: bool) -> None:
    optimizer = make_adamw(tiny_model(), OptimizerConfig(lr=0.5))
    if tensor:  # as a captured step needs it: the same tensors, changed in place
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.5)
    before = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.25)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
    assert all((a is group["lr"]) == tensor for a, group in zip(before, optimizer.param_groups, strict=True))
