"""A model before and after an edit that may change what it predicts: bits per byte, size and speed."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from braidlm.core import console
from braidlm.core.models.memory import weights_bytes
from braidlm.edits.account import columns
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.held_out_text import HeldOutText, read_text
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.braid import OpenedBraid

ROUNDS = 3
"""How often speeds are measured; old and new model take turns, and the median counts."""
FORWARD = 256
"""Tokens of a sequence whose forward pass is timed."""
STEPS = 16
"""Tokens that are read one after another, each after all before it."""


@dataclass(frozen=True)
class Measures:
    """One model."""

    bits_per_byte: float | None
    """Of the held-out text, if one is given."""
    weights_bytes: int
    """Of all its tensors; those of the model before the edit in float32, as they are read."""
    forward_tokens_per_second: float
    """A sequence at once."""
    step_tokens_per_second: float
    """One token after another, as in generation."""


def measure_beside(source: OpenedBraid, text: str | None, tokens: int) -> Callable[[BraidForCausalLM], dict[str, Any]]:
    """A function that measures an edited model beside its source, shows both and returns them for the lineage."""
    held_out = None if text is None else read_text(text, Settings(max_tokens=tokens))  # a wrong name is an error now

    def measured(edited: BraidForCausalLM) -> dict[str, Any]:
        models = {"before": source.load(dtype=torch.float32), "after": edited}
        forward, step = (_speeds(models, run) for run in (_forward, _steps))
        measures = {
            name: Measures(_bits(source, model, held_out), weights_bytes(model), forward[name], step[name])
            for name, model in models.items()
        }
        for line in _table(measures):
            console.say(line)
        threads = {"threads": torch.get_num_threads(), "forward": _length(edited), "step": STEPS}
        return {**{name: asdict(one) for name, one in measures.items()}, **threads}

    return measured


def _bits(source: OpenedBraid, model: BraidForCausalLM, text: HeldOutText | None) -> float | None:
    if text is None:
        return None
    evaluated = EvaluatedModel(Scorer(model), source.tokenizer, source.folder)
    with console.progress("bits per byte", None, "tokens") as advance:
        return text.evaluate("bits_per_byte", evaluated, lambda done, total: advance(done, "")).score


@torch.no_grad()
def _speeds(
    models: dict[str, BraidForCausalLM], run: Callable[[BraidForCausalLM], tuple[int, float]]
) -> dict[str, float]:
    """Tokens per second of each model; a first round, in which memory is allocated, does not count."""
    rounds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS + 1):
        for name, model in models.items():
            tokens, seconds = run(model)
            rounds[name].append(tokens / seconds)
    return {name: median(speeds[1:]) for name, speeds in rounds.items()}


def _length(model: BraidForCausalLM) -> int:
    return min(FORWARD, model.config.max_position_embeddings)


def _forward(model: BraidForCausalLM) -> tuple[int, float]:
    ids = torch.zeros(1, _length(model), dtype=torch.long)
    begin = time.perf_counter()
    model(ids, use_cache=False)
    return ids.shape[1], time.perf_counter() - begin


def _steps(model: BraidForCausalLM) -> tuple[int, float]:
    steps = min(STEPS, model.config.max_position_embeddings)
    cache, ids = DynamicCache(), torch.zeros(1, 1, dtype=torch.long)
    begin = time.perf_counter()
    for _ in range(steps):
        model(ids, past_key_values=cache, use_cache=True)
    return steps, time.perf_counter() - begin


def _table(measures: dict[str, Measures]) -> list[str]:
    texts: dict[str, tuple[str, str]] = {
        "bits_per_byte": ("bits per byte", ".4f"),
        "weights_bytes": ("bytes of weights", ",d"),
        "forward_tokens_per_second": ("tokens/s, a sequence at once", ",.0f"),
        "step_tokens_per_second": ("tokens/s, one after another", ",.0f"),
    }
    rows = [["", "before", "after", "after / before"]]
    for key, (label, form) in texts.items():
        before, after = (getattr(measures[name], key) for name in ("before", "after"))
        if before is not None:
            rows.append([label, format(before, form), format(after, form), f"{after / before:.3f}"])
    return columns(rows)
