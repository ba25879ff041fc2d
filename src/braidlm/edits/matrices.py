"""The matrices of a model in another form, and what the model costs and predicts before and after."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from braidlm.bridges.model_info import BODY
from braidlm.core import console
from braidlm.core.devices import weights_bytes
from braidlm.core.errors import BraidError
from braidlm.edits.account import columns
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.held_out_text import HeldOutText, read_text
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.compression import sizes_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.heads.ends import LinearHead, TokenEmbedding
from braidlm.model.initialisation import LINEAR
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import ScoreLinear
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.opened_model import OpenedModel


@dataclass(frozen=True)
class Matrix:
    """The matrix of one layer, or one for each member of a bank."""

    address: str
    """The layer's address, as the configuration names it: `stages.0.layers.3.feed.out`."""
    tensor: str
    """The name under which it is saved; layers that share a matrix have the same."""
    inputs: int
    outputs: int
    members: int | None
    """How many there are in a bank, [member, inputs, outputs]; None for one matrix [outputs, inputs]."""

    @property
    def layer(self) -> str:
        """The beginning of the names of its layer's tensors."""
        return self.tensor.removesuffix(".weight")

    def rows(self, tensor: Tensor) -> Tensor:
        """[..., outputs, inputs] of the tensor as it is saved, and the other way round."""
        return tensor if self.members is None else tensor.transpose(-1, -2)


def matrices_of(source: OpenedBraid, patterns: Sequence[str]) -> list[Matrix]:
    """The matrices of the layers whose addresses fit one of these patterns; every pattern must fit some."""
    modules = source.info.model.model.named_modules()
    free = {a: m for a, m in modules if type(m) in LINEAR and "router" not in a.split(".")}
    for pattern in patterns:
        if not any(fnmatchcase(address, pattern) for address in free):
            todo = f"There are {', '.join(list(free)[:4])} and {max(0, len(free) - 4)} more."
            raise BraidError(f"no linear layer is called '{pattern}'", source.title, todo)
    return [
        Matrix(a, source.info.saved(f"{BODY}{a}.weight"), *sizes_of(layer), getattr(layer, "stack", None))
        for a, layer in free.items()
        if any(fnmatchcase(a, pattern) for pattern in patterns)
    ]


def ends_of(source: OpenedBraid) -> list[Matrix]:
    """The matrices of embedding and head, where these are plain ones; one matrix twice where they are tied."""
    model = source.info.model
    if type(model.model.embedding) is not TokenEmbedding or type(model.head) is not LinearHead:
        return []
    rows, width = model.model.embedding.weight.shape
    names = {"embedding": f"{BODY}embedding.weight", "head": "head.weight"}
    return [Matrix(name, source.info.saved(tensor), width, rows, None) for name, tensor in names.items()]


def notes_of(source: OpenedBraid) -> list[str]:
    """Remarks for the plan: those of the source, and which layers with a matrix are not plain linear ones."""
    body = source.info.model.model
    other = [type(m) for m in body.modules() if isinstance(m, LINEAR) and type(m) not in (*LINEAR, ScoreLinear)]
    kinds = ", ".join(sorted({kind.__name__ for kind in other}))
    return [*source.notes, *([f"{len(other)} layers stay as they are: {kinds}"] if other else [])]


def compressed_config(source: OpenedBraid, *forms: dict[str, Any]) -> BraidConfig:
    """The configuration with some matrices in another form."""
    return source.config_with(compression=[*source.config.architecture["compression"], *forms])


def shared_once(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Each tensor once, by the first of its layers."""
    first = {matrix.tensor: matrix for matrix in reversed(matrices)}
    return [matrix for matrix in matrices if first[matrix.tensor] is matrix]


ROUNDS = 3
"""How often speeds are measured; old and new model take turns, and the median counts."""
FORWARD = 256
"""Tokens of a sequence whose forward pass is timed."""
STEPS = 16
"""Tokens that are read one after another, each after all before it."""


MEASURES = {
    "bits_per_byte": ("bits per byte", ".4f"),
    "weights_bytes": ("bytes of weights", ",d"),
    "forward_tokens_per_second": ("tokens/s, a sequence at once", ",.0f"),
    "step_tokens_per_second": ("tokens/s, one after another", ",.0f"),
}
"""What is measured of a model, in words and with the form of its numbers; bits per byte only where a text is given. The
model before the edit is counted in float32, as it is read; tokens one after another are as in generation."""


def measure_beside(source: OpenedBraid, text: str | None, tokens: int) -> Callable[[BraidForCausalLM], dict[str, Any]]:
    """A function that measures an edited model beside its source, shows both and returns them for the lineage."""
    held_out = None if text is None else read_text(text, Settings(max_tokens=tokens))  # a wrong name is an error now

    def measured(edited: BraidForCausalLM) -> dict[str, Any]:
        models = {"before": source.load(dtype=torch.float32), "after": edited}
        length, steps = (min(most, edited.config.max_position_embeddings) for most in (FORWARD, STEPS))
        both = speeds(models, length, 1), speeds(models, 1, steps)
        measures = {}
        for name, model in models.items():
            bits = None if held_out is None else bits_per_byte(model, source, held_out).score
            numbers = (bits, weights_bytes(model), *(speed[name] for speed in both))
            measures[name] = dict(zip(MEASURES, numbers, strict=True))
        rows = [["", "before", "after", "after / before"]]
        for key, (label, form) in MEASURES.items():
            before, after = (measures[name][key] for name in models)
            if before is not None and after is not None:
                rows.append([label, format(before, form), format(after, form), f"{after / before:.3f}"])
        for line in columns(rows):
            console.say(line)
        return {**measures, "threads": torch.get_num_threads(), "forward": length, "step": STEPS}

    return measured


def bits_per_byte(model: Any, source: OpenedModel, text: HeldOutText) -> TaskResult:
    """How an edited model predicts a text in its source's tokens."""
    evaluated = EvaluatedModel(Scorer(model), source.tokenizer, source.folder)
    with console.progress("bits per byte", None, "tokens") as advance:
        return text.evaluate("bits_per_byte", evaluated, lambda done, total: advance(done, ""))


@torch.no_grad()
def speeds(models: Mapping[str, Any], length: int, steps: int) -> dict[str, float]:
    """Tokens per second of each model, of which it reads `length` at once, `steps` times, each time after all before. A
    first round, in which memory is allocated, does not count."""
    rounds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS + 1):
        for name, model in models.items():
            cache = DynamicCache() if steps > 1 else None
            ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
            begin = time.perf_counter()
            for _ in range(steps):
                model(ids, past_key_values=cache, use_cache=steps > 1)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            rounds[name].append(length * steps / (time.perf_counter() - begin))
    return {name: median(each[1:]) for name, each in rounds.items()}
