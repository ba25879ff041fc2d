"""The texts of one set of switches: they share passes of the model and a cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from braidlm.core.decoding.choosing import Chooser, LogProbabilities, choose_tokens, log_probabilities
from braidlm.core.decoding.decoder import no_numbers
from braidlm.core.decoding.rows import Row, RowDecoder, Step
from braidlm.serving.completions import Completion, NewToken
from braidlm.serving.switches import Switches


@dataclass(eq=False)
class Text:
    """A request that is being served."""

    completion: Completion
    chooser: Chooser
    row: Row
    room: int
    """The most tokens, prompt included."""
    count: int = 0
    """How many tokens it has got."""
    ended: bool = False


class Pending(NamedTuple):
    """Tokens that were chosen on the device, on their way to the host."""

    texts: list[Text]
    tokens: Tensor
    logprobs: LogProbabilities | None
    copied: torch.cuda.Event | None
    """What tells on CUDA that they have arrived."""


class Lane:
    """Texts of one set of switches."""

    def __init__(self, switches: Switches, decoder: RowDecoder, ends: frozenset[int], limit: int):
        """`ends` are the tokens that end a text, and `limit` is how many tokens a model can read."""
        self.switches, self.decoder, self.ends, self.limit = switches, decoder, ends, limit
        self.texts: dict[Row, Text] = {}
        self.pending: list[Pending] = []
        """Steps whose tokens have not been read yet: on CUDA the last one, while the next is under way."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.texts and not self.pending

    def begin(self, completion: Completion, chooser: Chooser) -> None:
        """Begin a text."""
        request = completion.request
        # The last token of a text is never read, so that it may stand behind the model's limit.
        room = min(len(request.prompt) + max(request.max_tokens - 1, 0), self.limit)
        row = self.decoder.enter(request.prompt, room, request.prompt_logprobs)
        self.texts[row] = Text(completion, chooser, row, room)
        if request.prompt_logprobs:
            completion.prompt = [NewToken(request.prompt[0])]

    def end(self, text: Text, stopped: str | None, error: Exception | None = None) -> None:
        """End a text, whose row is free then."""
        text.ended = True
        del self.texts[text.row]
        self.decoder.leave(text.row)
        text.completion.end(stopped, error)

    def advance(self) -> int:
        """One pass over prompts and one step of all others, as far as there are any; gives how many tokens arrived."""
        for text in [text for text in self.texts.values() if text.completion.cancelled]:
            self.end(text, "cancelled")
        new: list[Pending] = []
        if self.decoder.reads:
            step = self.decoder.read()
            self._tell_prompts()
            if step is not None:
                new.extend(self._chosen(step))
        if self.decoder.running:
            new.extend(self._chosen(self.decoder.step()))
        # The next step is under way on the GPU while the host reads the tokens of the last.
        late = bool(new) and new[-1].copied is not None
        arrived, self.pending = (self.pending, new) if late else ([*self.pending, *new], [])
        return sum(self._deliver(pending) for pending in arrived)

    def _chosen(self, step: Step) -> Iterator[Pending]:
        """Choose the next tokens; a text that asked for none ends instead."""
        texts = [self.texts[row] for row in step.rows]
        for text in texts:
            if text.completion.request.max_tokens == 0:
                self.end(text, "max_tokens")
        rows = [index for index, text in enumerate(texts) if not text.ended]
        if not rows:
            return
        logits = step.logits if len(rows) == len(texts) else step.logits[rows]
        texts = [texts[index] for index in rows]
        with torch.inference_mode():
            on_device, logprobs = choose_tokens(logits, [text.chooser for text in texts])
            self.decoder.feed([text.row for text in texts], on_device.clamp_min(0))
            tokens, copied = on_device.to("cpu", non_blocking=True), None
        if on_device.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        yield Pending(texts, tokens, logprobs, copied)

    def _deliver(self, pending: Pending) -> int:
        if pending.copied is not None:
            pending.copied.synchronize()
        told = {} if pending.logprobs is None else pending.logprobs.to_lists()
        count = 0
        for index, (text, token) in enumerate(zip(pending.texts, pending.tokens.tolist(), strict=True)):
            if text.ended:  # a step too many, which was under way when its last token arrived
                continue
            if token < 0:
                self.end(text, None, no_numbers())
                continue
            count += 1
            text.count += 1
            logprob, top = told.get(index, (None, []))
            text.completion.add(NewToken(token, logprob, tuple(top[: text.chooser.top])))
            if stopped := self._stopped(text, token):
                self.end(text, stopped)
        return count

    def _stopped(self, text: Text, token: int) -> str | None:
        request = text.completion.request
        if token in self.ends and not request.ignore_eos:
            return "end"
        if text.count >= request.max_tokens:
            return "max_tokens"
        return "limit" if len(request.prompt) + text.count > self.limit else None

    def _tell_prompts(self) -> None:
        """The log-probabilities of the tokens of prompts that were read now."""
        for row, text in self.texts.items():
            if not row.prompt_logits:
                continue
            (logits,), row.prompt_logits = row.prompt_logits, []
            begin = row.filled - len(logits)
            following = list(row.prompt[begin + 1 : row.filled + 1])
            if not following:
                continue
            with torch.inference_mode():
                ids = torch.tensor(following, device=logits.device)
                places = list(range(len(following)))
                found = log_probabilities(logits[: len(ids)], ids, text.chooser.top or 0, places).to_lists()
            prompt = text.completion.prompt
            assert prompt is not None
            prompt.extend(NewToken(token, found[at][0], tuple(found[at][1])) for at, token in enumerate(following))
