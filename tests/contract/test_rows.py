"""Texts that share a cache, each at a position of its own: the tokens of each are those that it gets alone."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.rows import BraidRows, Row, RowDecoder
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.compat.tiny_folders import TINY
from tests.contract.test_parts import IN_USE, VARIANTS
from tests.tiny_models import VOCABULARY, random_ids, randomised, tiny_model

LENGTH = 24
MODELS = [*(f"tiny/{name}" for name in TINY), *IN_USE]


@cache
def model_of(name: str) -> BraidForCausalLM:
    if name in VARIANTS:
        return tiny_model(torch.float64, **VARIANTS[name])
    config = BraidConfig(TINY[name.removeprefix("tiny/")].architecture, VOCABULARY)
    return randomised(BraidForCausalLM(config)).double().eval()  # type: ignore[no-any-return]


@cache
@torch.no_grad()
def alone(name: str, prompt: tuple[int, ...], got: tuple[int, ...]) -> tuple[int, ...]:
    """The most probable token after a prompt and after each of its tokens, by a pass over the text alone."""
    logits = model_of(name)(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    return tuple(logits.argmax(-1).tolist())


def prompt_of(seed: int) -> tuple[int, ...]:
    return tuple(random_ids(1, 1 + seed * 5 % 11, seed)[0].tolist())


class Driver:
    """Continues texts greedily, and keeps what each has got."""

    def __init__(self, decoder: RowDecoder):
        self.decoder = decoder
        self.got: dict[Row, list[int]] = {}

    def step(self) -> None:
        if self.decoder.reads:
            self._take(self.decoder.read())
        if self.decoder.running:
            self._take(self.decoder.step())

    def _take(self, step: Any) -> None:
        if step is not None:
            tokens = step.logits.argmax(-1)
            self.decoder.feed(step.rows, tokens)
            for row, token in zip(step.rows, tokens.tolist(), strict=True):
                self.got.setdefault(row, []).append(token)

    def check(self, name: str, row: Row) -> None:
        got = tuple(self.got.get(row, []))
        assert got == alone(name, tuple(row.prompt), got)


class Replayed:
    """A graph that computes again."""

    def __init__(self, step: Callable[[], torch.Tensor]):
        self.compute, self.logits = step, step()

    def replay(self) -> None:
        self.logits.copy_(self.compute())


def pretend_to_capture(step: Callable[[], torch.Tensor]) -> tuple[Replayed, torch.Tensor]:
    graph = Replayed(step)
    return graph, graph.logits


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", MODELS)
def test_each_text_gets_the_tokens_that_it_gets_alone(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.core.decoding.rows.capture", pretend_to_capture)
    driver = Driver(RowDecoder(BraidRows(model_of(name)), 5, LENGTH, graphs))
    rows: list[Row] = []
    for seed in range(9):
        if len(driver.decoder.rows) == 5:
            driver.check(name, rows[0])
            driver.decoder.leave(rows.pop(0 if seed % 2 else 2))
        rows.append(driver.decoder.enter(prompt_of(seed), LENGTH))
        if seed % 3:
            driver.step()
    for _ in range(6):
        driver.step()
    for row in rows:
        assert len(driver.got[row]) >= 6
        driver.check(name, row)
        driver.decoder.leave(row)
    assert not driver.decoder.rows
    assert not driver.decoder.running


@settings(max_examples=40)
@given(
    st.sampled_from([name for name in ("tiny/gpt2", "tiny/llama", "tiny/depths", "tiny/hybrid") if name in MODELS]),
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "step"]), st.integers(0, 20)), max_size=40),
    st.integers(1, 9),
)
def test_texts_may_come_and_go_at_any_time(name: str, events: list[tuple[str, int]], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # prompts are read in several passes, and the cache grows often
        patch.setattr("braidlm.core.decoding.rows.PROMPT_TOKENS", {"cpu": at_once})
        patch.setattr("braidlm.core.decoding.rows.FIRST_LENGTH", 2)
        patch.setattr("braidlm.core.decoding.rows.FIRST_ROWS", 1)
        driver, rows = Driver(RowDecoder(BraidRows(model_of(name)), 6, LENGTH)), []
        for what, number in events:
            if what == "enter" and len(rows) < 6:
                rows.append(driver.decoder.enter(prompt_of(number), len(prompt_of(number)) + 12))
            elif what == "leave" and rows:
                driver.decoder.leave(rows.pop(number % len(rows)))
            elif all(len(driver.got.get(row, [])) < 12 for row in rows):
                driver.step()
            assert sorted(row.index for row in rows) == list(range(len(rows)))
            assert all(driver.decoder.rows[row.index] is row for row in rows)
        for row in driver.got:
            driver.check(name, row)


def test_a_text_leaves_nothing_behind_for_the_next() -> None:
    model = tiny_model()
    decoder = RowDecoder(BraidRows(model), 1, LENGTH)
    driver = Driver(decoder)
    row = decoder.enter([1, 2, 3], LENGTH)
    driver.step()
    with torch.inference_mode():
        for stored in (*decoder.cache.keys, *decoder.cache.values):
            stored.fill_(torch.nan)
    decoder.leave(row)
    row = decoder.enter([4, 5], LENGTH)
    for _ in range(5):
        driver.step()
    steps = decode_tokens(Decoder(model, 1, LENGTH), [[4, 5]], 6, Sampling(0))
    assert driver.got[row] == [tokens[0] for tokens, _ in steps]


GPU = ["tiny/gpt2", "tiny/hybrid", "tiny/moep", "tiny/paths", "head posterior paths=", "attention stick_breaking"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(tuple(GPU))])
def test_replayed_graphs_give_what_each_text_gets_alone(name: str) -> None:
    model = deepcopy(model_of(name)).float().cuda()
    decoder = RowDecoder(BraidRows(model), 5, LENGTH)
    driver, rows = Driver(decoder), []
    for seed in range(12):
        if len(rows) == 5:
            decoder.leave(rows.pop(seed % 5))
        rows.append(decoder.enter(prompt_of(seed), LENGTH))
        driver.step()
    assert decoder.graphs
    for row, got in driver.got.items():
        steps = decode_tokens(Decoder(model, 1, LENGTH, graph=False), [list(row.prompt)], len(got), Sampling(0))
        assert got == [tokens[0] for tokens, _ in steps]
