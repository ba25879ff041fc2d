"""Texts that a model writes while it is trained."""

from braidlm.data.braid_tokenizer import BraidTokenizer
from braidlm.model.decoding import Decoder, Sampling, decode_tokens
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.recipe import SampleConfig


def write_samples(
    model: BraidForCausalLM, tokenizer: BraidTokenizer, config: SampleConfig, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs; a generator of its own leaves the training's random state alone."""
    prompts = [tokenizer.encode(prompt) or [tokenizer.eos_id or 0] for prompt in config.prompts]
    length = max(map(len, prompts)) + config.tokens
    was_training = model.training
    decoder = Decoder(model, len(prompts), length, graph=False)
    sampling = Sampling(temperature=config.temperature, seed=seed)
    texts: list[list[int]] = [[] for _ in prompts]
    for tokens, _ in decode_tokens(decoder, prompts, config.tokens, sampling, tokenizer.eos_id):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None and token != tokenizer.eos_id:
                text.append(token)
    model.train(was_training)
    return [(prompt, tokenizer.decode(text)) for prompt, text in zip(config.prompts, texts, strict=True)]
