"""Continuous batching: each text is what it would be alone, whatever runs beside it, and every row comes back."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.errors import BraidError
from braidlm.opening.open import open_model
from braidlm.serving.engine import Busy, Engine, Request, Switches
from tests.serving.engines import GREEDY, LIMIT, alone, engine_of, read, save_tiny, texts
from tests.tiny_models import VOCABULARY, random_ids

EOS = VOCABULARY - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder, rows=6) as engine:
        yield engine


def prompt(seed: int) -> tuple[int, ...]:
    return tuple((random_ids(1, 1 + seed * 5 % 11, seed)[0] % EOS).tolist())


def test_many_greedy_texts_are_what_each_is_alone(engine: Engine) -> None:
    requests = [Request(prompt(seed), 3 + seed % 9, GREEDY) for seed in range(40)]
    for request, got in zip(requests, texts(engine, requests), strict=True):
        assert got == alone(engine.model, request.prompt, request.max_tokens, EOS)
    assert (engine.running, engine.waiting, engine.free) == (0, 0, 6)


def test_a_seeded_text_is_the_same_whatever_runs_beside_it(engine: Engine) -> None:
    seeded = Request((1, 2, 3), 15, Sampling(0.9, top_k=20, top_p=0.95, seed=5), ignore_eos=True)
    others = [
        Request(prompt(seed), 2 + seed, Sampling(0.3 + seed / 10, top_p=0.9 if seed % 2 else None, seed=seed))
        for seed in range(12)
    ]
    (first,) = texts(engine, [seeded])
    among = texts(engine, [*others[:7], seeded, *others[7:]])[7]
    assert first == among
    assert len(first) == 15
    assert first != texts(engine, [Request((1, 2, 3), 15, Sampling(0.9, seed=6), ignore_eos=True)])[0]


@pytest.mark.parametrize(
    ("options", "stopped", "count"),
    [
        ({"max_tokens": 4, "ignore_eos": True}, "max_tokens", 4),
        ({"max_tokens": 100, "ignore_eos": True}, "limit", LIMIT - 3 + 1),
    ],
)
def test_a_text_says_why_it_stopped(engine: Engine, options: dict[str, Any], stopped: str, count: int) -> None:
    async def ask() -> None:
        completion = engine.submit(Request((1, 2, 3), sampling=GREEDY, **options))
        assert len(await read(completion)) == count
        assert completion.stopped == stopped

    asyncio.run(ask())


def test_the_end_of_text_is_the_last_token(engine: Engine) -> None:
    async def ask() -> None:
        for seed in range(200):
            completion = engine.submit(Request((1,), 30, Sampling(1.5, seed=seed)))
            ids = [token.id for token in await read(completion)]
            if completion.stopped == "end":
                assert ids.index(EOS) == len(ids) - 1
                return
        pytest.fail("no text ended")

    asyncio.run(ask())


def test_log_probabilities_are_those_of_a_plain_forward(engine: Engine) -> None:
    async def ask() -> None:
        asked = Request((4, 8, 15, 16), 5, GREEDY, top_logprobs=3, prompt_logprobs=True, ignore_eos=True)
        beside = [engine.submit(Request(prompt(seed), 8, GREEDY)) for seed in range(4)]
        completion = engine.submit(asked)
        tokens = await read(completion)
        assert completion.prompt is not None
        together = [*completion.prompt, *tokens]
        ids = [token.id for token in together]
        with torch.no_grad():
            expected = engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert together[0].logprob is None
        for place, token in enumerate(together[1:]):
            assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
            best = expected[place].topk(3)
            assert [one for one, _ in token.top] == best.indices.tolist()
            assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        for other in beside:
            assert all(token.logprob is None and not token.top for token in await read(other))

    asyncio.run(ask())


def test_only_the_prompts_log_probabilities(engine: Engine) -> None:
    async def ask() -> None:
        completion = engine.submit(Request(tuple(range(LIMIT)), 0, GREEDY, prompt_logprobs=True))
        assert await read(completion) == []
        assert completion.prompt is not None
        assert len(completion.prompt) == LIMIT
        assert completion.stopped == "max_tokens"

    asyncio.run(ask())
    assert engine.free == 6


def test_a_cancelled_text_ends_and_others_go_on(engine: Engine) -> None:
    async def ask() -> None:
        one = engine.submit(Request((1, 2), 30, GREEDY, ignore_eos=True))
        other = engine.submit(Request((5, 6, 7), 20, GREEDY, ignore_eos=True))
        async for _ in one.tokens():
            one.cancel()
        assert one.stopped in ("cancelled", "max_tokens")
        assert [token.id for token in await read(other)] == alone(engine.model, (5, 6, 7), 20)

    asyncio.run(ask())
    assert engine.free == 6


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 3), "a prompt is to have tokens"),
        (Request((VOCABULARY,), 3), "a prompt is to have tokens"),
        (Request((1,), 0), "max_tokens"),
        (Request((1,) * LIMIT, 3), "the prompt has 32 tokens, and the model's limit is 32"),
        (Request((1,), 3, switches=Switches(paths=("a",))), "no paths"),
        (Request((1,), 3, switches=Switches(without=("a",))), "no modules"),
        (Request((1,), 3, switches=Switches(gates_off=("layer 1",))), "no gate 'layer 1'"),
        (Request((1,), 3, switches=Switches(members=("a",))), "no member 'a'"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(BraidError, match=message):
        engine.submit(request_)


def test_too_many_requests_are_refused(folder: Path) -> None:
    held, begun = threading.Event(), threading.Event()
    with engine_of(folder, rows=1, waiting=2) as engine:

        async def ask() -> None:
            def hold(model: Any) -> None:
                begun.set()
                held.wait()

            holding = asyncio.ensure_future(engine.call(hold))
            await asyncio.to_thread(begun.wait)
            waiting = [engine.submit(Request((1,), 3, GREEDY)) for _ in range(2)]
            with pytest.raises(Busy, match="2 requests wait already"):
                engine.submit(Request((1,), 3, GREEDY))
            waiting[0].cancel()
            third = engine.submit(Request((2,), 3, GREEDY))
            held.set()
            await holding
            assert await read(waiting[0]) == []
            assert waiting[0].stopped == "cancelled"
            assert len(await read(third)) == 3

        asyncio.run(ask())


def test_work_between_steps_gives_its_result_or_its_error(engine: Engine) -> None:
    async def ask() -> None:
        assert await engine.call(lambda model: model.config.vocab_size) == VOCABULARY
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda model: 1 / 0)

    asyncio.run(ask())


def test_an_error_of_the_model_ends_its_texts_and_not_the_engine(folder: Path) -> None:
    with engine_of(folder, rows=3) as engine:
        head = engine.model.head.forward

        def fail(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("the device is on fire")

        async def ask() -> None:
            engine.model.head.forward = fail
            ended = await asyncio.gather(
                *(read(engine.submit(Request((1, 2), 5))) for _ in range(5)), return_exceptions=True
            )
            assert all("on fire" in str(error) for error in ended)
            engine.model.head.forward = head
            assert len(await read(engine.submit(Request((1, 2), 5, GREEDY)))) == 5

        asyncio.run(ask())
        assert engine.free == 3


def test_logits_that_are_no_numbers_end_one_text_alone(folder: Path) -> None:
    with engine_of(folder, rows=3) as engine, torch.no_grad():
        engine.model.model.embedding.weight[7] = torch.nan
        engine.model.head.weight = torch.nn.Parameter(engine.model.model.embedding.weight.nan_to_num())

        async def ask() -> None:
            others = [engine.submit(Request((1, 2, seed), 12, GREEDY, ignore_eos=True)) for seed in range(2)]
            with pytest.raises(BraidError, match="logits are not numbers"):
                await read(engine.submit(Request((7,), 5, GREEDY)))
            for seed, other in enumerate(others):
                expected = alone(engine.model, (1, 2, seed), 12)
                if 7 not in expected[:-1]:
                    assert [token.id for token in await read(other)] == expected

        asyncio.run(ask())
        assert texts(engine, [Request((3, 4), 6, GREEDY)]) == [alone(engine.model, (3, 4), 6, EOS)]


def test_closing_lets_running_texts_end(folder: Path) -> None:
    with engine_of(folder, rows=1) as engine:

        async def ask() -> None:
            asked = [engine.submit(Request((1, seed), 9, GREEDY, ignore_eos=True)) for seed in range(3)]
            await asyncio.to_thread(engine.close)
            assert [len(await read(one)) for one in asked] == [9, 9, 9]
            with pytest.raises(BraidError, match="about to stop"):
                engine.submit(Request((1,), 3))

        asyncio.run(ask())


def test_closing_without_waiting_cancels(folder: Path) -> None:
    with engine_of(folder, rows=1, length=10_000) as engine:

        async def ask() -> None:
            asked = [engine.submit(Request((1, seed), 9000, GREEDY, ignore_eos=True)) for seed in range(3)]
            await asyncio.to_thread(engine.close, False)
            for one in asked:
                await read(one)
                assert one.stopped == "cancelled"

        asyncio.run(ask())


@pytest.mark.gpu
def test_a_gpu_gives_each_text_what_it_gets_alone(folder: Path) -> None:
    engine = Engine(open_model(folder), "cuda", rows=6, length=LIMIT)
    requests = [Request(prompt(seed), 3 + seed % 9, GREEDY) for seed in range(40)]
    seeded = Request((1, 2, 3), 15, Sampling(0.9, top_k=20, top_p=0.95, seed=5), ignore_eos=True, top_logprobs=2)
    got = texts(engine, [*requests, seeded])
    assert texts(engine, [seeded]) == got[-1:]
    for request, tokens in zip(requests, got[:-1], strict=True):
        assert tokens == alone(engine.model, request.prompt, request.max_tokens, EOS)
    engine.close()
    assert (engine.running, engine.waiting, engine.free) == (0, 0, 6)
