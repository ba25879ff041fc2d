"""The built-in corpora as a whole: the same everywhere, in any order, and never the same document twice."""

import hashlib
import os
import subprocess
import sys
from itertools import islice
from math import prod

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import CORPORA, document, documents
from braidlm.data.corpora.material import Rng, cast_sizes, spread
from braidlm.data.corpora.problems import KINDS
from braidlm.data.corpora.stories import PLOTS

NAMES = sorted(CORPORA)
SHA256 = {"arithmetic": "2192edc443e32a82", "maths": "214d71167fd6f071", "stories": "fa1ffe5a26fda852"}
"""The first sixteen digits for 500 documents of seeds 0 and 7: models and fixtures were made with these texts."""
PROGRAM = """
import hashlib
from braidlm.data.corpora.builtin import CORPORA, documents
text = "".join(text for name in sorted(CORPORA) for text in documents(name, 7, 5, 50))
raise SystemExit(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.parametrize("corpus", NAMES)
def test_a_document_depends_on_its_arguments_alone(corpus):
    forward = [document(corpus, 3, index) for index in range(200)]
    backward = [document(corpus, 3, index) for index in reversed(range(200))]
    assert forward == backward[::-1]
    assert list(documents(corpus, 3, 50, 20)) == forward[50:70]
    assert list(islice(documents(corpus, 3), 10)) == forward[:10]


def test_another_process_makes_the_same_documents():
    """String hashing differs between processes; nothing may depend on it."""
    here = "".join(text for name in NAMES for text in documents(name, 7, 5, 50))
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False)
    assert there.stderr.strip() == hashlib.sha256(here.encode()).hexdigest()


@pytest.mark.parametrize("corpus", NAMES)
def test_the_texts_are_those_of_every_version(corpus):
    texts = [text for seed in (0, 7) for text in documents(corpus, seed, 0, 500)]
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16] == SHA256[corpus]


@pytest.mark.parametrize("corpus", NAMES)
def test_no_two_of_twenty_thousand_documents_are_alike(corpus):
    digests = {hashlib.md5(text.encode()).digest() for text in documents(corpus, 0, 1_000, 20_000)}
    assert len(digests) == 20_000


@pytest.mark.parametrize("corpus", NAMES)
def test_seeds_make_different_corpora(corpus):
    first, second = (set(documents(corpus, seed, 0, 2_000)) for seed in (0, 1))
    assert not first & second


@pytest.mark.parametrize("kinds", [len(PLOTS), len(KINDS)])
def test_difference_is_certain(kinds):
    """What every document shows repeats only after more than 100,000 documents."""
    assert prod(cast_sizes(kinds)) >= 100_000


@pytest.mark.parametrize("seed", [0, 1, -4, 10**30])
@pytest.mark.parametrize("start", [0, 17, 10**12])
def test_spread_visits_every_combination_once(seed, start):
    sizes = (4, 7, 9)
    seen = {tuple(spread(seed, start + index, sizes)) for index in range(prod(sizes))}
    assert len(seen) == prod(sizes)
    assert all(0 <= digit < size for digits in seen for digit, size in zip(digits, sizes, strict=True))


def test_a_worker_that_takes_every_nth_document_meets_all_kinds():
    for stride in (2, 16, len(KINDS), 100):
        assert len({spread(0, index * stride, cast_sizes(len(KINDS)))[0] for index in range(2_000)}) == len(KINDS)


def test_random_choices_reach_both_ends():
    rng = Rng("ends")
    assert {rng.randint(1, 3) for _ in range(100)} == {1, 2, 3}
    assert {rng.choice("ab") for _ in range(50)} == {"a", "b"}
    assert sorted(rng.sample(range(5), 5)) == [0, 1, 2, 3, 4]


def test_an_unknown_corpus_gets_the_nearest_name():
    with pytest.raises(BraidError, match=r"unknown corpus 'storys'\. Did you mean 'stories'\?"):
        document("storys", 0, 0)
    with pytest.raises(BraidError, match="There are: arithmetic, maths, stories"):
        documents("wikipedia", 0)
