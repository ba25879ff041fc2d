"""Does a model agree pronouns with the character they stand for? The built-in stories' own test."""

from collections.abc import Sequence

from braidlm.data.corpora.stories.generator import PronounPair
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.modeling_braid import BraidForCausalLM


def pronoun_accuracy(model: BraidForCausalLM, tokenizer: BraidTokenizer, pairs: Sequence[PronounPair]) -> float:
    """The share of pairs in which the agreeing pronoun is more probable than the other."""
    requests = []
    for pair in pairs:
        prefix = [*tokenizer.beginning, *tokenizer.encode(pair.prefix)]
        requests += [Request([*prefix, *tokenizer.encode(word)], len(prefix)) for word in (pair.right, pair.wrong)]
    sums = Scorer(model).score(requests).sums
    return float((sums[0::2] > sums[1::2]).mean())
