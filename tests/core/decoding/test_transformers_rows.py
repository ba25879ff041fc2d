"""Decoders of transformers in rows of their own positions, or one text after another where rows would not be exact."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, MambaConfig, MistralConfig, PretrainedConfig

from braidlm.core.decoding.decoder import Sampling, decode_tokens
from braidlm.core.decoding.generation import TransformersDecoder
from braidlm.core.decoding.rows import Row, RowDecoder
from braidlm.core.decoding.transformers_rows import TransformersRows
from braidlm.core.errors import BraidError
from tests.core.decoding.test_generation_transformers import CONFIGS, SIZES, small
from tests.tiny_models import random_ids, randomised

LENGTH = 24
EXACT = [name for name in CONFIGS if name != "mistral"]


@pytest.mark.parametrize("name", EXACT)
def test_each_text_gets_the_tokens_that_it_gets_alone(name: str) -> None:
    model = small(name)
    decoder = RowDecoder(TransformersRows(model, LENGTH), 3, LENGTH)
    got: dict[Row, list[int]] = {}
    rows: list[Row] = []
    for seed in range(8):
        if len(rows) == 3:
            decoder.leave(rows.pop(seed % 3))
        rows.append(decoder.enter(random_ids(1, 1 + seed * 5 % 11, seed)[0].tolist(), LENGTH))
        for take in (decoder.read, decoder.step):
            step = take()
            assert step is not None
            tokens = step.logits.argmax(-1)
            decoder.feed(step.rows, tokens)
            for row, token in zip(step.rows, tokens.tolist(), strict=True):
                got.setdefault(row, []).append(token)
    for row, tokens in got.items():
        alone = decode_tokens(TransformersDecoder(model, LENGTH), [list(row.prompt)], len(tokens), Sampling(0))
        assert tokens == [chosen[0] for chosen, _ in alone]


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "a window": (CONFIGS["mistral"], "sees a window"),
    "no positions": (BloomConfig(vocab_size=37, hidden_size=16, n_layer=2, n_head=4), "takes no positions"),
    "a state space": (MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2, state_size=4), "."),
    "positions of a batch": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "the longest text of a batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_rows_are_not_exact_for_are_refused(name: str) -> None:
    config, reason = REFUSED[name]
    model = randomised(AutoModelForCausalLM.from_config(config)).eval()
    with pytest.raises(BraidError, match=reason):
        TransformersRows(model, LENGTH)


def test_a_window_that_no_text_fills_hides_nothing() -> None:
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64)
    TransformersRows(randomised(AutoModelForCausalLM.from_config(config)).eval(), LENGTH)


def test_the_check_sees_a_model_that_ignores_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama")
    plain = model.model.rotary_emb.forward  # type: ignore[attr-defined]

    def at_the_beginning(hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return plain(hidden, torch.arange(hidden.shape[1])[None])

    monkeypatch.setattr(model.model.rotary_emb, "forward", at_the_beginning)  # type: ignore[attr-defined]
    with pytest.raises(BraidError, match="gives other numbers"):
        TransformersRows(model, LENGTH)
