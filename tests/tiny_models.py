"""Tiny models with random weights that make every part matter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from braidlm.core.files import write_json
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.language_model import LanguageModel
from braidlm.model.modeling_braid import BraidForCausalLM

VOCABULARY = 37
BASE: dict[str, Any] = {
    "width": 16,
    "context": 32,
    "stages": ["block", "block"],
    "block": {"attention": {"heads": 4}, "feed": {"kind": "swiglu", "hidden": 24}},
}


def tiny_config(vocab_size: int = VOCABULARY, **architecture: Any) -> BraidConfig:
    """The base with top-level entries replaced; entries of `block` are replaced one by one."""
    block = {**BASE["block"], **architecture.pop("block", {})}
    return BraidConfig({**BASE, "block": block, **architecture}, vocab_size=vocab_size)


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **architecture: Any) -> BraidForCausalLM:
    """A model in evaluation mode."""
    return randomised(BraidForCausalLM(tiny_config(**architecture)), seed).to(dtype).eval()


@torch.no_grad()
def randomised(model: Any, seed: int = 0) -> Any:
    """Replace all weights so that every part matters: scales differ from 1, biases from 0, and matrices are large."""
    generator = torch.Generator().manual_seed(seed)
    codes = {p for m in model.modules() if getattr(m, "keeps_values", False) for p in m.parameters()}
    for name, parameter in sorted(model.named_parameters()):
        if parameter in codes:  # they are random already
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.ndim == 1 and not name.endswith("bias")
        parameter.copy_(1 + 0.2 * noise if scale else noise / parameter.shape[-1] ** 0.5)
    return model


@contextmanager
def models_built() -> Iterator[list[BraidConfig]]:
    """The configurations of all models that are built in the block, those that are only counted too."""
    built: list[BraidConfig] = []
    plain = LanguageModel.add_head

    def counted(model: LanguageModel, config: BraidConfig) -> None:
        built.append(config)
        plain(model, config)

    with patch.object(LanguageModel, "add_head", counted):
        yield built


def random_ids(batch: int, time: int, seed: int = 0, vocab_size: int = VOCABULARY) -> torch.Tensor:
    """Token ids [batch, time]."""
    return torch.randint(0, vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


class ToyTokenizer:
    """A minimal tokenizer for model folders: words w0, w1, ... and the end of text last."""

    def __init__(self, words: int = VOCABULARY - 1):
        vocabulary = {f"w{i}": i for i in range(words)} | {"<eos>": words}
        self.backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
        self.backend.pre_tokenizer = pre_tokenizers.Whitespace()
        self.backend.add_special_tokens(["<eos>"])
        self.fingerprint = f"toy-{words}"
        self.beginning: list[int] = []
        self.vocab_size = words + 1
        self.token_bytes: list[bytes | None] = [*(token.encode() for token in vocabulary if token != "<eos>"), None]
        self.eos_id: int | None = words
        self.bos_id: int | None = None
        self.pad_id: int | None = None
        self.pause_id: int | None = None

    def save(self, folder: Path) -> None:
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
        write_json(folder / "tokenizer_config.json", settings)
