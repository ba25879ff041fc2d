"""The head whose shares follow Bayes' rule: against a reference, in every kind of pass, and what it promises."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from braidlm.core.decoding.decoder import Decoder
from braidlm.core.decoding.early_exits import EarlyExit
from braidlm.core.models.accounting import cost_of
from braidlm.edits.composing.path_models import posterior_shares
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import use_paths
from tests.tiny_models import random_ids, tiny_model

PATHS = [{"name": "wide", "width": 16}, {"name": "narrow", "width": 8}, {"name": "third", "width": 8}]
RULES = pytest.mark.parametrize("rule", [{}, {"window": 3}, {"settle": 4}], ids=["whole text", "window", "settle"])


def posterior_model(window: int | None = None, settle: int | None = None, **changes: Any) -> BraidForCausalLM:
    """Three paths that stay apart and find the same text differently probable."""
    architecture: dict[str, Any] = {
        "width": 32,
        "stages": [{"parallel": {"layers": 2, "paths": PATHS, "join": "concat"}}],
        "norm": {"kind": "per_path", "paths": PATHS},
        "head": {"kind": "posterior", "paths": PATHS, "window": window, "settle": settle},
    }
    return tiny_model(torch.float64, **(architecture | changes)).eval()


unchanged_model = functools.cache(posterior_model)


def of_each_path(model: BraidForCausalLM, ids: Tensor) -> Tensor:
    """[path, batch, time, vocabulary]: what each path says by itself."""
    alone = []
    for name in model.head.names:
        use_paths(model, [name])
        alone.append(model(ids).logits)
    use_paths(model, None)
    return torch.stack(alone)


def reference(each: Tensor, ids: Tensor, window: int | None = None, settle: int | None = None) -> Tensor:
    return (each + posterior_shares(each, ids, window, settle)[..., None]).logsumexp(0)


def close(own: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(own, other, rtol=0, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(time=st.integers(1, 12), window=st.one_of(st.none(), st.integers(2, 6)), seed=st.integers(0, 99))
def test_shares_follow_the_text(time: int, window: int | None, seed: int) -> None:
    model, ids = unchanged_model(window), random_ids(2, time, seed=seed)
    with torch.no_grad():
        close(model(ids).logits, reference(of_each_path(model, ids), ids, window))


@pytest.mark.parametrize("settle", [None, 3])
def test_gradients_are_those_of_the_reference(settle: int | None) -> None:
    model, ids = posterior_model(settle=settle), random_ids(2, 7)
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    logits = reference(of_each_path(model, ids), ids, settle=settle)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for gradient, wanted in zip(own, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), time=st.integers(2, 20))
def test_a_text_costs_at_most_the_choice_of_a_path_more_than_with_the_best(seed: int, time: int) -> None:
    """Bayes' promise for every text: no path is better by more than the logarithm of their number."""
    model, ids = unchanged_model(), random_ids(1, time, seed=seed)
    with torch.no_grad():
        every = torch.cat([of_each_path(model, ids), model(ids).logits[None]]).log_softmax(-1)
    costs = -every[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(len(every), -1, -1, 1)).sum((1, 2, 3))
    assert costs[-1] <= costs[:-1].min() + math.log(len(PATHS)) + 1e-9


@RULES
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 4], [8, 1]])
def test_with_a_cache_in_any_chunks(chunks: list[int], rule: dict[str, Any]) -> None:
    model, ids = posterior_model(**rule), random_ids(2, 9)
    with torch.no_grad():
        whole, cache, parts = model(ids).logits, None, []
        for chunk in ids.split(chunks, dim=1):
            out = model(chunk, past_key_values=cache, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
    close(torch.cat(parts, dim=1), whole)


@RULES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_says_nothing(side: str, rule: dict[str, Any]) -> None:
    model, ids = posterior_model(**rule), random_ids(2, 9)
    real = torch.ones_like(ids)
    real[0, :4] = 0
    if side == "right":
        ids, real = ids.flip(1), real.flip(1)
    text = ids[0][real[0].bool()]
    with torch.no_grad():
        padded = model(ids, attention_mask=real).logits
        close(padded[0][real[0].bool()], model(text[None]).logits[0])
        close(padded[1], model(ids[1:]).logits[0])


@RULES
def test_texts_that_share_a_beginning(rule: dict[str, Any]) -> None:
    """In a tree of texts every token is judged by its own ancestors."""
    model = posterior_model(**rule)
    first, second, third = random_ids(3, 5).tolist()
    texts = [[*first, *second], [*first, *third], [*first[:2], *third], second]
    found = Scorer(model, dtype=torch.float64).score([Request(tuple(text), 1) for text in texts]).tokens
    wanted = []
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, :-1]
        wanted += logits.log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


