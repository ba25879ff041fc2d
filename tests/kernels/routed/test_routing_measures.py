"""Means of choices by one kernel, and routing losses on the side stream, against the plain losses."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.routed.routing_measures import OF_MEANS, evaluate_means, routing_loss_on_side
from braidlm.kernels.side_stream import use_side_stream
from braidlm.model.routing.losses import evaluate_each, routing_loss, switch
from braidlm.model.routing.routing import Routing
from tests.kernels.comparison import side_stream

ROUTERS, BATCH, TIME = 5, 3, 150


def routings(choices: int, top_k: int, device: str, **losses: float) -> tuple[list[Routing], Tensor]:
    """Routings of one shape, and the scores that they come from; some picks have a weight of 0."""
    scores = torch.randn(ROUTERS, BATCH, TIME, choices, device=device, requires_grad=True)
    probabilities = scores.softmax(-1)
    weights, chosen = probabilities.topk(top_k)
    weights = torch.where(torch.rand_like(weights) < 0.2, 0.0, weights)
    names = tuple(map(str, range(choices)))
    parts = zip(probabilities, chosen, weights, scores, strict=True)
    return [Routing(str(i), names, p, c, w, losses, s) for i, (p, c, w, s) in enumerate(parts)], scores


@pytest.mark.parametrize(("choices", "top_k"), [(3, 1), (4, 2), (9, 9), (40, 4)])
@pytest.mark.parametrize("measure", OF_MEANS, ids=lambda measure: measure.__name__)
def test_measures_of_means_equal_plain_measures(measure, choices: int, top_k: int, device: str) -> None:  # type: ignore[no-untyped-def]
    alike, scores = routings(choices, top_k, device)
    alike = [replace(routing, weights_BTK=routing.weights_BTK.detach()) for routing in alike]
    real = torch.rand(BATCH, TIME, device=device) < 0.7
    actual = evaluate_means(measure, alike, real)
    expected = torch.stack([measure(routing, real) for routing in alike])
    torch.testing.assert_close(actual, expected)
    if measure is switch:
        upstream = torch.randn(ROUTERS, device=device)
        ours, theirs = (torch.autograd.grad(x, scores, upstream, retain_graph=True) for x in (actual, expected))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("count", [None, 500.0])
def test_routing_losses_on_the_side_stream_equal_autograd(count: float | None, device: str) -> None:
    alike, scores = routings(4, 2, device, switch=0.3, z_loss=0.2, token_entropy_as_coded=0.1)
    real = torch.rand(BATCH, TIME, device=device) < 0.7
    side = side_stream(device)
    with use_side_stream(side):
        actual = routing_loss_on_side(tuple(alike), real, count)
    side.synchronize()
    expected = routing_loss(tuple(alike), real, evaluate_each) * (1.0 if count is None else real.sum() / count)
    torch.testing.assert_close(actual, expected)
    ours, theirs = (torch.autograd.grad(2.5 * x, scores, retain_graph=True) for x in (actual, expected))
    torch.testing.assert_close(ours, theirs)
