"""The parts of decoders are found by their structure; what is no decoder is refused with what was found."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    ModernBertConfig,
    OPTConfig,
    T5Config,
)

from braidlm.core.errors import BraidError
from braidlm.opening.gating import find_parts
from tests.opening.random_decoders import CONFIGS, DEPTH, VOCABULARY, WIDTH, tiny_decoder, token_ids

NAMES = {"gpt2": "transformer.h", "gpt-neox": "gpt_neox.layers"}
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_make_the_logits_of_the_last_stream(name: str) -> None:
    model, ids = tiny_decoder(name), token_ids(2, 7)
    parts = find_parts(model)
    assert (len(parts.layers), parts.width) == (DEPTH, WIDTH)
    assert parts.layers_name == NAMES.get(name, "model.layers")
    assert model.get_submodule(parts.layers_name) is parts.layers
    assert parts.embedding(ids).shape == (2, 7, WIDTH)
    last: list[Any] = []
    parts.layers[-1].register_forward_hook(lambda layer, args, output: last.append(output))
    expected = model(ids).logits
    hidden = last[0][0] if isinstance(last[0], tuple) else last[0]
    assert torch.equal(parts.head(parts.norm(hidden)), expected)


def test_a_norm_that_stands_before_the_layers_is_found() -> None:
    """OPT defines it before its layers."""
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=DEPTH, ffn_dim=24, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=WIDTH,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    parts = find_parts(model)
    assert parts.layers_name == "model.decoder.layers"
    assert parts.norm is model.model.decoder.final_layer_norm


@pytest.mark.parametrize("config", [BertConfig, ModernBertConfig], ids=lambda kind: kind.__name__)
def test_an_encoder_is_refused(config: Any) -> None:
    model = AutoModelForMaskedLM.from_config(config(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    with pytest.raises(BraidError, match="this is an encoder"):
        find_parts(model)


def test_an_encoder_that_is_opened_as_a_causal_model_is_refused_too() -> None:
    with pytest.raises(BraidError, match="this is an encoder"):
        find_parts(AutoModelForCausalLM.from_config(BertConfig(**SMALL)))
    find_parts(AutoModelForCausalLM.from_config(BertConfig(**SMALL, is_decoder=True)))


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_ff=24, num_layers=2, num_heads=4, d_kv=4)
    with pytest.raises(BraidError, match="an encoder and a decoder"):
        find_parts(AutoModelForSeq2SeqLM.from_config(config))


def test_where_no_layers_are_found_the_error_says_what_was() -> None:
    model = tiny_decoder("llama")
    model.model.layers.append(nn.Linear(2, 2))
    with pytest.raises(BraidError, match=r"says 4, .* found: model\.layers \(5 x Linear or LlamaDecoderLayer\)"):
        find_parts(model)
    del model.model.layers
    with pytest.raises(BraidError, match="no list of modules at all"):
        find_parts(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(BraidError, match="no head"):
        find_parts(tiny_decoder("llama").model)