@RULES
@torch.inference_mode()
def test_a_step_of_fixed_shapes(rule: dict[str, Any]) -> None:
    """What a GPU replays: the whole storage is read, and the mask hides what is not written yet."""
    model, ids = posterior_model(**rule), random_ids(2, 9)
    decoder = Decoder(model, batch=2, length=12, graph=False)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    decoder.prefill(ids[:, :6], mask[:, :6])
    for at in range(6, 9):
        decoder.graph_token.copy_(ids[:, at : at + 1])
        decoder.cache.replaying = True
        found = decoder._fixed_step()
        decoder.cache.replaying = False
        decoder.cache.advance(1)
        close(found, model(ids[:, : at + 1], attention_mask=mask[:, : at + 1]).logits[:, -1])


def test_beams_take_their_evidence_with_them() -> None:
    model, ids = posterior_model().float(), random_ids(2, 4)
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))


def test_an_inactive_path_has_no_share() -> None:
    model, ids = posterior_model(), random_ids(2, 7)
    with torch.no_grad():
        each = of_each_path(model, ids)
        use_paths(model, ["wide", "third"])
        close(model(ids).logits, reference(each[[0, 2]], ids))


EQUAL = [{"name": "first", "width": 16}, {"name": "second", "width": 16}]
SETTLED: dict[str, dict[str, Any]] = {
    "apart": {},
    "stacked": {"paths": EQUAL},
    "no stack": {"paths": EQUAL, "stacked": False},
    "layers that differ": {"paths": EQUAL, "second": {"feed": "geglu"}},
    "experts in a stack": {"paths": EQUAL, "feed": {"experts": 2}, "stacked": "with_experts"},
    "a window of attention": {"paths": EQUAL, "attention": {"heads": 4, "window": 3}},
}


def settled_model(settle: int = 4, second: dict[str, Any] | None = None, **stage: Any) -> BraidForCausalLM:
    """Two stages of paths that stay apart."""
    paths = stage.setdefault("paths", PATHS)
    parallel = {"layers": 2, "join": "concat", **stage}
    stages = [{"parallel": parallel}, {"parallel": parallel | (second or {})}]
    ends = {"norm": {"kind": "per_path", "paths": paths}}
    return posterior_model(stages=stages, head={"kind": "posterior", "paths": paths, "settle": settle}, **ends)


def passes(model: BraidForCausalLM) -> list[tuple[int, int, frozenset[str] | None]]:
    """Filled with the texts, the length and the paths of every pass of a model through its first stage."""
    seen: list[tuple[int, int, frozenset[str] | None]] = []
    stage = model.model.stages[0]
    plain = stage.forward

    def noted(hidden: Tensor, span: Any) -> Any:
        seen.append((*hidden.shape[:2], span.paths))
        return plain(hidden, span)

    stage.forward = noted
    return seen


@pytest.mark.parametrize("options", SETTLED.values(), ids=SETTLED)
@torch.no_grad()
def test_a_text_goes_on_with_one_path_alone(options: dict[str, Any]) -> None:
    model, ids = settled_model(**options), random_ids(6, 20)
    wanted = reference(of_each_path(model, ids), ids, settle=4)
    seen = passes(model)
    close(model(ids, use_cache=False).logits, wanted)
    close(model(ids[:1], use_cache=False).logits, wanted[:1])
    if "feed" in options:  # routings are those of all paths
        assert seen == [(6, 20, None), (1, 20, None)]
    else:
        first, *alone = seen[:-2]
        assert first == (6, 3, None)
        assert sum(rows for rows, *_ in alone) == 6
        assert {time for _, time, _ in alone} == {20}
        assert all(len(paths or ()) == 1 for *_, paths in alone)
    for other in ({"use_cache": True}, {"attention_mask": torch.ones(6, 20), "output_hidden_states": True}):
        close(model(ids, **other).logits, wanted)


@torch.no_grad()
def test_a_short_text_is_read_whole_by_all() -> None:
    """Of two paths, up to twice its beginning."""
    model = settled_model(paths=EQUAL)
    for time in range(1, 9):
        ids, seen = random_ids(3, time), passes(model)
        close(model(ids, use_cache=False).logits, reference(of_each_path(model, ids), ids, settle=4))
        assert (seen[0][1] == time) == (time <= 6)


@torch.no_grad()
def test_paths_that_meet_before_the_head_are_all_computed() -> None:
    shared = {"stages": [{"parallel": {"layers": 1, "paths": EQUAL}}, {"parallel": {"paths": EQUAL, "join": "concat"}}]}
    ends = {"norm": {"kind": "per_path", "paths": EQUAL}, "head": {"kind": "posterior", "paths": EQUAL, "settle": 4}}
    model, ids = posterior_model(**shared, **ends), random_ids(3, 20)
    seen = passes(model)
    with_cache = model(ids, use_cache=True).logits
    close(model(ids, use_cache=False).logits, with_cache)
    assert seen == [(3, 20, None)] * 2
    assert cost_of(model.model, 20).flops_per_token == cost_of(posterior_model(**shared).model, 20).flops_per_token


