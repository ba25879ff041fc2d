"""Multiple choice by the probability of options: raw, per token and per byte, to the last item."""

import random

import numpy as np
import pytest

from braidlm.data.tokenizing.build import bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats import options
from braidlm.evals.formats.options import Item, MultipleChoice, beginnings, endings, spaces_moved
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.plain_scorer import plain_sum
from tests.tiny_models import tiny_model

WORDS = ("the", "cat", "sat", "on", "a", "mat", "dogs", "ran", "übermut", "away", "blue", "sky")


def tokenizer() -> BraidTokenizer:
    return BraidTokenizer(train_bpe([" ".join(WORDS)] * 20 + ["cat mat sat"] * 5, 320), SpecialTokens())


def questions(count: int = 40) -> list[Item]:
    rng = random.Random(5)

    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    return [
        endings(text(6) + rng.choice(("", ":", " ")), [text(4) for _ in range(rng.choice((2, 4)))], 0, rng.choice("ab"))
        for _ in range(count)
    ]


def evaluated(coder: BraidTokenizer, context: int = 64, **options: int) -> EvaluatedModel:
    return EvaluatedModel(Scorer(tiny_model(vocab_size=coder.vocab_size, context=context), **options), coder)


def plain_answers(model: EvaluatedModel, question: Item) -> dict[str, int]:
    """Option by option: the tokens of the whole behind those of the context."""
    sums, tokens, sizes = [], [], []
    for context, option in question.options:
        bare = context.rstrip()
        whole = model.tokenizer.encode(context + option)
        first = len(model.tokenizer.encode(bare))
        sums.append(plain_sum(model.model, whole, first))
        tokens.append(len(whole) - first)
        sizes.append(len(option[1:].encode()))
    ways = {"raw": sums, "per token": np.divide(sums, tokens), "per byte": np.divide(sums, sizes)}
    return {name: int(np.argmax(values)) for name, values in ways.items()}


@pytest.mark.parametrize("headline", options.MEASURES)
def test_it_agrees_with_the_plain_way(headline: options.Measure) -> None:
    model, some = evaluated(tokenizer()), questions()
    answers = [plain_answers(model, question) for question in some]
    assert len({tuple(answer.values()) for answer in answers}) > 3, "the three ways differ somewhere"
    result = MultipleChoice(some, "hash", headline).evaluate("t", model)
    assert result.items["chosen"] == [answer[headline] for answer in answers]
    for name in options.MEASURES:
        assert result.also[name] == pytest.approx(100 * np.mean([answer[name] == 0 for answer in answers]))
    assert result.score == result.also[headline]
    assert (result.count, result.metric) == (40, options.metric(headline))
    halves = [len(question.options) == 2 for question in some]
    assert result.chance == pytest.approx(100 * np.mean([0.5 if half else 0.25 for half in halves]))


def test_parts_chance_and_errors() -> None:
    model, some = evaluated(tokenizer()), questions()
    result = MultipleChoice(some, "hash").evaluate("t", model)
    sizes = {name: sum(question.of == name for question in some) for name in "ab"}
    assert {name: part.count for name, part in result.parts.items()} == sizes
    whole = sum(part.score * part.count for part in result.parts.values()) / 40
    assert result.score == pytest.approx(whole), "over all questions, not over subjects"
    share = result.score / 100
    assert result.standard_error == pytest.approx(100 * (share * (1 - share) / 40) ** 0.5)
    alone = MultipleChoice([endings("the cat", ["sat", "ran"], 1)], "hash").evaluate("t", model)
    assert (alone.parts, alone.standard_error) == ({}, None)


def test_where_options_are_always_the_same_the_more_frequent_one_is_the_baseline() -> None:
    some = [endings("is it", ["no", "yes"], answer) for answer in (1, 1, 0, 1)]
    model = evaluated(tokenizer())
    assert MultipleChoice(some, "hash", fixed_options=True).evaluate("t", model).chance == 75
    assert MultipleChoice(some, "hash").evaluate("t", model).chance == 50


def test_how_much_runs_at_once_changes_nothing() -> None:
    results = [
        MultipleChoice(questions(), "hash").evaluate("t", evaluated(tokenizer(), tokens_per_pass=places, share=share))
        for places, share in ((1, True), (64, False), (4096, True))
    ]
    assert results[0] == results[1] == results[2]


def test_beginnings_are_judged_by_what_follows() -> None:
    model = evaluated(tokenizer())
    question = beginnings(["the cat", "the dogs"], "ran away", 1)
    assert question.options == (("the cat", " ran away"), ("the dogs", " ran away"))
    encode = model.tokenizer.encode
    sums = [
        plain_sum(model.model, encode(context + ending), len(encode(context))) for context, ending in question.options
    ]
    result = MultipleChoice([question], "hash").evaluate("t", model)
    assert result.items["chosen"] == [int(np.argmax(sums))]


def test_equal_options_are_counted_and_the_first_is_taken() -> None:
    some = [endings("the cat", ["sat", "sat"], answer) for answer in (0, 1)]
    result = MultipleChoice(some, "hash").evaluate("t", evaluated(tokenizer()))
    assert (result.notes["ties"], result.score) == (2, 50)


def test_a_long_context_loses_its_beginning_and_is_counted() -> None:
    coder = bytes_tokenizer()
    model = evaluated(coder, context=16)
    long = endings("x" * 40 + "abcdefgh", ["one", "two"], 0)
    short = endings("xxxxxxxxxxxxabcdefgh"[-12:], ["one", "two"], 0)
    result = MultipleChoice([long, endings("ab", ["one", "two"], 0)], "hash").evaluate("t", model)
    assert (result.notes["shortened"], result.notes["in windows"]) == (1, 0), "questions, not options"
    assert MultipleChoice([short], "hash").evaluate("t", model).notes["shortened"] == 0
    wholes = [[*("x" * 40 + "abcdefgh" + option).encode()][-17:] for option in (" one", " two")]
    sums = [plain_sum(model.model, ids, 13) for ids in wholes]
    assert result.items["chosen"][0] == int(np.argmax(sums))


def test_spaces_at_the_end_of_a_context_are_scored() -> None:
    assert spaces_moved("a b \n", " c") == ("a b", " \n c")
    assert spaces_moved("a b", " c") == ("a b", " c")


def test_a_text_without_context_begins_with_the_beginning() -> None:
    coder = tokenizer()
    model = evaluated(coder)
    assert coder.bos_id is not None
    question = Item((("", "the cat sat"), ("", "cat the sat")))
    sums = [plain_sum(model.model, [coder.bos_id, *coder.encode(text)]) for _, text in question.options]
    tokens = [len(coder.encode(text)) for _, text in question.options]
    result = MultipleChoice([question], "hash", "per token", begin="bos").evaluate("t", model)
    assert result.items["chosen"] == [int(np.argmax(np.divide(sums, tokens)))]
