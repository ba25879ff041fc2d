"""`braid chat` as a function: a conversation with a model in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import TextStream, encode_prompts
from braidlm.core.errors import BraidError
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model
from braidlm.serving.chat_template import chat_template
from braidlm.serving.engine import Engine, Request, Switches

CONTINUED = 100
"""New tokens of a text that is continued, unless somebody says how many."""


@dataclass
class Answer:
    """What the model wrote after a text."""

    prompt: str
    text: str = ""
    tokens: int = 0
    """How many were generated, the end of text included."""
    stopped: str = ""
    """Why it ended: `end` of text, `max_tokens`, the model's `limit`, or `cancelled`."""
    seconds: float = 0.0


class Chat:
    """A conversation by the model's chat template. A model without one continues each text by itself."""

    def __init__(self, engine: Engine, sampling: Sampling, max_tokens: int | None, switches: Switches):
        self.engine, self.sampling, self.max_tokens, self.switches = engine, sampling, max_tokens, switches
        self.template = chat_template(engine.opened)
        self.answers: list[Answer] = []
        """All answers, also those that were interrupted."""
        self._system: str | None = None
        self._begin = 0
        """Which answer is the first of this conversation."""

    @property
    def system(self) -> str | None:
        """What the model is told before the conversation."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and self.template is None:
            raise BraidError("the model's tokenizer has no chat template, and so no place for a system message")
        self._system = text

    def reset(self) -> None:
        """Begin anew; the system message stays."""
        self._begin = len(self.answers)

    def answer(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """The answer to a text; `on_text(piece)` is called with each new piece. Ctrl-C ends it where it is."""

        async def read() -> None:
            async for piece in self.pieces(text):
                if on_text is not None:
                    on_text(piece)

        asyncio.run(read())
        return self.answers[-1]

    async def pieces(self, text: str) -> AsyncIterator[str]:
        """The answer to a text, piece by piece; the text so far is kept when nobody reads on."""
        ids = self._encode(text)
        room = CONTINUED if self.template is None else self.engine.limit
        tokens_at_most = room if self.max_tokens is None else self.max_tokens
        completion = self.engine.submit(Request(tuple(ids), tokens_at_most, self.sampling, self.switches))
        answer, stream, begun = Answer(text), TextStream(self.engine.tokenizer, ids), time.perf_counter()
        self.answers.append(answer)
        try:
            async for tokens in completion.tokens():
                answer.tokens += len(tokens)
                piece = stream.add(*(token.id for token in tokens if token.id not in self.engine.ends))
                answer.text += piece
                yield piece
            rest = stream.finish()
            answer.text += rest
            yield rest
        except Exception:
            self.answers.remove(answer)
            raise
        finally:
            completion.cancel()
            answer.stopped, answer.seconds = completion.stopped or "cancelled", time.perf_counter() - begun

    def _encode(self, text: str) -> list[int]:
        (ids,) = encode_prompts(self.engine.tokenizer, [text])
        if self.template is None:
            return ids
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for answer in self.answers[self._begin :]:
            if answer.text:
                messages.append({"role": "user", "content": answer.prompt})
                messages.append({"role": "assistant", "content": answer.text})
        return self.template.encode([*messages, {"role": "user", "content": text}])

    def close(self) -> None:
        """Give the model's memory back."""
        self.engine.close(drain=False)

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def chat(
    model: StrPath,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
    paths: Sequence[str] | None = None,
    without: Sequence[str] = (),
    gates_off: Sequence[str] = (),
    members: Sequence[str] | None = None,
    device: str = "auto",
) -> Chat:
    """A conversation with a model, named by its folder, its run, its study as STUDY/NAME, or as on the Hub.

    An answer has at most `max_tokens`: by default as many as the model can read, and 100 where it only continues texts.
    `paths` and `members` are those that stay active; `without` and `gates_off` are modules and gates that are off.
    """
    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    only, active = (None if names is None else tuple(names) for names in (paths, members))
    engine = Engine(open_model(model), device, rows=1)
    talk = Chat(engine, sampling, max_tokens, Switches(only, tuple(without), tuple(gates_off), active))
    try:
        engine.check_switches(talk.switches)
        talk.system = system
    except BaseException:
        talk.close()
        raise
    return talk
