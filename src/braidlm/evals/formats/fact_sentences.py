"""Multilingual facts: which of some answers makes a sentence of least perplexity?

As the authors of BMLAMA do for causal models: every candidate is put into the sentence's gap, and the sentence with the
lowest perplexity (mean over its tokens, the first given the token that begins a text) is the model's answer.
"""

from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.json_rows import TextFile, files_of, sha256_of_files, text_of
from braidlm.evals.formats.multiple_choice import MultipleChoice, Question

HEADING = ("Prompt", "Ans", "Candidate Ans", "Subject")
GAP = "<mask>"


def read_facts(folder: Path) -> MultipleChoice:
    """The questions of every language: one file each, `en.tsv` and so on."""
    files = files_of(folder, ".tsv")
    questions = [question for file in files for question in _questions(file)]
    if not questions:
        raise BraidError("the files have no rows", str(folder))
    return MultipleChoice(questions, sha256_of_files(files), headline="per token", begin="bos")


def _questions(file: TextFile) -> Iterator[Question]:
    lines = text_of(file).replace("\r\n", "\n").split("\n")
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
