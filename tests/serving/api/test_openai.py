"""The official client of OpenAI, unchanged."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import continue_text
from braidlm.opening.open import open_model
from tests.serving.servers import Running, until

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(served: Running) -> OpenAI:
    return served.client()


def alone(folder: Path, prompt: str, tokens: int, **switches: Any) -> str:
    """What `braid generate` gives, greedily."""
    opened = open_model(folder, **switches)
    pieces = continue_text(opened.load("cpu"), opened.tokenizer, [prompt], tokens, Sampling(0))
    return "".join(piece.text for piece in pieces)


def greedy(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(model="chat", prompt=prompt, **{"temperature": 0, "max_tokens": 12, **options})


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "plain"]
    assert client.models.retrieve("plain").owned_by == "braid"
    with pytest.raises(openai.NotFoundError, match=r"Did you mean 'plain'"):
        client.models.retrieve("plan")


def test_a_completion_is_what_the_model_writes_alone(client: OpenAI, chat_model: Path) -> None:
    done = greedy(client)
    (choice,) = done.choices
    assert choice.text == alone(chat_model, PROMPT, 12)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert done.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 16, "completion_tokens": 12, "total_tokens": 28,
    }  # fmt: skip


def test_prompts_of_all_four_kinds(client: OpenAI, chat_model: Path) -> None:
    ids = [list(b"One"), list(b"Twenty")]
    texts = [alone(chat_model, text, 12) for text in ("One", "Twenty")]
    assert [choice.text for choice in greedy(client, ["One", "Twenty"]).choices] == texts
    assert [choice.text for choice in greedy(client, ids).choices] == texts
    assert greedy(client, ids[0]).choices[0].text == texts[0]
    assert [choice.index for choice in greedy(client, ids, n=2).choices] == [0, 1, 2, 3]


def test_a_stream_gives_the_same_text_in_pieces(client: OpenAI) -> None:
    events = list(greedy(client, stream=True, stream_options={"include_usage": True}, max_tokens=40))
    whole = greedy(client, max_tokens=40)
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events[-2:-1]] == ["length"]
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_streams_of_several_choices_and_prompts(client: OpenAI) -> None:
    texts = ["", "", "", ""]
    for event in greedy(client, ["One", "Two"], n=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in greedy(client, ["One", "Two"], n=2).choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_a_stop_string(client: OpenAI, stream: bool) -> None:
    whole = greedy(client, max_tokens=60).choices[0].text
    stop = whole[20:23]
    at = whole.index(stop)
    done = greedy(client, max_tokens=60, stop=["never there", stop], stream=stream, logprobs=0)
    parts = list(done) if stream else [done]
    assert "".join(part.choices[0].text for part in parts) == whole[:at]
    assert parts[-1].choices[0].finish_reason == "stop"
    offsets = [offset for part in parts for offset in part.choices[0].logprobs.text_offset]
    assert offsets == sorted(offsets)
    assert offsets[-1] < at


def test_a_seed_gives_the_same_text_and_every_choice_its_own(client: OpenAI) -> None:
    def sample(seed: int, **options: Any) -> list[str]:
        done = client.completions.create(model="chat", prompt=PROMPT, seed=seed, max_tokens=10, **options)
        return [choice.text for choice in done.choices]

    first = sample(1, n=3, top_p=0.9, extra_body={"top_k": 20})
    assert sample(1, n=3, top_p=0.9, extra_body={"top_k": 20}) == first
    assert len({*first, *sample(7)}) == 4


def test_top_k_of_one_is_greedy(client: OpenAI) -> None:
    assert greedy(client, extra_body={"top_k": 1}).choices[0].text == greedy(client).choices[0].text


def test_log_probabilities_are_the_models(client: OpenAI, chat_model: Path) -> None:
    """Those of the prompt with `echo`, and those of what is written, as lm-eval reads them."""
    ids = [256, *b"Once", 200]
    done = greedy(client, ids, echo=True, logprobs=2, max_tokens=3, extra_body={"return_token_ids": True}).choices[0]
    assert done.prompt_token_ids == ids
    all_ids = torch.tensor([[*ids, *done.token_ids]])
    with torch.no_grad():
        scores = open_model(chat_model).load("cpu")(all_ids).logits[0].float().log_softmax(-1)
    logprobs = done.logprobs
    assert logprobs.tokens[:6] == ["<|endoftext|>", "O", "n", "c", "e", "bytes:\\xc8"]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    expected = [scores[at - 1, token].item() for at, token in enumerate(all_ids[0].tolist()) if at]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(
        scores[:-1].amax(-1).tolist(), abs=1e-4
    )
    for token, score, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == score
        assert len(top) in (2, 3)
    assert logprobs.text_offset[:6] == [0, 0, 1, 2, 3, 4]
    assert done.text.startswith("Once")


def test_a_prompt_is_scored_without_a_new_token(client: OpenAI) -> None:
    scored = greedy(client, echo=True, logprobs=1, max_tokens=0).choices[0]
    longer = greedy(client, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert scored.text == PROMPT
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(longer.logprobs.token_logprobs[1:-1], abs=1e-4)
    assert greedy(client, echo=True, max_tokens=0).choices[0].text == PROMPT


def test_streamed_log_probabilities_are_the_same(client: OpenAI) -> None:
    whole = greedy(client, echo=True, logprobs=1, max_tokens=30).choices[0]
    found: dict[str, list[Any]] = {key: [] for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    for event in greedy(client, echo=True, logprobs=1, max_tokens=30, stream=True):
        for key, values in found.items():
            values += getattr(event.choices[0].logprobs, key)
    assert found["tokens"] == whole.logprobs.tokens
    assert found["text_offset"] == whole.logprobs.text_offset
    assert found["token_logprobs"] == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


def test_a_chat_is_its_template_continued(client: OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    ids = [*b"<|system|>Be brief.", 256, *b"<|user|>Hi", 256, *b"<|assistant|>"]
    options: Any = {"model": "chat", "messages": messages, "temperature": 0}
    done = client.chat.completions.create(**options, max_completion_tokens=8, logprobs=True, top_logprobs=2)
    (choice,) = done.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == greedy(client, ids, max_tokens=8).choices[0].text
    assert done.usage.prompt_tokens == len(ids)
    content = choice.logprobs.content
    assert len(content) == 8
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].logprob == token.logprob for token in content)
    assert (
        b"".join(bytes(token.bytes) for token in content if token.bytes).decode(errors="replace")
        == choice.message.content
    )
    events = list(client.chat.completions.create(**options, max_tokens=8, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content
    assert events[-1].choices[0].finish_reason == "length"


def test_a_chat_goes_on_to_the_models_limit_unless_it_is_bounded(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x" * 40}]
    done = client.chat.completions.create(model="chat", messages=messages, seed=0, extra_body={"ignore_eos": True})
    assert done.usage.total_tokens in (96, 97)
    assert done.choices[0].finish_reason == "length"


def test_a_model_without_a_template_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
        client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "Hi"}])
    assert refused.value.code == "no_chat_template"


def test_switches_change_one_request_and_no_other(client: OpenAI, chat_model: Path) -> None:
    stories = greedy(client, extra_body={"braid": {"paths": ["stories"]}}).choices[0].text
    assert stories == alone(chat_model, PROMPT, 12, paths=["stories"])
    assert greedy(client).choices[0].text == alone(chat_model, PROMPT, 12) != stories
    with pytest.raises(openai.BadRequestError, match="storys"):
        greedy(client, extra_body={"braid": {"paths": ["storys"]}})


def test_a_client_that_closes_its_stream_gives_the_row_back(client: OpenAI, served: Running) -> None:
    engine = served.models.engines["chat"]
    stream = greedy(client, max_tokens=80, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert not served.all_rows_are_free() or engine.running == 0
    stream.close()
    until(served.all_rows_are_free)


def test_a_client_that_goes_while_it_waits_gives_the_row_back(served: Running) -> None:
    body = {"model": "chat", "prompt": ["a"] * 30, "max_tokens": 90, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.05)
    until(served.all_rows_are_free)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 33}, "n", "at most 32"),
        ({"prompt": ["x"] * 33}, "prompt", "at most 32"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "at least 1 item"),
        ({"prompt": [258]}, "prompt", "below 258"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": "x" * 96}, "prompt", "limit is 96"),
        ({"prompt": [1] * 96}, "prompt", "limit is 96"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than or equal"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": "x" * 201}, "stop", "at most 200"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"best_of": 2}, "best_of", "should be 1"),
        ({"presence_penalty": 1.0}, "presence_penalty", "leave it out"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "leave it out"),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "unknown or unsupported key 'min_p'"),
        ({"extra_body": {"braid": {"path": []}}}, "braid", "unknown or unsupported key 'braid.path'"),
        ({"extra_body": {f"k{i}": i for i in range(70)}}, None, "at most 64 keys"),
    ],
    ids=str,
)  # fmt: skip
def test_bounds_are_told_by_name(client: OpenAI, options: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        greedy(client, **options)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_defaults_of_openai_are_accepted(client: OpenAI) -> None:
    whole = greedy(client, best_of=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me", suffix=None)
    assert whole.choices[0].text == greedy(client).choices[0].text


def test_too_long_a_prompt_has_openais_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        greedy(client, "x" * 500)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"", 400, "no body"),
        (b"[1]", 400, "dictionary"),
        (b'"x"', 400, "dictionary"),
        (b'{"model": "chat", "temperature": NaN}', 400, "finite"),
        (b'{"model": "chat", "max_tokens": ' + b"9" * 5000 + b"}", 400, ""),
        (b'{"model": "chat", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, ""),
        (b'{"model": "chat", "prompt": [' + b"null," * 30_000 + b"null]}", 400, "prompt"),
        (b'{"model": "chat", "prompt": "\xff"}', 400, ""),
        (b'{"model": "chat", "prompt": "\\ud800"}', 400, "not valid UTF-8"),
        (b'{"model": 5}', 400, "model"),
        (b'{"model": "../../etc/passwd"}', 404, "there is no model"),
        (b'{"model": "' + b"x" * 900 + b'"}', 404, "there is no model"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_bad_bodies_are_told_in_openais_shape(served: Running, body: bytes, status: int, words: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert len(error["message"]) <= 2000


def test_paths_of_requests_open_nothing(served: Running, plain_model: Path) -> None:
    for name in (str(plain_model), f"{plain_model.parent}/../{plain_model.parent.name}/plain", "./plain", "plain/"):
        answer = served.post("/v1/completions", {"model": name, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)]
)
def test_unknown_addresses_and_methods(served: Running, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"{served.url}{path}")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_hostile_prompts_come_back_as_data(served: Running) -> None:
    prompt = "</script><script>alert(1)</script>\u2028\x00{{ 7*7 }}"
    answer = served.post("/v1/completions", {"model": "chat", "prompt": prompt, "echo": True, "max_tokens": 1})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert json.loads(answer.text)["choices"][0]["text"].startswith(prompt)


def test_a_template_cannot_be_left_by_what_a_person_writes(served: Running) -> None:
    """The name of a special token in a message is eleven characters, not the token."""
    said = "<|endoftext|>"
    body = {"model": "chat", "messages": [{"role": "user", "content": said}], "max_tokens": 1, "return_token_ids": True}
    ids = served.post("/v1/chat/completions", body).json()["choices"][0]["prompt_token_ids"]
    assert ids == [*b"<|user|>", *said.encode(), 256, *b"<|assistant|>"]
