"""WikiText by pages: bits per byte and perplexity per word of the original text, whatever the tokenizer.

As lm-evaluation-harness does (tasks/wikitext): a page is a document by itself, its text is detokenized ("a @-@ b" is
"a-b") before it is scored, and its log-probability is divided by the words and bytes of the original page. So the
numbers of models with different tokenizers can be compared.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import bits_per_byte, encode_long, window_of
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import begin_id
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import sliding_windows
from braidlm.evals.statistics.influence import INFLUENCE, ratio_influences
from braidlm.evals.statistics.standard_errors import ratio_error

SPELLINGS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
"""Replaced first: separators in numbers, spaces before punctuation."""
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

    @property
    def count(self) -> int:
        return sum(map(len, self.splits.values()))

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Bits per byte of the first split; of every split that and the perplexity per word."""
        trees, sizes = self._prepare(model.scorer, model.tokenizer)
        tokens = model.scorer.score_trees(trees, advance).tokens
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
            items={INFLUENCE: ratio_influences(-sums[: len(pages)] / math.log(2), lengths)},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[PrefixTrees, np.ndarray]:
        window = window_of(scorer)
        bos = begin_id(tokenizer)
        encoded = [encode_long(tokenizer, detokenized(page)) for pages in self.splits.values() for page in pages]
        requests = [request for ids in encoded for request in sliding_windows(ids, bos, window)]
        return PrefixTrees(requests, share=False), np.array([len(ids) for ids in encoded])


def pages_of(text: str) -> list[str]:
    """A file of WikiText in pages, which begin with a heading of the first level (` = Title = `)."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        bare = line.replace("= = =", "===").replace("= =", "==").strip()
        if bare.startswith("= ") and bare.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    texts = ["\n".join(lines) for lines in pages]
    return [page for page in texts if page.strip()]


def detokenized(page: str) -> str:
    """The text of a page without the marks and spaces of WikiText's tokenization."""
    page = _replaced(page, SPELLINGS)
    for pattern, replacement in ENCLOSED:
        page = re.sub(pattern, replacement, page)
    return _replaced(page, REST)


def words(page: str) -> int:
    """The words of an original page, counted as lm-evaluation-harness counts them."""
    return len(re.split(r"\s+", page))


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
