"""A contestant as lm-evaluation-harness sees it: its interface over our scorer and decoder, on the model in memory.

This file imports lm-evaluation-harness, so it is imported late, by `harness.py`. How texts become tokens follows the
base class there, which its own `hf` model uses too: without a context a text is given the token of a beginning.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from braidlm.core.decoding.decoder import Sampling
from braidlm.evals.formats.held_text import window_of
from braidlm.evals.scoring.completions import complete, prompt_ids, room
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Request
from braidlm.evals.scoring.rolling import rolling_requests
from braidlm.evals.scoring.scorer import Advance
from braidlm.evals.scoring.settling import most_probable
from braidlm.evals.scoring.stops import cut_at, has_any
from braidlm.evals.scoring.texts import begin_id, sentence_requests
from braidlm.evals.scoring.windows import too_long

USUAL_NEW_TOKENS = 256
"""Of a generation whose task does not say; the harness's own number."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """`aloud` gives a context in which progress may be shown: the harness itself is kept quiet."""

    def __init__(
        self,
        model: Contestant,
        advance: Advance | None = None,
        aloud: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__()
        self.contestant, self.advance, self.aloud = model, advance, aloud
        self.too_long: Counter[str] = Counter()
        """How many continuations were not given all that stands before them, for a result's notes."""

    @property
    def eot_token_id(self) -> int:
        eos = self.contestant.tokenizer.eos_id
        return begin_id(self.contestant.tokenizer) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return begin_id(self.contestant.tokenizer)

    @property
    def max_length(self) -> int:
        return window_of(self.contestant.scorer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As the tokenizer begins a text, unless that is not wanted; what it would add behind is left out."""
        if add_special_tokens is False:
            return self.contestant.tokenizer.encode(string)
        return list(sentence_requests(self.contestant.tokenizer, [string])[0].ids)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scorer = self.contestant.scorer
        contexts = [context or [self.prefix_token_id] for _, context, _ in requests]
        asked = [
            Request([*before, *after], len(before)) for before, (_, _, after) in zip(contexts, requests, strict=True)
        ]
        self.too_long.update(too_long(asked, scorer.context))
        with self.aloud():
            scores = scorer.score(asked, self.advance, leads=True)
            greedy = most_probable(scorer, asked, scores)
        return list(zip(scores.sums.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        asked: list[Request] = []
        ends = []
        for (text,) in (request.args for request in requests):
            asked += rolling_requests(self.tok_encode(text), self.prefix_token_id, self.max_length)
            ends.append(len(asked))
        with self.aloud():
            sums = self.contestant.scorer.score(asked, self.advance).sums
        starts = [0, *ends[:-1]]
        return [float(sums[start:end].sum()) for start, end in zip(starts, ends, strict=True)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Requests of the same settings run together."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        found = [""] * len(requests)
        for some in alike.values():
            most, stops, sampling = generation_settings(requests[some[0]].args[1])
            space = room(self.contestant, most)
            prompts = [prompt_ids(self.contestant.tokenizer, requests[index].args[0]) for index in some]
            prompts = [ids if space.prompt is None else ids[-space.prompt :] for ids in prompts]
            finished = [functools.partial(has_any, stops=stops)] * len(prompts)
            with self.aloud():
                written = complete(self.contestant, prompts, space.new, finished, sampling, self.advance)
            for index, completion in zip(some, written, strict=True):
                found[index] = cut_at(completion.text, stops)
        return found


def generation_settings(given: dict[str, Any]) -> tuple[int, list[str], Sampling]:
    """New tokens, stop strings and sampling of a task's `generation_kwargs`; greedy unless it says `do_sample`."""
    most = next((int(given[key]) for key in LIMITS if given.get(key) is not None), USUAL_NEW_TOKENS)
    until = given.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    temperature = float(given.get("temperature") or 0.0)
    samples = given.get("do_sample", temperature > 0)
    sampling = Sampling(
        temperature=(temperature or 1.0) if samples else 0.0,
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        seed=0,
    )
    return most, stops, sampling
