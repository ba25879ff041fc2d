"""Which tokens of a text are scored: the tokenizer's own beginning, the place where a continuation begins."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.scoring.requests import begin_id, requests_for

WORDS = ("<s>", "</s>", "a", "b", "c", "d")


def word_tokenizer(template: str | None = None) -> BraidTokenizer:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return BraidTokenizer(backend, SpecialTokens(eos="</s>", bos="<s>", pad=None))


def test_without_a_beginning_the_first_token_is_not_scored() -> None:
    (request,) = requests_for(word_tokenizer(), [("", "a b c")])
    assert (list(request.ids), request.first) == ([2, 3, 4], 1)


def test_the_tokenizers_own_beginning_is_read_and_its_end_left_out() -> None:
    (request,) = requests_for(word_tokenizer("<s> $A </s>"), [("", "a b c")])
    assert (list(request.ids), request.first) == ([0, 2, 3, 4], 1)


def test_a_beginning_on_request_and_not_twice() -> None:
    for template in (None, "<s> $A"):
        (request,) = requests_for(word_tokenizer(template), [("", "a b")], begin="bos")
        assert (list(request.ids), request.first) == ([0, 2, 3], 1)


def test_a_continuation_begins_where_its_characters_do() -> None:
    tokenizer = word_tokenizer("<s> $A")
    context, begun, empty = requests_for(tokenizer, [("a b", " c d"), ("", "c d"), ("a b c", "")])
    assert (list(context.ids), context.first) == ([0, 2, 3, 4, 5], 3)
    assert begun.first == 1
    assert empty.first == len(empty.ids) == 4


def test_a_token_that_reaches_into_the_continuation_is_scored() -> None:
    backend = train_bpe(["cats and cats and cats"] * 20, 300)
    tokenizer = BraidTokenizer(backend, SpecialTokens())
    whole = tokenizer.encode("cats and cats")
    (request,) = requests_for(tokenizer, [("cats and c", "ats")])
    assert list(request.ids) == whole
    assert request.first == len(whole) - 1, "' cats' is one token, and part of it is to be scored"


def test_text_is_only_text() -> None:
    tokenizer = bytes_tokenizer()
    (request,) = requests_for(tokenizer, [("", "<|endoftext|>ü")])
    assert list(request.ids) == list("<|endoftext|>ü".encode())


def test_long_lists_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [("a", f" {word}") for word in "abcd" * 3]
    whole = requests_for(word_tokenizer(), texts)
    monkeypatch.setattr("braidlm.evals.scoring.requests.BATCH", 5)
    assert requests_for(word_tokenizer(), texts) == whole


def test_a_tokenizer_with_no_beginning_and_no_end() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(BraidError, match="the tokenizer has no token that begins or ends a text"):
        begin_id(BraidTokenizer(backend, SpecialTokens(eos=None, bos=None, pad=None, order=())))
