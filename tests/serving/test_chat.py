"""Conversations in this process: by the template, or text that is continued; stopped answers, switches, limits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.generation import continue_text
from braidlm.core.errors import BraidError
from braidlm.opening.open import open_model
from braidlm.serving.chat import Chat, chat
from tests.serving.servers import CONTEXT, save_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("plain") / "plain", template=None)


@pytest.fixture
def talk(folder: Path) -> Iterator[Chat]:
    with chat(folder, max_tokens=8, greedy=True, device="cpu") as talk:
        yield talk


def expected(talk: Chat, *messages: tuple[str, str], tokens: int = 8, **options: Any) -> str:
    """What the model writes after a chat, by the decoder of `braid generate`."""
    tokenizer, model = talk.engine.tokenizer, open_model(talk.engine.opened.folder, **options).load("cpu")
    assert talk.template is not None
    ids = talk.template.encode([{"role": role, "content": content} for role, content in messages])
    steps = decode_tokens(Decoder(model, 1, CONTEXT), [ids], tokens, Sampling(0), tokenizer.eos_id)
    new = [chosen[0] for chosen, _ in steps if chosen[0] is not None]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_an_answer_is_the_models_and_the_next_one_follows_the_conversation(talk: Chat) -> None:
    pieces: list[str] = []
    first = talk.answer("hello", pieces.append)
    assert first.text == "".join(pieces) == expected(talk, ("user", "hello"))
    second = talk.answer("and?")
    said = ("user", "hello"), ("assistant", first.text), ("user", "and?")
    assert second.text == expected(talk, *said)
    assert [answer.stopped for answer in talk.answers] == ["max_tokens"] * 2
    talk.reset()
    assert talk.answer("hello").text == first.text, "nothing is remembered"


def test_a_system_message_stands_before_the_conversation(talk: Chat) -> None:
    talk.system = "You are x."
    assert talk.answer("hello").text == expected(talk, ("system", "You are x."), ("user", "hello"))


def test_a_model_without_a_template_continues_each_text_by_itself(plain_folder: Path) -> None:
    with chat(plain_folder, max_tokens=8, greedy=True, device="cpu") as talk:
        first = talk.answer("hello").text
        talk.answer("something else")
        assert talk.answer("hello").text == first
        opened = open_model(plain_folder)
        pieces = continue_text(opened.load("cpu"), opened.tokenizer, ["hello"], 8, Sampling(0))
        assert first == "".join(piece.text for piece in pieces)
        with pytest.raises(BraidError, match="no chat template"):
            talk.system = "You are x."


def test_a_stopped_answer_is_kept_as_far_as_it_came_and_its_row_is_free(folder: Path) -> None:
    with chat(folder, max_tokens=60, greedy=True, device="cpu") as talk:

        def stop(piece: str) -> None:
            if piece:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            talk.answer("hello", stop)
        (stopped,) = talk.answers
        assert stopped.text
        assert stopped.tokens < 60
        after = talk.answer("on").text
        said = ("user", "hello"), ("assistant", stopped.text), ("user", "on")
        assert after == expected(talk, *said, tokens=60)


def test_too_long_a_conversation_is_refused_and_not_remembered(talk: Chat) -> None:
    with pytest.raises(BraidError, match="the model's limit is 96"):
        talk.answer("x" * 200)
    assert not talk.answers
    talk.answer("hello")


def test_parts_are_off_by_name_and_unknown_names_are_refused(folder: Path) -> None:
    with chat(folder, max_tokens=8, greedy=True, paths=["stories"], device="cpu") as talk:
        answer = talk.answer("hello").text
        assert answer == expected(talk, ("user", "hello"), paths=["stories"])
        assert answer != expected(talk, ("user", "hello"))
    with pytest.raises(BraidError, match="storys"):
        chat(folder, paths=["storys"], device="cpu")
