"""BMLAMA: facts in several languages, every question in each of them (Qi, Fernández and Bisazza, 2023).

As its authors do for causal models: every candidate is put into the sentence's gap, and the sentence with the lowest
perplexity (mean over its tokens, the first given the BOS token) is the model's answer.
"""

from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.text_files import TextFile, files_of, sha256_of_files
from braidlm.evals.formats.multiple_choice import MultipleChoice, Question, metric
from braidlm.evals.tasks.task import TASKS, Task

REPOSITORY = "Cross-Lingual-Consistency"
HEADING = ("Prompt", "Ans", "Candidate Ans", "Subject")
GAP = "<mask>"


class _Bmlama(Task):
    licence = "CC BY-NC-SA 4.0 (mLAMA, of which it is made)"
    metric = metric("per token")
    fetch = f"`git clone https://github.com/Betswish/{REPOSITORY} DATA/{REPOSITORY}` gets it."

    def open(self, path: Path) -> MultipleChoice:
        """The questions of every language: one file each, `en.tsv` and so on."""
        files = files_of(path, ".tsv")
        questions = [question for file in files for question in _questions(file)]
        if not questions:
            raise BraidError("the files have no rows", str(path))
        return MultipleChoice(questions, sha256_of_files(files), headline="per token", begin="bos")


@TASKS.register("bmlama17")
class Bmlama17(_Bmlama):
    """17 languages."""

    description = "BMLAMA-17: which of up to ten answers makes the sentence of least perplexity, in each language"
    size = "6,792 facts in each of up to 17 languages"
    locations = ("bmlama/BMLAMA17", "BMLAMA17", f"{REPOSITORY}/1_easyrun/BMLAMA17")


@TASKS.register("bmlama53")
class Bmlama53(_Bmlama):
    """53 languages."""

    description = "BMLAMA-53: the same with fewer facts in more languages"
    size = "3,070 facts in each of up to 53 languages"
    locations = ("bmlama/BMLAMA53", "BMLAMA53", f"{REPOSITORY}/1_easyrun/BMLAMA53")


def _questions(file: TextFile) -> Iterator[Question]:
    lines = file.text.replace("\r\n", "\n").split("\n")
    if tuple(lines[0].split("\t")) != HEADING:
        raise BraidError(f"the columns are to be {', '.join(HEADING)} (with tabs between)", f"{file.where}, line 1")
    for number, line in enumerate(lines[1:], 2):
        if line.strip():
            yield _question(line.split("\t"), file.stem, f"{file.where}, line {number}")


def _question(cells: list[str], language: str, where: str) -> Question:
    if len(cells) < 3:
        raise BraidError(f"there are {len(cells)} columns, and {len(HEADING)} are expected", where)
    prompt, answer, candidates = cells[0], cells[1].strip(), [each.strip() for each in cells[2].split(", ")]
    if prompt.count(GAP) != 1:
        raise BraidError(f"the sentence is to have one gap, {GAP}", where)
    if answer not in candidates:
        raise BraidError(f"the answer '{answer}' is not among the candidates", where)
    sentences = tuple(("", prompt.replace(GAP, candidate)) for candidate in candidates)
    return Question(sentences, candidates.index(answer), language)
