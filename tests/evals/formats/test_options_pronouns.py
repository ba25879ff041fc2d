"""Pronoun agreement counts what a model prefers."""

import torch

from braidlm.data.corpora.stories import PronounPair, pronoun_pairs
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.formats.options import pronoun_accuracy
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM

TOKENIZER = bytes_tokenizer()


def model() -> BraidForCausalLM:
    torch.manual_seed(0)
    architecture = {"width": 16, "context": 32, "stages": ["block"], "block": {"attention": {"heads": 2}}}
    return BraidForCausalLM(BraidConfig(architecture=architecture, vocab_size=TOKENIZER.vocab_size)).eval()


def test_swapping_right_and_wrong_turns_the_score_round() -> None:
    pairs = pronoun_pairs(seed=3, count=20)
    swapped = [PronounPair(pair.prefix, pair.wrong, pair.right) for pair in pairs]
    assert pronoun_accuracy(model(), TOKENIZER, pairs) == 1 - pronoun_accuracy(model(), TOKENIZER, swapped)


def test_it_is_the_share_of_pairs_in_which_the_right_word_is_more_probable() -> None:
    network, pairs = model(), pronoun_pairs(seed=4, count=6)

    def slow(pair: PronounPair, word: str) -> float:
        ids = TOKENIZER.encode(pair.prefix + word)
        size = len(TOKENIZER.encode(word))
        inputs = torch.tensor([ids[:-1][-32:]])
        log_probabilities = network(inputs).logits[0].log_softmax(-1)
        return sum(log_probabilities[-size + i, token].item() for i, token in enumerate(ids[-size:]))

    with torch.no_grad():
        expected = sum(slow(pair, pair.right) > slow(pair, pair.wrong) for pair in pairs) / len(pairs)
    assert pronoun_accuracy(network, TOKENIZER, pairs) == expected
