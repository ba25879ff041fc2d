"""The contract of every registered part, tested on a tiny model with it.

The tests run in float64, so that a difference is a mistake and not rounding.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.accounting import cost_of, model_cost, skeleton, stage_table, weights_in
from braidlm.core.models.folders import load_model, save_model
from braidlm.model.compression import untrainable
from braidlm.model.config.registry import PARTS
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.contract.part_variants import HALVES, PLACES, UNEQUAL
from tests.tiny_models import VOCABULARY, random_ids, tiny_config, tiny_model

STACKED_EXPERTS = {"stacked": "with_experts", "feed": {"experts": {"names": 3, "shared": 8}}}
OPTIONS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("stage", "block"): [{}, {"layers": 3}],
    ("stage", "mixture_of_depths"): [
        {},
        {"layers": 4, "capacity": 0.25, "share": {"kind": "blocks", "lora": 2}},
        {"every": 1, "attention": {"heads": 2, "window": 3}},
        {"attention": "stick_breaking", "feed": {"experts": 3}},
        {"attention": {"experts": 3}, "feed": {"experts": {"names": 3, "shared": 8}}},
        {"attention": {"experts": {"names": 3, "scope": "routed", "router": {"top_k": 1}}}},
        {"attention": {"experts": {"names": 3, "keys": "shared"}}},
    ],
    ("stage", "project"): [
        {"to": 16},
        {"to": 16, "bias": True},
        {"to": 16, "experts": 4},
        {"to": 16, "bias": True, "experts": {"names": ["a", "b", "c"], "kind": "swiglu", "router": {"top_k": 3}}},
        {"to": 16, "experts": {"names": ["a", "b"], "router": {"top_k": 1, "renormalise": False, "norm": "rms"}}},
    ],
    ("stage", "parallel"): [
        {"paths": 3, "layers": 2},
        {"paths": 3, "layers": 2, "stacked": False},
        {"paths": 3, "layers": 2, **STACKED_EXPERTS},
        {
            "paths": 2,
            "layers": 2,
            "stacked": "with_experts",
            "feed": {"experts": {"names": 4, "router": {"compute": "sparse", "balance_rate": 0.01}}},
            "share": {"kind": "feeds", "lora": 2},
        },
        {
            "paths": 2,
            "stacked": "with_experts",
            "attention": {"heads": 2, "experts": {"names": 3, "keys": "shared"}},
            "feed": {"experts": 3},
        },
        {"paths": ["a"]},
        {"paths": {"a": {"width": 8}, "b": {"attention": {"heads": 2}}}, "layers": 2},
        {"paths": {"a": {"depth": 3}, "b": {"depth": 1}}, "layers": 2},
        {"paths": {"a": {"width": 8}, "b": {"width": 8}}, "attention": {"heads": 2, "kv_heads": 1, "window": 3}},
        {"paths": 2, "layers": 2, "share": {"kind": "blocks", "lora": 2}},
        {"paths": {"a": {"depth": 3}, "b": {"depth": 2}}, "layers": 2, "share": "feeds"},
        {
            "paths": 3,
            "layers": 2,
            "share": {"kind": "attentions", "lora": 2},
            "join": {"kind": "routed", "compute": "sparse"},
        },
        {"paths": 3, "layers": 2, "share": {"kind": "feeds", "lora": 2}, "join": {"kind": "routed", "per": "sublayer"}},
    ],
    ("sharing", "feeds"): [{}, {"lora": 2}, {"layers": "interior"}],
    ("sharing", "attentions"): [{}, {"layers": "interior", "lora": 2}],
    ("sharing", "blocks"): [{}, {"lora": 2}],
    ("join", "shared_linear"): [{}, {"bias": True}, {"residual": True, "norm": "rms"}],
    ("join", "concat"): [{}, {"norm": "layer"}],
    ("join", "gumbel_v1"): [{}, {"sample": "softmax", "temperature": 0.5}, {"residual": True, "hard": False}],
    ("join", "gumbel_v2"): [{}, {"sample": "softmax"}, {"norm": "rms"}],
    ("join", "routed"): [
        {"compute": "sparse"},
        {"compute": "dense"},
        {"compute": "sparse", "scope": "routed", "top_k": 1},
        {"compute": "dense", "scope": "routed", "top_k": 1},
        {"compute": "sparse", "renormalise": False, "norm": "layer", "noise": 0.1, "residual": True, "top_k": 1},
        {"compute": "sparse", "per": "sublayer", "top_k": 1, "balance_rate": 0.01},
        {"compute": "sparse", "per": "sublayer", "scope": "routed", "top_k": 1, "renormalise": False},
        {"compute": "dense", "per": "sublayer", "scope": "routed"},
        {"compute": "measured", "losses": {"switch": 0.2, "z_loss": 0.1}, "balance_rate": 0.01, "bias": False},
    ],
    ("attention", "stick_breaking"): [
        {},
        {"current": False},
        {"rest": "current", "window": 3},
        {"current": False, "rest": "current", "experts": {"names": 3, "keys": "shared"}},
    ],
    ("attention", "softmax"): [
        {"kv_heads": 4},
        {"kv_heads": 2},
        {"kv_heads": 1},
        {"head_dim": 6},
        {"out_projection": False},
        {"window": 3},
        {"window": 1},
        {"bias": True},
        {"bias": True, "out_bias": False},
        {"out_bias": True},
        {"experts": 3, "kv_heads": 2, "window": 3},
        {"experts": {"names": ["a", "b"], "scope": "routed", "router": {"top_k": 1, "compute": "sparse"}}},
    ],
    ("feed-forward", "mlp"): [
        {"hidden": 8, "bias": True, "experts": {"names": 4, "shared": 12}},
        {"activation": "gelu", "hidden": 24},
        {"activation": "gelu_new", "hidden": 24, "bias": True},
        {"activation": "relu", "hidden": 24},
    ],
    ("feed-forward", "swiglu"): [{}, {"hidden": 24, "bias": True}, {"hidden": 24, "learned_beta": True}],
    ("feed-forward", "geglu"): [{"hidden": 24}, {"hidden": 24, "bias": True}],
    ("norm", "layer"): [{}, {"bias": False}],
    ("norm", "per_path"): [{"paths": [UNEQUAL[0], {**UNEQUAL[1], "norm": "layer"}]}],
    ("positions", "rope"): [{"pairs": "half"}, {"pairs": "interleaved", "theta": 500.0}],
    ("rope scaling", "linear"): [{"factor": 4.0}],
    ("rope scaling", "llama3"): [{"factor": 4.0, "original_context": 8}],
    ("rope scaling", "yarn"): [{"factor": 4.0, "original_context": 256}],
    ("compression", "low_rank"): [{"ranks": {"stages.*.feed.*": 3, "stages.0.*": 8}}],
    ("compression", "int8"): [
        {"modules": ["stages.*", "embedding", "head"]},
        {"modules": ["*.out", "head", "embedding"], "dynamic": True},
    ],
    ("compression", "int4"): [{"modules": ["stages.*"], "group": 8}],
    ("gate", "matrix"): [{}, {"bias": True}, {"rank": 3}],
    ("head", "linear"): [{}, {"bias": True}],
    ("head", "average"): [{"paths": UNEQUAL}, {"paths": HALVES, "bias": True}],
    ("head", "mixture"): [{"paths": UNEQUAL}, {"paths": UNEQUAL, "per_token": True}],
    ("head", "posterior"): [{"paths": UNEQUAL}, {"paths": UNEQUAL, "window": 3}, {"paths": UNEQUAL, "settle": 3}],
    ("embedding", "bytes"): [{"width": 8, "piece": 5}, {"width": 8, "piece": 2}, {"width": 8, "layers": 0}],
    ("head", "bytes_parallel"): [{"width": 8, "piece": 5}, {"width": 8, "piece": 2}, {"width": 8, "layers": 0}],
    ("head", "bytes_autoregressive"): [{"width": 8, "piece": 5}, {"width": 8, "piece": 2}, {"width": 8, "layers": 0}],
}
"""Options that are tested too; other parts are tested with their defaults."""

WHOLE: dict[str, dict[str, Any]] = {
    "untied": {"tie_embeddings": False},
    "dropout": {"dropout": 0.2},
    "dropped layers": {"dropout": {"layer": 0.05}, "stages": [{"block": {"layers": 3}}]},
    "gates around all kinds of layers": {
        "stages": [
            {"block": {"layers": 2, "share": "blocks"}},
            {"parallel": {"paths": 2, "layers": 2, "join": "routed"}},
            {"mixture_of_depths": {"feed": {"experts": 3}}},
        ],
        "gates": {"kind": {"kind": "matrix", "rank": 3, "bias": True}, "layers": [1, 2, 4, 6]},
    },
    "averaged": {
        "width": 24,
        "stages": [{"parallel": {"paths": {"b": {"width": 16}, "a": {"width": 8}}, "layers": 2, "join": "concat"}}],
        "norm": {"kind": "per_path", "paths": [{"name": "b", "width": 16}, {"name": "a", "width": 8}]},
        "head": {"kind": "average", "paths": [{"name": "b", "width": 16}, {"name": "a", "width": 8}]},
    },
    "averaged with experts": {
        "width": 16,
        "stages": [{"parallel": {"paths": ["b", "a"], "join": "concat", **STACKED_EXPERTS}}],
        "norm": {"kind": "per_path", "paths": HALVES},
        "head": {"kind": "average", "paths": HALVES},
    },
    "tied bytes": {"embedding": {"kind": "bytes", "width": 8}, "head": {"kind": "bytes_parallel", "width": 8}},
    "mixed stages": {
        "stages": [
            {"block": {"attention": {"window": 2, "kv_heads": 2}}},
            {"block": {"attention": {"heads": 2, "kv_heads": 1}, "feed": {"kind": "mlp", "hidden": 20}}},
        ]
    },
}
"""Variants of a whole model."""


def variants() -> dict[str, dict[str, Any]]:
    architectures = dict(WHOLE)
    for noun, registry in PARTS.items():
        for kind in registry:
            for options in OPTIONS.get((noun, kind), [{}]):
                label = " ".join([noun, kind, *(f"{k}={v}" for k, v in options.items())])
                architectures[label] = PLACES[noun]({"kind": kind, **options})
    return architectures


VARIANTS = variants() if set(PLACES) >= set(PARTS) else {}
OF_TRAINING = ("initialisation ", "routing loss ")
IN_USE = [name for name in VARIANTS if not name.startswith(OF_TRAINING)]
"""Without parts of which only training and folders know: once weights are random, a model in use is the same."""
TOLERANCE = {"rtol": 0.0, "atol": 1e-9}
ROWS = [random_ids(1, length, seed=length)[0] for length in (9, 5, 1, 7)]


@pytest.fixture(scope="module", params=IN_USE)
def pristine(request: pytest.FixtureRequest) -> BraidForCausalLM:
    """For tests that change nothing in it."""
    return tiny_model(torch.float64, **VARIANTS[request.param])


@pytest.fixture(scope="module")
def alone(pristine: BraidForCausalLM) -> list[Tensor]:
    """The logits of each of the rows."""
    return [logits(pristine, row[None])[0] for row in ROWS]


@pytest.fixture(scope="module", params=VARIANTS)
def original(request: pytest.FixtureRequest) -> BraidForCausalLM:
    return tiny_model(torch.float64, **VARIANTS[request.param])


@pytest.fixture
def model(original: BraidForCausalLM) -> BraidForCausalLM:
    """A copy for tests that change it."""
    return copy.deepcopy(original)


@pytest.fixture
def trained(model: BraidForCausalLM) -> BraidForCausalLM:
    """The same for tests that train it; whole numbers cannot be trained."""
    if untrainable(model.config.decoded.compression):
        pytest.skip("a quantised model refuses to be trained")
    return model


def logits(model: BraidForCausalLM, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **TOLERANCE)


def padded(rows: list[Tensor], left: bool, time: int = 9) -> tuple[Tensor, Tensor]:
    """Rows of different lengths with random tokens as padding, and the mask."""
    ids, mask = random_ids(len(rows), time, seed=99), torch.zeros(len(rows), time, dtype=torch.long)
    for i, row in enumerate(rows):
        real = slice(time - len(row), None) if left else slice(len(row))
        ids[i, real], mask[i, real] = row, 1
    return ids, mask


def test_every_kind_of_part_is_tested_here() -> None:
    assert set(PLACES) == set(PARTS), "say in PLACES where a part of the new kind is in an architecture"
    named = {(noun, kind) for noun, registry in PARTS.items() for kind in registry}
    assert set(OPTIONS) <= named, "OPTIONS names a part that is not registered"


def test_a_cache_gives_the_full_forward(pristine: BraidForCausalLM) -> None:
    ids = random_ids(3, 9)
    cache, got = DynamicCache(), []
    for piece in ids.split([1, 3, 1, 4], dim=1):
        with torch.no_grad():
            got.append(pristine(piece, past_key_values=cache, use_cache=True).logits)
    close(torch.cat(got, dim=1), logits(pristine, ids))


def test_a_cache_with_left_padding_gives_the_full_forward(pristine: BraidForCausalLM) -> None:
    ids, mask = padded(ROWS, left=True)
    cache, got, done = DynamicCache(), [], 0
    for piece in ids.split([4, 3, 1, 1], dim=1):
        done += piece.shape[1]
        with torch.no_grad():
            got.append(pristine(piece, attention_mask=mask[:, :done], past_key_values=cache).logits)
    real = mask.bool()
    close(torch.cat(got, dim=1)[real], logits(pristine, ids, mask)[real])


class FixedSteps(Decoder):
    """A decoder that runs the steps of a CUDA graph without one."""

    def _replay(self, ids: Tensor) -> Tensor:
        self.graph_token.copy_(ids)
        self.cache.replaying = True
        logits = self._fixed_step()
        self.cache.replaying = False
        self.cache.advance(1)
        return logits


@pytest.mark.parametrize(("kind", "graph"), [(Decoder, False), (FixedSteps, True)], ids=["eager", "replayed"])
def test_our_decoder_gives_the_full_forward(pristine: BraidForCausalLM, kind: type[Decoder], graph: bool) -> None:
    prompts = [row[: len(row) // 2 + 1] for row in ROWS]
    decoder = kind(pristine, len(ROWS), 12, graph=graph)
    for seed in (1, 2):  # the second use must not see old keys
        chosen = random_ids(len(ROWS), 4, seed)
        got = [decoder.prefill(*padded(prompts, left=True, time=5))]
        got += [decoder.step(tokens).clone() for tokens in chosen.T]
        whole = logits(pristine, *padded([torch.cat(both) for both in zip(prompts, chosen, strict=True)], left=True))
        close(torch.stack(got, dim=1), whole[:, -5:])


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_changes_nothing(pristine: BraidForCausalLM, alone: list[Tensor], left: bool) -> None:
    ids, mask = padded(ROWS, left)
    got = logits(pristine, ids, mask)
    for i, expected in enumerate(alone):
        close(got[i][mask[i].bool()], expected)


def test_a_batch_equals_its_rows_and_is_the_same_every_time(pristine: BraidForCausalLM) -> None:
    ids = random_ids(3, 8)
    together = logits(pristine, ids)
    close(together, torch.cat([logits(pristine, row[None]) for row in ids]))
    assert torch.equal(logits(pristine, ids), together)


def test_gradients_reach_every_parameter(trained: BraidForCausalLM) -> None:
    model = trained.train()
    ids = random_ids(4, 12)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_row_of_padding_alone_is_finite_and_harms_no_other(model: BraidForCausalLM) -> None:
    ids = random_ids(3, 6)
    mask = torch.ones_like(ids)
    mask[1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    assert output.logits.isfinite().all()
    close(output.logits[[0, 2]].detach(), logits(model, ids[[0, 2]]))
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_saved_folder_loads_bit_equal(model: BraidForCausalLM, tmp_path: Any) -> None:
    model = model.float()
    ids = random_ids(2, 8)
    ours, expected = model.state_dict(), logits(model, ids)
    folder = save_model(model, tmp_path / "m", None, {"made_by": "a test"})
    for opened in (load_model, BraidForCausalLM.from_pretrained):
        loaded = opened(folder)
        assert loaded.config.architecture == model.config.architecture
        theirs = loaded.state_dict()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert torch.equal(logits(loaded, ids), expected)


def test_activation_checkpointing_changes_neither_loss_nor_gradients(trained: BraidForCausalLM) -> None:
    model = trained
    ids, results = random_ids(3, 10), []
    for on in (False, True):
        model.train().zero_grad()
        model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing == on
        torch.manual_seed(5)  # dropout, where there is any, must be the same the second time
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        close(plain, checkpointed)


def test_generate_and_our_decoder_agree(pristine: BraidForCausalLM) -> None:
    ids, mask = padded(ROWS, left=True)
    theirs = pristine.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    decoder = Decoder(pristine, len(ROWS), 32)
    prompts = [row.tolist() for row in ROWS]
    ours = [tokens for tokens, _ in decode_tokens(decoder, prompts, 5, Sampling(temperature=0))]
    assert torch.tensor(ours).T.tolist() == theirs[:, 9:].tolist()


def test_a_later_token_changes_nothing_before_it(pristine: BraidForCausalLM) -> None:
    """One row for each position at which a token is changed, and the last as it was."""
    ids = random_ids(1, 9).repeat(10, 1)
    ids[range(9), range(9)] = (ids[0] + 1) % VOCABULARY
    *changed, before = logits(pristine, ids)
    for position, after in enumerate(changed):
        close(after[:position], before[:position])
        assert not torch.allclose(after[position], before[position])


def test_cost_equals_the_sum_over_parameters_and_stages(pristine: BraidForCausalLM) -> None:
    cost = model_cost(pristine, 16)
    weights = {p: weights_in(m, n, p) for m in pristine.modules() for n, p in m.named_parameters(recurse=False)}
    assert cost.parameters == sum(weights.values())
    assert 0 < cost.active_parameters <= cost.parameters
    assert cost.flops_per_token > cost_of(pristine.head, 16).flops_per_token > 0
    assert model_cost(skeleton(pristine.config), 16) == cost
    rows = stage_table(pristine, 16)
    for fact, total in vars(cost).items():
        assert sum(row[fact] for row in rows) == total, fact


def test_training_loss_is_the_loss_of_shifted_labels(pristine: BraidForCausalLM) -> None:
    ids = random_ids(2, 9)
    with torch.no_grad():
        close(pristine.text_loss(ids[:, :-1], ids[:, 1:]), pristine(ids, labels=ids).loss)


@pytest.mark.parametrize("name", VARIANTS)
def test_initialisation_is_seeded_and_finite(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(BraidForCausalLM(tiny_config(**VARIANTS[name])).state_dict())
    for key, value in states[0].items():
        assert value.isfinite().all(), key
        assert torch.equal(value, states[1][key]), key
