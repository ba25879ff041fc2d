"""Heads that average: the probabilities, their loss and gradients, learned shares, and what is frozen."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braidlm.model.errors import BraidError
from braidlm.model.heads.losses import IGNORED, next_token_loss
from braidlm.model.modeling_braid import BraidForCausalLM, BraidForSequenceClassification
from braidlm.model.paths.average import AverageHead, MixtureHead, PathPart
from braidlm.model.paths.switches import path_names, use_paths
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model

VOCABULARY = 11
A = {"name": "a", "width": 8}


def architecture(head: str = "average", **options: Any) -> dict[str, Any]:
    """Two paths that stay apart."""
    wide, narrow = {"name": "wide", "width": 16}, {"name": "narrow", "width": 8}
    return {
        "width": 24,
        "stages": [{"parallel": {"layers": 2, "paths": [wide, narrow], "join": "concat"}}],
        "norm": {"kind": "per_path", "paths": [{**wide, "norm": "layer"}, narrow]},
        "head": {"kind": head, "paths": [wide, narrow], **options},
    }


def head_of(widths: list[int], bias: bool = False, kind: type[AverageHead] = AverageHead, **options: Any) -> Any:
    config = kind.Config(paths=[PathPart(f"p{i}", width) for i, width in enumerate(widths)], bias=bias, **options)
    return randomised(kind(config, sum(widths), VOCABULARY)).double()


def stream(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(2, rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def probabilities_of(head: Any, hidden: Tensor) -> list[Tensor]:
    """What each path gives by itself."""
    parts = zip(hidden.split(head.widths, -1), head.weight.split(head.widths, 1), strict=True)
    biases = [0.0] * len(head.names) if head.bias is None else head.bias
    return [(part @ matrix.t() + bias).softmax(-1) for (part, matrix), bias in zip(parts, biases, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    bias=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_probabilities_of_the_active_paths_are_averaged(
    widths: list[int], bias: bool, seed: int, data: st.DataObject
) -> None:
    head, hidden = head_of(widths, bias), stream(3, sum(widths), seed)
    active = data.draw(st.sets(st.integers(0, len(widths) - 1), min_size=1))
    head.use_paths(frozenset(f"p{i}" for i in active))
    found, each = head(hidden), probabilities_of(head, hidden)
    wanted = torch.stack([each[i] for i in sorted(active)]).mean(0)
    torch.testing.assert_close(found, wanted.log(), rtol=0, atol=1e-12)
    rows, tokens = torch.tensor([0, 2, 2]), torch.tensor([3, 0, 10])
    scores = head.log_probabilities(hidden[0], rows, tokens)
    torch.testing.assert_close(scores, wanted[0, rows, tokens].log(), rtol=0, atol=1e-12)


def test_paths_that_are_far_apart_give_finite_numbers() -> None:
    """One path is sure of a token that another finds impossible."""
    head = head_of([1, 1])
    with torch.no_grad():
        head.weight.zero_()[0, 0], head.weight[1, 1] = 1e4, 1e4
    found = head(torch.ones(1, 2, dtype=torch.float64))
    torch.testing.assert_close(found[0, :2], torch.full((2,), math.log(0.5), dtype=torch.float64))
    assert found.isfinite().all()


@pytest.mark.parametrize("count", [None, 9.0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(AverageHead, {}), (AverageHead, {"bias": True}), (MixtureHead, {}), (MixtureHead, {"per_token": True})],
    ids=["average", "bias", "mixture", "router"],
)
def test_the_loss_in_less_memory_is_the_reference(kind: Any, options: dict[str, Any], count: float | None) -> None:
    head, hidden = head_of([4, 2, 3], kind=kind, **options), stream(5, 9).requires_grad_()
    targets = random_ids(2, 5, vocab_size=VOCABULARY)
    targets[0, 2:] = IGNORED
    wanted, results = [hidden, *head.parameters()], []
    for loss in (head.loss(hidden, targets, count), next_token_loss(head(hidden), targets, count)):
        results.append([loss, *torch.autograd.grad(loss, wanted)])
    for own, reference in zip(*results, strict=True):
        # The reference computes in float32.
        torch.testing.assert_close(own, reference.to(own.dtype), rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(head.loss(hidden, targets, count), next_token_loss(head(hidden), targets, count))


def test_each_path_learns_as_much_as_it_explains() -> None:
    """The gradient of a path's logits is that of its own loss, times its share of the averaged probability."""
    head, hidden = head_of([4, 4]), stream(1, 8)[:1].requires_grad_()
    target = torch.tensor([[3]])
    (found,) = torch.autograd.grad(head.loss(hidden, target), hidden)
    each = [p[0, 0, 3] for p in probabilities_of(head, hidden)]
    alone = torch.autograd.grad([-p.log() for p in each], hidden)[0]
    shares = torch.stack(each).detach() / sum(each).detach()
    torch.testing.assert_close(found, alone * shares.repeat_interleave(4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_mixture_begins_as_the_average(per_token: bool) -> None:
    torch.manual_seed(0)
    model = BraidForCausalLM(tiny_config(**architecture("mixture", per_token=per_token))).eval()
    state = {name: value for name, value in model.state_dict().items() if ".mixture." not in name}
    assert len(model.state_dict()) == len(state) + 1 + per_token
    average = BraidForCausalLM(tiny_config(**architecture())).eval()
    average.load_state_dict(state)
    ids = random_ids(2, 7)
    assert torch.equal(model(ids).logits, average(ids).logits)


@pytest.mark.parametrize("per_token", [False, True])
def test_learned_shares_weigh_the_paths(per_token: bool) -> None:
    head = head_of([3, 2], kind=MixtureHead, per_token=per_token)
    hidden, mixture = stream(4, 5), head.mixture
    shares = (mixture.bias + (hidden @ mixture.router.weight.t() if per_token else 0)).softmax(-1)
    first, second = probabilities_of(head, hidden)
    wanted = shares[..., 0, None] * first + shares[..., 1, None] * second
    torch.testing.assert_close(head(hidden), wanted.log(), rtol=0, atol=1e-12)
    head.use_paths(frozenset({"p1"}))
    torch.testing.assert_close(head(hidden), second.log(), rtol=0, atol=1e-12)


def test_switching_reaches_the_head_and_is_undone() -> None:
    model, ids = tiny_model(torch.float64, **architecture()), random_ids(2, 7)
    assert path_names(model) == ("wide", "narrow")
    both, alone = model(ids).logits, []
    for name in path_names(model):
        use_paths(model, [name])
        alone.append(model(ids).logits)
    torch.testing.assert_close(torch.logaddexp(*alone) - math.log(2), both, rtol=0, atol=1e-12)
    use_paths(model, None)
    assert torch.equal(model(ids).logits, both)
    model.config.paths = ["narrow"]
    assert BraidForCausalLM(model.config).head.active == [1]


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        (["paths", "embedding", "head"], {"head.mixture.bias", "head.mixture.router.weight"}),
        (["joins"], None),
        (["head"], None),
    ],
)
def test_what_is_frozen(frozen: list[str], trained: set[str] | None) -> None:
    config = tiny_config(**architecture("mixture", per_token=True), tie_embeddings=False)
    config.frozen = frozen
    model = BraidForCausalLM(config)
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    every = {name for name, _ in model.named_parameters()}
    if trained is None:
        own = {name for name in every if name.startswith("head.mixture.")}
        trained = every - (own if frozen == ["joins"] else {"head.weight"})
    assert free == trained


