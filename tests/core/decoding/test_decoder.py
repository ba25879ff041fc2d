"""The decoding loop: its ends and limits, and its replay as a graph."""

import pytest
import torch

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.errors import BraidError
from tests.tiny_models import random_ids, tiny_model

PROMPTS = [[3, 1, 4], [1, 5]]


def texts(
    prompts: list[list[int]], new: int, sampling: Sampling, eos_id: int | None = None, length: int = 32
) -> list[list[int | None]]:
    decoder = Decoder(tiny_model(), len(prompts), length)
    return [tokens for tokens, _ in decode_tokens(decoder, prompts, new, sampling, eos_id)]


def test_the_same_seed_gives_the_same_text() -> None:
    first, again, other = (texts(PROMPTS, 12, Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_cut_to_one_token_is_greedy() -> None:
    assert texts(PROMPTS, 8, Sampling(1.7, top_k=1)) == texts(PROMPTS, 8, Sampling(0))


def test_logits_come_with_the_tokens_chosen_from_them() -> None:
    model = tiny_model()
    decoder = Decoder(model, 1, 32)
    row = list(PROMPTS[0])
    for (token,), logits in decode_tokens(decoder, [list(row)], 5, Sampling(0)):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0, -1]
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)
        assert token == int(expected.argmax())
        row.append(token)


def test_a_text_ends_at_eos_and_all_ended_ends_the_work() -> None:
    free = texts(PROMPTS, 12, Sampling(1.0, seed=3))
    columns = list(zip(*free, strict=True))
    eos = next(t for t in columns[0] if t in columns[1] and columns[0].index(t) != columns[1].index(t))
    ended = texts(PROMPTS, 12, Sampling(1.0, seed=3), eos_id=eos)
    ends = [column.index(eos) for column in columns]
    assert len(ended) == max(ends) + 1
    for column, free_column, end in zip(zip(*ended, strict=True), columns, ends, strict=True):
        assert list(column[: end + 1]) == list(free_column[: end + 1])
        assert set(column[end + 1 :]) <= {None}
    assert any(None in step for step in ended)


def test_decoding_stops_at_the_number_asked_for_and_at_the_limit() -> None:
    assert len(texts(PROMPTS, 4, Sampling(0))) == 4
    assert texts(PROMPTS, 0, Sampling(0)) == []
    assert len(texts(PROMPTS, 100, Sampling(0), length=10)) == 10 - 3 + 1


def test_learned_positions_limit_the_decoder() -> None:
    decoder = Decoder(tiny_model(positions="learned", context=8), 1, 100)
    assert decoder.length == 8
    assert len(list(decode_tokens(decoder, [[1, 2, 3]], 50, Sampling(0)))) == 6
    with pytest.raises(BraidError, match="the text has reached the model's limit of 8 tokens"):
        decoder.step(torch.tensor([1]))


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    decoder = Decoder(tiny_model(), 2, 8)
    with pytest.raises(BraidError, match="the prompt has 8 tokens, and the model's limit is 8") as caught:
        decoder.prefill(random_ids(2, 8))
    assert "Shorten the prompt." in str(caught.value)
    with pytest.raises(BraidError, match="a prompt has no tokens"):
        decoder.prefill(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(BraidError, match="a prompt has no tokens"):
        list(decode_tokens(decoder, [[1, 2], []], 3, Sampling(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_replayed_graph_gives_what_plain_steps_do(positions: str, window: int | None) -> None:
    model = tiny_model(positions=positions, block={"attention": {"heads": 4, "kv_heads": 2, "window": window}}).cuda()
    ids, mask = random_ids(3, 6).cuda(), torch.ones(3, 6).cuda()
    mask[1, :4] = 0
    plain, replayed = Decoder(model, 3, 20, graph=False), Decoder(model, 3, 20, graph=True)
    for seed in (1, 2):  # the graph is captured once and serves the next prompts too
        torch.testing.assert_close(replayed.prefill(ids, mask), plain.prefill(ids, mask), rtol=0, atol=1e-4)
        for tokens in random_ids(3, 10, seed).cuda().T:
            torch.testing.assert_close(replayed.step(tokens), plain.step(tokens), rtol=0, atol=1e-4)
        mask.fill_(1.0)
        mask[2, :1] = 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(temperature: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[3, 0] = torch.nan
    with pytest.raises(BraidError, match="logits are not numbers"):
        list(decode_tokens(Decoder(model, 1, 8), [[1, 2]], 4, Sampling(temperature)))
