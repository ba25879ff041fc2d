"""From tokens to the text of a choice: stop strings, log-probabilities, and what OpenAI writes about tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from braidlm.core.decoding.generation import TextStream
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.serving.engine import NewToken


class TokenTexts:
    """The text and the bytes of every token of a tokenizer by itself."""

    def __init__(self, tokenizer: BraidTokenizer):
        self.tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        spelled = self.tokenizer.token_bytes
        if self.tokenizer.is_byte_level:
            return spelled
        return [None if one is None else one.replace("▁".encode(), b" ") for one in spelled]

    def bytes_of(self, token: int) -> bytes | None:
        """None for special tokens, which add nothing to a text."""
        return self._bytes[token] if token < len(self._bytes) else None

    def text_of(self, token: int) -> str:
        """A special token by its name; bytes that are not a character by themselves as `bytes:\\xe2\\x82`."""
        spelled = self.bytes_of(token)
        if spelled is None:
            return self.tokenizer.backend.id_to_token(token) or ""
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


@dataclass(frozen=True)
class Entry:
    """A token with its log-probability and where in the text it begins."""

    token: NewToken
    offset: int


@dataclass
class Piece:
    """What a choice has gained."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """With log-probabilities, the tokens whose text is out."""


class GrowingText:
    """The text of one choice: it ends before the first stop string, and what may begin one is held back."""

    def __init__(
        self, tokenizer: BraidTokenizer, prompt: Sequence[int], stops: Sequence[str], offset: int, entries: bool
    ):
        """`offset` is where it begins in what is sent; `entries` are kept where log-probabilities are wanted."""
        self.stream = TextStream(tokenizer, prompt)
        self.stops, self.keeps_entries = stops, entries
        self.held, self.released, self.seen = "", offset, offset
        self.waiting: list[Entry] = []
        self.stopped = False

    def add(self, tokens: Sequence[NewToken], ends: Collection[int]) -> Piece:
        """New tokens; those of `ends` end a text and are not part of it."""
        ids = [token.id for token in tokens if token.id not in ends]
        if not self.keeps_entries:
            return Piece(self._release(self.stream.add(*ids)), ids)
        text = ""
        for token in tokens:
            self.waiting.append(Entry(token, self.seen))
            new = "" if token.id in ends else self.stream.add(token.id)
            self.seen += len(new)
            text += new
        return Piece(self._release(text), ids, self._out())

    def finish(self) -> Piece:
        """What is left when there are no more tokens."""
        if self.stopped:
            return Piece()
        text = self._release(self.stream.finish(), final=True)
        entries, self.waiting = (self._out() if self.stopped else self.waiting), []
        return Piece(text, [], entries)

    def _release(self, new: str, final: bool = False) -> str:
        text = self.held + new
        if not self.stops:
            self.released += len(text)
            return text
        cuts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(cuts)
        hold = 0 if final or cuts else max(_overlap(text, stop) for stop in self.stops)
        end = min(cuts) if cuts else len(text) - hold
        self.held = "" if cuts else text[end:]
        self.released += end
        return text[:end]

    def _out(self) -> list[Entry]:
        """The entries whose token begins in what was released."""
        count = sum(entry.offset < self.released for entry in self.waiting)
        out, self.waiting = self.waiting[:count], self.waiting[count:]
        return out


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


def prompt_entries(tokens: Sequence[NewToken], tokenizer: BraidTokenizer) -> list[Entry]:
    """The tokens of a prompt with where they begin in its text."""
    stream, at, entries = TextStream(tokenizer, []), 0, []
    for token in tokens:
        entries.append(Entry(token, at))
        at += len(stream.add(token.id))
    return entries


def completion_logprobs(entries: Sequence[Entry], texts: TokenTexts, count: int) -> dict[str, Any]:
    """Log-probabilities as completions have them: lists over tokens."""
    tops = [_top(entry.token, texts) if entry.token.logprob is not None else None for entry in entries]
    return {
        "tokens": [texts.text_of(entry.token.id) for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": tops if count else None,
        "text_offset": [entry.offset for entry in entries],
    }


def _top(token: NewToken, texts: TokenTexts) -> dict[str, float]:
    """The most probable tokens, and the one that was chosen."""
    found: dict[str, float] = {}
    for id, logprob in (*token.top, (token.id, token.logprob)):
        if logprob is not None:
            found.setdefault(texts.text_of(id), logprob)
    return found


def chat_logprobs(entries: Sequence[Entry], texts: TokenTexts) -> dict[str, Any]:
    """Log-probabilities as chats have them: an object for each token."""

    def told(id: int, logprob: float | None) -> dict[str, Any]:
        spelled = texts.bytes_of(id)
        return {"token": texts.text_of(id), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}

    content = [
        {**told(entry.token.id, entry.token.logprob), "top_logprobs": [told(*one) for one in entry.token.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}