def test_a_classifier_reads_normalised_paths() -> None:
    config = tiny_config(**architecture())
    config.num_labels = 3
    classifier = randomised(BraidForSequenceClassification(config)).eval()
    hidden = classifier.model(random_ids(2, 5)).last_hidden_state
    wide = (hidden[..., :16] - classifier.model.norm.paths["wide"].bias) / classifier.model.norm.paths["wide"].weight
    torch.testing.assert_close(wide.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-5)
    assert classifier(random_ids(2, 5)).logits.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head": {"kind": "average", "paths": [A]}}, "the paths have 8 = 8 and the stream has 24"),
        ({"head": {"kind": "average", "paths": []}}, "the paths have none = 0 and the stream has 24"),
        ({"head": {"kind": "average", "paths": [A, A, A]}}, "a name is listed twice"),
        (
            {"norm": {"kind": "per_path", "paths": [A, {**A, "name": "b"}]}},
            "the paths have 8 . 8 = 16 and the stream has 24",
        ),
        ({"norm": {"kind": "per_path", "paths": [{"name": "a.b", "width": 24}]}}, "a path's name is made of letters"),
        ({"head": {"kind": "mixture", "paths": [A], "router": True}}, "unknown key 'router'"),
    ],
)
def test_bad_options(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError, match=text):
        tiny_model(**architecture() | changes)
