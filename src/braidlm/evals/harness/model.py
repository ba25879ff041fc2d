"""The interface of lm-evaluation-harness to an evaluated model: requests run through our scorer and decoder.

This file imports lm-evaluation-harness, so `tasks.py` imports it late. Texts are encoded as in the base class, which
the harness's own `hf` model uses too: without a context the first token is predicted from the BOS token.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from braidlm.core.decoding.decoder import Sampling
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import window_of
from braidlm.evals.scoring.completions import complete, prompt_ids, token_budget
from braidlm.evals.scoring.requests import (
    Request,
    begin_id,
    consecutive_ranges,
    contains_any,
    requests_for,
    sliding_windows,
    too_long,
    truncate_at,
)
from braidlm.evals.scoring.scorer import ProgressCallback, is_greedy

DEFAULT_NEW_TOKENS = 256
"""New tokens of tasks without a limit; the harness's own default."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """`unsilenced` is a context in which progress may be shown: output of the harness itself is suppressed."""

    def __init__(
        self,
        model: EvaluatedModel,
        advance: ProgressCallback | None = None,
        unsilenced: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__()
        self.evaluated, self.advance, self.unsilenced = model, advance, unsilenced
        self.too_long: Counter[str] = Counter()
        """How many continuations had a truncated context, for a result's notes."""

    @property
    def eot_token_id(self) -> int:
        eos = self.evaluated.tokenizer.eos_id
        return begin_id(self.evaluated.tokenizer) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return begin_id(self.evaluated.tokenizer)

    @property
    def max_length(self) -> int:
        return window_of(self.evaluated.scorer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text with the special tokens before it, unless disabled, and without those after it."""
        if add_special_tokens is False:
            return self.evaluated.tokenizer.encode(string)
        return list(requests_for(self.evaluated.tokenizer, [("", string)])[0].ids)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scorer = self.evaluated.scorer
        pairs = [(context or [self.prefix_token_id], after) for _, context, after in requests]
        token_requests = [Request([*before, *after], len(before)) for before, after in pairs]
        self.too_long.update(too_long(token_requests, scorer.context))
        with self.unsilenced():
            scores = scorer.score(token_requests, self.advance, margins=True)
            greedy = is_greedy(scorer, token_requests, scores)
        return list(zip(scores.sums.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        parts = [sliding_windows(ids, self.prefix_token_id, self.max_length) for ids in encoded]
        with self.unsilenced():
            sums = self.evaluated.scorer.score([window for windows in parts for window in windows], self.advance).sums
        groups = consecutive_ranges([len(windows) for windows in parts])
        return [float(sums[group.start : group.stop].sum()) for group in groups]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Requests with the same settings run together."""
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts = [""] * len(requests)
        for indices in by_settings.values():
            max_tokens, stops, sampling = generation_settings(requests[indices[0]].args[1])
            budget = token_budget(self.evaluated, max_tokens)
            prompts = [budget.fit(prompt_ids(self.evaluated.tokenizer, requests[at].args[0])) for at in indices]
            is_finished = [functools.partial(contains_any, stops=stops)] * len(prompts)
            with self.unsilenced():
                completions = complete(self.evaluated, prompts, budget.new, is_finished, sampling, self.advance)
            for index, completion in zip(indices, completions, strict=True):
                texts[index] = truncate_at(completion.text, stops)
        return texts


def generation_settings(kwargs: dict[str, Any]) -> tuple[int, list[str], Sampling]:
    """New tokens, stop strings and sampling of a task's `generation_kwargs`; greedy unless it says `do_sample`."""
    max_tokens = next((int(kwargs[key]) for key in LIMITS if kwargs.get(key) is not None), DEFAULT_NEW_TOKENS)
    until = kwargs.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    temperature = float(kwargs.get("temperature") or 0.0)
    samples = kwargs.get("do_sample", temperature > 0)
    temperature = (temperature or 1.0) if samples else 0.0
    return max_tokens, stops, Sampling(temperature, top_k=kwargs.get("top_k"), top_p=kwargs.get("top_p"), seed=0)
