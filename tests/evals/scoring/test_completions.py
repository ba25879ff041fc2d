"""What a model writes: that of a plain loop, the same whatever runs beside it, ended where it should be."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from braidlm.core.decoding.decoder import Sampling
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.completions import complete, prompt_ids, token_budget
from braidlm.evals.scoring.scorer import Scorer
from tests.tiny_models import randomised, tiny_model

TOKENIZER = bytes_tokenizer()
PROMPTS = ["a", "One day", "def f(x):\n", "The cat sat on", "abc abc", "Q: ?", "xyz", "a longer prompt than others"]


def braid() -> Any:
    return tiny_model(vocab_size=TOKENIZER.vocab_size, context=64)


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return randomised(GPT2LMHeadModel(GPT2Config(vocab_size=TOKENIZER.vocab_size, **sizes))).eval()


def neox() -> Any:
    """One that is not known to take positions."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GPTNeoXConfig(vocab_size=TOKENIZER.vocab_size, intermediate_size=32, max_position_embeddings=64, **sizes)
    return randomised(GPTNeoXForCausalLM(config)).eval()


def evaluated(model: Any) -> EvaluatedModel:
    return EvaluatedModel(Scorer(model), TOKENIZER)


def never(text: str) -> bool:
    return False


@torch.no_grad()
def plain(model: Any, ids: list[int], most: int) -> str:
    """The most probable token again and again, everything computed anew each time."""
    new: list[int] = []
    for _ in range(most):
        token = int(model(input_ids=torch.tensor([ids + new]), use_cache=False).logits[0, -1].argmax())
        if token == TOKENIZER.eos_id:
            break
        new.append(token)
    return TOKENIZER.decode(ids + new, skip_special_tokens=True)[len(TOKENIZER.decode(ids)) :]


@pytest.mark.parametrize("make", [braid, gpt2, neox])
@pytest.mark.parametrize("rows", [1, 3, None])
def test_greedy_is_the_plain_loop(make: Any, rows: int | None) -> None:
    model = make()
    ids = [prompt_ids(TOKENIZER, prompt) for prompt in PROMPTS]
    found = complete(evaluated(model), ids, 12, [never] * len(ids), max_rows=rows)
    assert [completion.text for completion in found] == [plain(model, prompt, 12) for prompt in ids]


@pytest.mark.parametrize("make", [braid, gpt2, neox])
def test_samples_do_not_depend_on_what_runs_beside_them(make: Any) -> None:
    model = evaluated(make())
    ids = [prompt_ids(TOKENIZER, prompt) for prompt in PROMPTS for _ in range(2)]
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=3)
    together, apart, few = (
        complete(model, ids, 10, [never] * len(ids), sampling, max_rows=rows) for rows in (16, 1, 5)
    )
    assert together == apart == few
    texts = [completion.text for completion in together]
    assert texts[0::2] != texts[1::2], "two samples of a prompt differ"
    other = complete(model, ids, 10, [never] * len(ids), Sampling(1.0, top_p=0.95, seed=4))
    assert [completion.text for completion in other] != texts


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    model = braid()
    ids = prompt_ids(TOKENIZER, "a")
    with torch.no_grad():
        chances = (model(input_ids=torch.tensor([ids])).logits[0, -1] / 0.7).softmax(-1)
    count = 3000
    found = complete(evaluated(model), [ids] * count, 1, [never] * count, Sampling(0.7), max_rows=1500)
    first = [completion.text for completion in found]
    likely = [int(token) for token in chances.topk(3).indices if int(token) < 128]
    assert likely
    for token in likely:
        share = first.count(chr(token)) / count
        error = float(chances[token] * (1 - chances[token]) / count) ** 0.5
        assert abs(share - float(chances[token])) < 4 * error


def test_a_text_ends_when_it_is_finished_and_not_before() -> None:
    model = evaluated(braid())
    ids = [prompt_ids(TOKENIZER, prompt) for prompt in PROMPTS]
    whole = complete(model, ids, 20, [never] * len(ids))
    assert {completion.stopped for completion in whole} <= {"limit", "end"}
    asked: list[str] = []

    def third(text: str) -> bool:
        asked.append(text)
        return len(text) >= 3

    some = complete(model, ids, 20, [third, *[never] * (len(ids) - 1)])
    assert some[1:] == whole[1:]
    assert (some[0].stopped, some[0].text) == ("finished", asked[-1])
    assert len(asked[-2]) < 3 <= len(asked[-1])


def test_the_end_of_text() -> None:
    model = braid()
    ids = prompt_ids(TOKENIZER, "ab")
    bias = torch.zeros(TOKENIZER.vocab_size)
    bias[TOKENIZER.eos_id] = 1e4
    head = model.head.forward
    model.head.forward = lambda hidden: head(hidden) + bias
    found = complete(evaluated(model), [ids, ids], 5, [never, never])
    assert [(completion.text, completion.stopped) for completion in found] == [("", "end")] * 2


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    ids = [prompt_ids(TOKENIZER, prompt) for prompt in PROMPTS]
    complete(evaluated(braid()), ids, 4, [never] * len(ids), advance=lambda a, b: seen.append((a, b)), max_rows=3)
    assert seen == [(12, 32), (24, 32), (32, 32)]


def test_room_for_new_tokens() -> None:
    model = evaluated(braid())
    assert (token_budget(model, 20).prompt, token_budget(model, 20).new) == (44, 20)
    assert (token_budget(model, 500).prompt, token_budget(model, 500).new) == (32, 32), "at most half of the context"
    long = prompt_ids(TOKENIZER, "x" * 200)[-44:]
    assert complete(model, [long], 20, [never])[0].stopped in ("limit", "end")


def test_an_empty_prompt_is_a_beginning() -> None:
    assert prompt_ids(TOKENIZER, "") == [TOKENIZER.bos_id]
