"""Text that a model predicts: your own, and WikiText-2, articles of Wikipedia, the field's usual text for perplexity.

WikiText-2 is scored as lm-evaluation-harness does (tasks/wikitext): a page is a document by itself, its text is
detokenized ("a @-@ b" is "a-b") before it is scored, and its log-probability is divided by the words and bytes of the
original page, so that models with different tokenizers can be compared.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.encoding import Cutter
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.held_out_text import READING, HeldOutText, bits_result, document_sums, read_text, window_of
from braidlm.evals.results import TaskResult
from braidlm.evals.rows import TextFile, files_of, rows_of, sha256_of_files
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import begin_id, sliding_windows
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.tasks.task import TASKS, HubSource, Task

NAMES = {
    "test": ("test.txt", "wiki.test.tokens", "wiki.test.raw", "test.jsonl"),
    "valid": ("valid.txt", "validation.txt", "wiki.valid.tokens", "wiki.valid.raw", "validation.jsonl", "valid.jsonl"),
}
EXAMPLE = '{"page": " = Title = \\n\\n Text . \\n"}'
SPELLINGS = (
    # Separators in numbers, spaces before punctuation,
    *(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (r" @\.@ ", "."), *((f" [{x}] ", f"{x} ") for x in ":;.!?,")),
    # inside brackets and inside quotes,
    *((r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}")),
    *((r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'")),
    # and the rest.
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
"""Replaced one after another."""


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
        sums = document_sums(model.scorer.score_trees(trees, advance).tokens, sizes)
        names = [name for name, pages in self.splits.items() for _ in pages]
        lengths = np.array([len(page.encode()) for pages in self.splits.values() for page in pages])
        also = {}
        for name, pages in self.splits.items():
            total = float(sums[np.array(names) == name].sum())
            also[f"perplexity per word, {name}"] = math.exp(-total / sum(map(words, pages)))
        notes = {"tokens": sum(sizes), "window": window_of(model.scorer)}
        first = slice(0, names.count(names[0]))
        return bits_result(task, f"bits per byte ({names[0]})", sums, lengths, names, first, also=also, notes=notes)

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[PrefixTrees, list[int]]:
        window, bos, cutter = window_of(scorer), begin_id(tokenizer), Cutter(tokenizer)
        encoded = [cutter.encode(detokenized(page)) for pages in self.splits.values() for page in pages]
        requests = [request for ids in encoded for request in sliding_windows(ids, bos, window)]
        return PrefixTrees(requests, share=False), [len(ids) for ids in encoded]


def pages_in(file: TextFile) -> list[str]:
    """The pages of a file, JSONL with a page in each row or one of WikiText's own."""
    if file.name.endswith(".jsonl"):
        return [row.text("page") for row in rows_of([file], file.where, EXAMPLE)]
    return pages_of(file.text)


def pages_of(text: str) -> list[str]:
    """A file of WikiText in pages, which begin with a heading of the first level (` = Title = `)."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        bare = line.replace("= = =", "===").replace("= =", "==").strip()
        if bare.startswith("= ") and bare.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return [page for page in map("\n".join, pages) if page.strip()]


def detokenized(page: str) -> str:
    """The text of a page without the marks and spaces of WikiText's tokenization."""
    for pattern, replacement in SPELLINGS:
        page = re.sub(pattern, replacement, page)
    return page


def words(page: str) -> int:
    """The words of an original page, counted as lm-evaluation-harness counts them."""
    return len(re.split(r"\s+", page))


@TASKS.register("wikitext2")
class WikiText2(Task):
    """Test and validation, by pages (lm-evaluation-harness, tasks/wikitext, reads the raw version)."""

    description = "WikiText-2: bits per byte of the original text; perplexity per word beside it"
    size = "62 pages (test) and 60 (validation)"
    licence = "CC BY-SA (Wikipedia)"
    metric = "bits per byte (test)"
    locations = ("choice/wikitext2", "wikitext2", "wikitext-2", "wikitext-2-raw")
    hub = HubSource("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", ("test", "validation"))

    def open(self, path: Path) -> WikiPages:
        if path.is_file():
            files = {path.stem: files_of(path)[0]}
        else:
            paths = {split: [path / n for n in names if (path / n).is_file()] for split, names in NAMES.items()}
            files = {split: files_of(candidates[0])[0] for split, candidates in paths.items() if candidates}
        splits = {split: pages for split, file in files.items() if (pages := pages_in(file))}
        if not splits:
            raise BraidError(f"there is no {' and no '.join(names[0] for names in NAMES.values())} here", str(path))
        return WikiPages(splits, sha256_of_files(list(files.values())))


@TASKS.register("bits_per_byte")
class BitsPerByte(Task):
    """Any text that was not trained on."""

    description = "how well a model predicts text of yours, whatever its tokenizer; lower is better"
    size = "a file, a folder of files, or a packed data set"
    licence = "your own"
    metric = "bits per byte"
    locations = ("dev", "validation")
    fetch = "Give text that the models were not trained on: `--data bits_per_byte=PATH`, text or a packed data set."
    uses = (*READING, "window")
    version = 2

    def open_with(self, paths: Mapping[str, Path], settings: Settings) -> HeldOutText:
        (path,) = paths.values()
        return read_text(path, settings)
