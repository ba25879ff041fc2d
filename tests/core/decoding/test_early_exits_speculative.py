"""Self-speculative decoding: the same text as plain decoding, the same distribution as plain sampling."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braidlm.core.decoding import early_exits
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.early_exits import SpeculativeDecoder, decode_speculatively, settle
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import VOCABULARY, random_ids, tiny_config, tiny_model

DEEP: dict[str, Any] = {"stages": [{"block": {"layers": 6}}], "context": 128}
MIXED: dict[str, Any] = {
    "stages": ["block", {"parallel": {"paths": 2, "layers": 2, "join": {"kind": "routed", "top_k": 1}}}, "block"],
    "context": 128,
}
WINDOWED: dict[str, Any] = {**DEEP, "block": {"attention": {"heads": 4, "window": 3}}, "positions": "learned"}
NARROW: dict[str, Any] = {
    "stages": ["block", {"project": {"to": 8}}, "block", {"project": {"to": 16}}, "block"],
    "context": 128,
}
SHAPES = {"deep": DEEP, "mixed": MIXED, "windowed": WINDOWED, "narrow": NARROW}
MODELS = {name: tiny_model(**shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def counter() -> BraidForCausalLM:
    """A model that has learned to count, with a loss after its second layer too: drafts are mostly right."""
    torch.manual_seed(1)
    model = BraidForCausalLM(tiny_config(stages=[{"block": {"layers": 5}}], context=128)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        first = torch.randint(VOCABULARY, (16, 1), generator=generator)
        ids = (first + torch.arange(12)) % VOCABULARY
        loss = model.text_loss(ids[:, :-1], ids[:, 1:])
        model.config.num_hidden_layers = 2
        loss = loss + model.text_loss(ids[:, :-1], ids[:, 1:])
        model.config.num_hidden_layers = 5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def prompts_of(seed: int, texts: int = 1) -> list[list[int]]:
    return [random_ids(1, 2 + (seed + row) % 6, seed=100 * seed + row)[0].tolist() for row in range(texts)]


def plain(
    model: BraidForCausalLM, prompts: list[list[int]], new: int, length: int = 100, eos: int | None = None
) -> Any:
    decoder = Decoder(model, len(prompts), length, graph=False)
    return [tokens for tokens, _ in decode_tokens(decoder, prompts, new, Sampling(0), eos)]


def drafted(decoder: SpeculativeDecoder, prompts: list[list[int]], new: int, eos: int | None = None) -> Any:
    return [tokens for tokens, _ in decode_speculatively(decoder, prompts, new, Sampling(0), eos)]


def test_100_prompts_of_a_trained_model(counter: BraidForCausalLM) -> None:
    decoder = SpeculativeDecoder(counter, 4, 100, 2, 4)
    for seed in range(25):
        prompts = prompts_of(seed, texts=4)
        assert drafted(decoder, prompts, 10) == plain(counter, prompts, 10), prompts
    share = decoder.accepted_share
    assert share is not None
    assert share > 0.7, "the first layers draft well, or this test would show little"


@pytest.mark.parametrize("shape", SHAPES)
def test_100_prompts_of_a_random_model(shape: str) -> None:
    model = MODELS[shape]
    for seed in range(10):  # 25 prompts of each shape
        prompts, layer, drafts = prompts_of(seed, texts=1 + seed % 4), 1 + seed % 2, 1 + seed % 5
        decoder = SpeculativeDecoder(model, len(prompts), 100, 1 if shape == "narrow" else layer, drafts)
        assert drafted(decoder, prompts, 16, eos=3) == plain(model, prompts, 16, eos=3), (prompts, layer, drafts)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 14),
    st.integers(7, 16),
    st.none() | st.integers(0, VOCABULARY - 1),
)
def test_ends_and_limits_are_those_of_plain_decoding(
    prompts: list[list[int]], layer: int, drafts: int, new: int, length: int, eos: int | None
) -> None:
    decoder = SpeculativeDecoder(MODELS["deep"], len(prompts), length, layer, drafts)
    assert drafted(decoder, prompts, new, eos) == plain(MODELS["deep"], prompts, new, length, eos)


def test_both_ways_round_less_apart_than_a_near_tie(counter: BraidForCausalLM) -> None:
    """What `ROUNDING` promises."""
    for model in (*MODELS.values(), counter):
        prompts = prompts_of(3, texts=2)
        decoder = SpeculativeDecoder(model, 2, 100, 1, 5)
        one = list(decode_tokens(Decoder(model, 2, 100), prompts, 40, Sampling(0)))
        other = list(decode_speculatively(decoder, prompts, 40, Sampling(0)))
        for (_, expected), (_, got) in zip(one, other, strict=True):
            unit = torch.finfo(torch.float32).eps * expected.abs().amax(-1, keepdim=True)
            assert float(((got - expected).abs() / unit).max()) < early_exits.ROUNDING / 2


def test_a_near_tie_is_decoded_again_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token in doubt, the logits are bit for bit those of plain decoding."""
    monkeypatch.setattr(early_exits, "ROUNDING", 1e30)
    model, prompts = MODELS["deep"], prompts_of(5, texts=2)
    decoder = SpeculativeDecoder(model, 2, 60, 2, 3)
    expected = list(decode_tokens(Decoder(model, 2, 60, graph=False), prompts, 12, Sampling(0)))
    got = list(decode_speculatively(decoder, prompts, 12, Sampling(0)))
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(got, expected, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_an_accepted_or_replaced_draft_has_the_wanted_distribution(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted, drafted = (2 * torch.randn(6, generator=generator) for _ in range(2))
    sampling, draws = Sampling(0.9, top_k=5), 40_000
    drafts = sampling.choose(drafted.expand(draws, 6), generator)
    tokens, accepted = settle(sampling, wanted.expand(draws, 6), drafts, drafted.expand(draws, 6), generator)
    expected, proposed = (sampling.probabilities(logits[None])[0] for logits in (wanted, drafted))
    frequency = torch.bincount(tokens, minlength=6) / draws
    assert (frequency - expected).abs().max() < 4 * 0.5 / math.sqrt(draws)
    overlap = torch.minimum(expected, proposed).sum()
    assert accepted.double().mean().item() == pytest.approx(overlap.item(), abs=4 * 0.5 / math.sqrt(draws))


def test_sampled_texts_have_the_models_distribution(counter: BraidForCausalLM) -> None:
    """Of whole continuations, several texts at once: their frequencies against the product of probabilities."""
    sampling, rows, new = Sampling(1.5, top_k=2, seed=1), 400, 3
    prompt = [1, 2]
    decoder = SpeculativeDecoder(counter, rows, 10, 2, 2)
    texts = torch.tensor([t for t, _ in decode_speculatively(decoder, [prompt] * rows, new, sampling)]).T.tolist()
    counts = {text: texts.count(list(text)) / rows for text in {tuple(text) for text in texts}}
    assert sum(_probability(counter, sampling, prompt, text) for text in counts) > 0.95
    for text, frequency in counts.items():
        chance = _probability(counter, sampling, prompt, text)
        assert abs(frequency - chance) < 4 * math.sqrt(chance * (1 - chance) / rows) + 1e-3, text


def _probability(model: BraidForCausalLM, sampling: Sampling, prompt: list[int], text: tuple[int, ...]) -> float:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    chances = sampling.probabilities(logits)
    return math.prod(float(chances[at, token]) for at, token in enumerate(text))


def test_a_seed_gives_the_same_text(counter: BraidForCausalLM) -> None:
    sampling = Sampling(1.2, seed=4)
    runs = [
        [t for t, _ in decode_speculatively(SpeculativeDecoder(counter, 1, 50, 2, 3), [[1, 2]], 20, sampling)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_tokens_that_are_never_chosen_are_not_chosen(counter: BraidForCausalLM) -> None:
    never = tuple(range(0, VOCABULARY, 2))
    sampling = Sampling(0, never=never)
    expected = [t for t, _ in decode_tokens(Decoder(counter, 1, 50), [[1, 2]], 20, sampling)]
    decoder = SpeculativeDecoder(counter, 1, 50, 2, 3)
    assert [t for t, _ in decode_speculatively(decoder, [[1, 2]], 20, sampling)] == expected
    assert not {token for (token,) in expected} & set(never)


def test_half_precision_runs(counter: BraidForCausalLM) -> None:
    half = tiny_model(torch.bfloat16, **DEEP)
    assert len(drafted(SpeculativeDecoder(half, 1, 50, 2, 3), [[1, 2]], 20)) == 20


def test_logits_that_are_no_numbers_are_told() -> None:
    model = tiny_model(**DEEP)
    with torch.no_grad():
        model.head.weight[3, 0] = torch.nan
    with pytest.raises(BraidError, match="logits are not numbers"):
        drafted(SpeculativeDecoder(model, 1, 50, 2, 3), [[1, 2]], 4)