@torch.no_grad()
@pytest.mark.parametrize("stacked", [True, False])
def test_what_settles_costs_what_is_counted(stacked: bool) -> None:
    """Products of matrices; torch counts other FLOPs of attention."""
    model, ids = settled_model(paths=EQUAL, stacked=stacked), random_ids(4, 24)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    found = sum(count for kind, count in counts.items() if "attention" not in str(kind)) / ids.numel()
    scores = sum(part.score_flops(24) for part in model.modules() if hasattr(part, "score_flops")) / 2
    scores += sum(part.score_flops(3) for part in model.modules() if hasattr(part, "score_flops")) * 3 / 24
    # The first token is judged too, though by nothing.
    assert found == pytest.approx(cost_of(model, 24).flops_per_token - scores + 2 * model.head.weight.numel() / 24)


def test_what_follows_is_judged_once() -> None:
    what = "nothing is judged after the beginning of a text, where one path goes on alone"
    with pytest.raises(BraidError, match=what):
        posterior_model(window=3, settle=4)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the CPU has no bfloat16
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_keeps_the_differences_of_long_texts(autocast: bool, padding: int) -> None:
    model, ids = posterior_model().float(), random_ids(1, 400)
    padded, real = F.pad(ids, (padding, 0)), F.pad(torch.ones_like(ids), (padding, 0))
    with torch.no_grad():
        exact = model(ids).logits.softmax(-1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            coarse = model.to(torch.float32 if autocast else torch.bfloat16)
            found = coarse(padded, attention_mask=real if padding else None).logits[:, padding:]
    assert (found.float().softmax(-1) - exact).abs().max() < 0.01


@pytest.mark.gpu
@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_a_replayed_graph_gives_what_plain_steps_do(rule: dict[str, Any], dtype: torch.dtype) -> None:
    model = posterior_model(**rule).to(dtype).cuda()
    ids, mask = random_ids(3, 6).cuda(), torch.ones(3, 6).cuda()
    mask[1, :4] = 0
    plain, replayed = Decoder(model, 3, 20, graph=False), Decoder(model, 3, 20, graph=True)
    atol = 1e-4 if dtype == torch.float32 else 0.05
    for seed in (1, 2):  # the graph is captured once and serves the next prompts too
        torch.testing.assert_close(replayed.prefill(ids, mask), plain.prefill(ids, mask), rtol=0, atol=atol)
        for tokens in random_ids(3, 10, seed).cuda().T:
            torch.testing.assert_close(replayed.step(tokens), plain.step(tokens), rtol=0, atol=atol)
        mask.fill_(1.0)
        mask[2, :1] = 0


@pytest.mark.gpu
@RULES
def test_scores_on_a_gpu(rule: dict[str, Any]) -> None:
    """Of texts with shared beginnings and of whole rows, which kernels may compute."""
    model = posterior_model(**rule)
    first, second = random_ids(2, 40).tolist()
    requests = [Request(tuple(text), 1) for text in ([*first, *second], first[:20] + second, second)]
    exact = Scorer(model, dtype=torch.float64).score(requests).tokens
    model.float().cuda()
    for share in (False, True):
        np.testing.assert_allclose(Scorer(model, share=share).score(requests).tokens, exact, rtol=0, atol=1e-3)
        coarse = Scorer(model, dtype=torch.bfloat16, share=share).score(requests).tokens
        np.testing.assert_allclose(coarse, exact, rtol=0, atol=0.1)


@pytest.mark.parametrize("options", [{"layer": 1, "speculate": 3}, {"confidence": 0.5}])
def test_no_token_ends_early(options: dict[str, Any]) -> None:
    with pytest.raises(BraidError, match="weighs its paths by what each has said of every token"):
        EarlyExit(**options).check(posterior_model())


@RULES
def test_drafts_of_transformers_change_no_token(rule: dict[str, Any]) -> None:
    """A draft is judged by the whole model, and its passes have a cache of their own."""
    model, ids = posterior_model(**rule), random_ids(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_early_exit=1, **options), plain)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=2, **options), plain)


@torch.no_grad()
def test_a_pass_that_ends_early_has_a_cache() -> None:
    model, ids = posterior_model(), random_ids(1, 8)
    model.config.num_hidden_layers = 1
    whole = model(ids).logits
    cache = model(ids[:, :5]).past_key_values
    assert (model(ids[:, 5:], past_key_values=cache).logits - whole[:, 5:]).abs().max() < 1e-5


def test_without_the_text_there_is_nothing_to_judge_by() -> None:
    model = posterior_model()
    with pytest.raises(BraidError, match="judges its paths by the text, and only embeddings are given"):
        model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))


def test_its_matrix_is_used_twice() -> None:
    model = posterior_model()
    weights = model.head.weight.numel()
    assert cost_of(model.head, 8).flops_per_token == 2 * 2 * weights
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(random_ids(1, 8))
    assert counter.get_flop_counts()["BraidForCausalLM.head"][torch.ops.aten.mm] == 2 * weights * 8
    assert counter.get_flop_counts()["BraidForCausalLM.model"][torch.ops.aten.mm] >= 2 * weights * 8


def test_it_has_the_weights_of_an_average() -> None:
    """Nothing is learned, so that one may become the other."""
    names = {name.split(".")[0] for name in posterior_model().state_dict()}
    assert names == {"model", "head"}
    assert [name for name, _ in posterior_model().head.named_parameters()] == ["weight"]
