"""BMLAMA: facts in several languages, every question in each of them (Qi, Fernández and Bisazza, 2023).

As its authors do for causal models, every candidate is put into the sentence's gap, and the sentence with the lowest
perplexity (mean over its tokens, the first given the BOS token) is the model's answer.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

from braidlm.core.errors import BraidError
from braidlm.evals.formats.options import Item, MultipleChoice, metric
from braidlm.evals.rows import Row, files_of, sha256_of_files, table_rows
from braidlm.evals.tasks.task import TASKS, Task

REPOSITORY = "Cross-Lingual-Consistency"


class _Bmlama(Task):
    licence = "CC BY-NC-SA 4.0 (mLAMA, of which it is made)"
    metric = metric("per token")
    fetch = f"`git clone https://github.com/Betswish/{REPOSITORY} DATA/{REPOSITORY}` gets it."

    def open(self, path: Path) -> MultipleChoice:
        """The questions of every language: one file each, `en.tsv` and so on."""
        files = files_of(path, "*.tsv")
        columns = ("Prompt", "Ans", "Candidate Ans")
        items = [self.fact(row) for file in files for row in table_rows(file, needed=columns)]
        if not items:
            raise BraidError("the files have no rows", str(path))
        return MultipleChoice(items, sha256_of_files(files), headline="per token", begin="bos")

    def fact(self, row: Row) -> Item:
        """One row as a sentence with each of the candidates."""
        prompt, answer = row.text("Prompt"), row.text("Ans").strip()
        candidates = [each.strip() for each in row.text("Candidate Ans").split(", ")]
        if prompt.count("<mask>") != 1:
            raise row.error("the sentence is to have one gap, <mask>")
        if answer not in candidates:
            raise row.error(f"the answer '{answer}' is not among the candidates")
        sentences = tuple(("", prompt.replace("<mask>", candidate)) for candidate in candidates)
        return Item(sentences, row.stem, answer=candidates.index(answer))


class _BmlamaOfThree(_Bmlama):
    """Two wrong candidates are drawn for each fact, as ModuleFormer's authors do; the draw is always the same."""

    def fact(self, row: Row) -> Item:
        item = super().fact(row)
        wrong = [number for number in range(len(item.options)) if number != item.answer]
        kept = sorted([item.answer, *Random(item.options[item.answer][1]).sample(wrong, min(2, len(wrong)))])
        return replace(item, options=tuple(item.options[number] for number in kept), answer=kept.index(item.answer))


_of_17, _of_53 = ((f"bmlama/{name}", name, f"{REPOSITORY}/1_easyrun/{name}") for name in ("BMLAMA17", "BMLAMA53"))
_size = "6,792 facts in each of up to 17 languages"
_about = "BMLAMA-17: which of up to ten answers makes the sentence of least perplexity, in each language"
TASKS.declare("bmlama17", _Bmlama, _about, _size, locations=_of_17)
_size = "3,070 facts in each of up to 53 languages"
_about = "BMLAMA-53: the same with fewer facts in more languages"
TASKS.declare("bmlama53", _Bmlama, _about, _size, locations=_of_53)
_about = "BMLAMA-53 with the right answer and two others of its candidates, as ModuleFormer asks mLAMA"
TASKS.declare("bmlama53_of_3", _BmlamaOfThree, _about, _size, locations=_of_53)
