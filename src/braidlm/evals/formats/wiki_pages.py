"""WikiText by pages: bits per byte and perplexity per word of the original text, whatever the tokenizer.

As lm-evaluation-harness does (tasks/wikitext): a page is a document by itself, its text is put back into usual
spelling ("a @-@ b" is "a-b") before it is read, and what the model needs for it is divided by the words and bytes of
the page as it was. So the numbers of models with different tokenizers can be compared.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.formats.held_text import encoded, ratio_error, window_of
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest
from braidlm.evals.scoring.ngrams import bits_per_byte
from braidlm.evals.scoring.rolling import rolling_requests
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.texts import begin_id
from braidlm.evals.statistics.influence import KEY, of_ratio

SPELLINGS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
"""What is replaced first: separators in numbers, spaces before punctuation."""
ENCLOSED = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
"""Spaces inside brackets and quotes."""
REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


@dataclass
class WikiPages:
    """The pages of each split; the first split gives the score."""

    splits: dict[str, list[str]]
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return sum(map(len, self.splits.values()))

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Bits per byte of the first split; of every split that and the perplexity per word."""
        forest, sizes = self._lay(model.scorer, model.tokenizer)
        tokens = model.scorer.score_forest(forest, advance).tokens
        sums = np.add.reduceat(tokens, np.concatenate(([0], np.cumsum(sizes)[:-1])))
        parts, also, begin = {}, {}, 0
        for name, pages in self.splits.items():
            total = float(sums[begin : begin + len(pages)].sum())
            parts[name] = Part(bits_per_byte(total, sum(len(page.encode()) for page in pages)), len(pages))
            also[f"perplexity per word, {name}"] = math.exp(-total / sum(map(words, pages)))
            begin += len(pages)
        name, pages = next(iter(self.splits.items()))
        lengths = np.array([len(page.encode()) for page in pages])
        return TaskResult(
            task=task,
            metric=f"bits per byte ({name})",
            score=parts[name].score,
            count=self.count,
            standard_error=ratio_error(-sums[: len(pages)] / math.log(2), lengths, parts[name].score),
            higher_is_better=False,
            parts=parts,
            also=also,
            notes={"tokens": int(sizes.sum()), "window": window_of(model.scorer)},
            items={KEY: of_ratio(-sums[: len(pages)] / math.log(2), lengths)},
        )

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[Forest, np.ndarray]:
        """Windows, and the tokens of each page; kept, because the checkpoints of a run have one tokenizer."""
        window = window_of(scorer)
        key = (tokenizer.fingerprint, window)
        if key not in self._laid:
            before = begin_id(tokenizer)
            coded = [encoded(tokenizer, usual_spelling(page)) for pages in self.splits.values() for page in pages]
            requests = [request for ids in coded for request in rolling_requests(ids, before, window)]
            self._laid = {key: (Forest(requests, share=False), np.array([len(ids) for ids in coded]))}
        return self._laid[key]


def pages_of(text: str) -> list[str]:
    """A file of WikiText in pages, which begin with a heading of the first level (` = Title = `)."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        bare = line.replace("= = =", "===").replace("= =", "==").strip()
        if bare.startswith("= ") and bare.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    found = ["\n".join(lines) for lines in pages]
    return [page for page in found if page.strip()]


def usual_spelling(page: str) -> str:
    """The text of a page without the marks and spaces of WikiText's tokens."""
    page = _replaced(page, SPELLINGS)
    for pattern, shape in ENCLOSED:
        page = re.sub(pattern, shape, page)
    return _replaced(page, REST)


def words(page: str) -> int:
    """The words of a page as it was, counted as lm-evaluation-harness counts them."""
    return len(re.split(r"\s+", page))


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
