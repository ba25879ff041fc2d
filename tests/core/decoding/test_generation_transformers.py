"""Decoding with models of transformers, against their own `generate`."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
)

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.generation import TransformersDecoder, decoder_for, next_tokens
from braidlm.core.errors import BraidError
from tests.tiny_models import ToyTokenizer, randomised, tiny_model

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=24),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=1),
    "phi": PhiConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
}
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


def small(name: str) -> AutoModelForCausalLM:
    return randomised(AutoModelForCausalLM.from_config(CONFIGS[name])).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_together_are_those_of_generate_one_by_one(name: str) -> None:
    model = small(name)
    decoder = decoder_for(model, len(PROMPTS), 20)
    assert isinstance(decoder, TransformersDecoder)
    steps = [tokens for tokens, _ in decode_tokens(decoder, PROMPTS, 8, Sampling(temperature=0))]
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert [step[number] for step in steps] == expected.tolist()


def test_texts_end_at_the_limit_of_positions() -> None:
    decoder = TransformersDecoder(small("gpt2"), 100)
    assert decoder.length == 24
    assert len(list(decode_tokens(decoder, [[1] * 20], 50, Sampling(temperature=0)))) == 5
    with pytest.raises(BraidError, match="the prompt has 24 tokens, and the model's limit is 24"):
        decoder.prefill(torch.ones(1, 24, dtype=torch.long))


def test_next_tokens_are_the_models_own_probabilities() -> None:
    model, tokenizer = small("llama"), ToyTokenizer()
    tokenizer.encode = lambda text: [int(word) for word in text.split()]  # type: ignore[attr-defined]
    tokenizer.decode = lambda ids, **_: f"w{ids[0]}"  # type: ignore[attr-defined]
    (best,) = next_tokens(model, tokenizer, ["5 6 7"], 3)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).topk(3)
    assert [token.id for token in best] == expected.indices.tolist()
    assert [token.probability for token in best] == pytest.approx(expected.values.tolist())


def test_braids_models_keep_their_own_decoder() -> None:
    assert isinstance(decoder_for(tiny_model(), 1, 8), Decoder)
