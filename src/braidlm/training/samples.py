"""Texts that a model writes while it is trained."""

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import continue_text
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.recipe import SampleConfig


def write_samples(
    model: BraidForCausalLM, tokenizer: BraidTokenizer, config: SampleConfig, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs; a generator of its own leaves the training's random state alone."""
    texts = ["" for _ in config.prompts]
    was_training = model.training
    sampling = Sampling(temperature=config.temperature, seed=seed)
    # A captured graph would hold memory that the training needs, for texts too short to win it back.
    for piece in continue_text(model, tokenizer, config.prompts, config.tokens, sampling, graph=False):
        texts[piece.prompt] += piece.text
    model.train(was_training)
    return list(zip(config.prompts, texts, strict=True))
