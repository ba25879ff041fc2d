"""Benchmarks of multiple choice that many papers report without fine-tuning, LAMBADA and BMLAMA.

Prompts are those of lm-evaluation-harness, without examples before them. Rows have the fields of the data set on the
Hub, or a complete prompt and options (`query`, `choices`, `gold`).

BMLAMA asks for facts in several languages, every question in each of them (Qi, Fernández and Bisazza, 2023), as its
authors do for causal models: every candidate is put into the sentence's gap, and the sentence with the lowest
perplexity (mean over its tokens, the first given the BOS token) is the model's answer.
"""

import re
from abc import abstractmethod
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.formats.multiple_choice import (
    LastWords,
    Measure,
    MultipleChoice,
    Question,
    beginnings,
    endings,
    metric,
)
from braidlm.evals.rows import Row, Rows, files_of, question_rows, sha256_of_files, table_rows
from braidlm.evals.tasks.task import TASKS, HubSource, Task

EXAMPLE = '{"query": "The sky is", "choices": ["blue", "loud"], "gold": 0}'
PASSAGE_EXAMPLE = '{"text": "She went back for her hat, and there it was: her hat"}'
NO_YES = ("no", "yes")


class ChoiceTask(Task):
    """A task whose rows are questions."""

    headline: Measure = "raw"
    hub: HubSource
    fixed_options = False

    def __init_subclass__(cls) -> None:
        cls.metric = metric(cls.headline)

    def open(self, path: Path) -> MultipleChoice:
        rows = self.rows(path)
        questions = [self.question(row) for row in rows]
        return MultipleChoice(questions, rows.sha256, self.headline, fixed_options=self.fixed_options)

    def rows(self, path: Path) -> Rows:
        """Read the rows."""
        return question_rows(path, EXAMPLE)

    @abstractmethod
    def question(self, row: Row) -> Question:
        """One row as a question."""


def labelled_options(row: Row) -> tuple[list[str], int]:
    """Options and answer of a row with `choices: {text, label}` and `answerKey`."""
    choices = row.inner("choices")
    texts, labels = choices.texts("text"), choices.texts("label")
    if len(texts) != len(labels):
        raise row.error(f"there are {len(texts)} options and {len(labels)} labels")
    return texts, row.label("answerKey", labels)


def numbered_options(row: Row, options: str = "choices", answer: str = "gold") -> tuple[list[str], int]:
    """Options and answer of a row with a list of options and the index of the right one, counted from 0."""
    choices = row.texts(options)
    return choices, row.label(answer, range(len(choices)))


class _Arc(ChoiceTask):
    """`Question: ...\\nAnswer:` and an option (lm-evaluation-harness, tasks/arc)."""

    licence = "CC BY-SA 4.0"

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(f"{row.text('query').rstrip()}\nAnswer:", *numbered_options(row))
        return endings(f"Question: {row.text('question')}\nAnswer:", *labelled_options(row))


TASKS.declare(
    "arc_easy",
    _Arc,
    description="ARC, easy set: science questions of schools",
    size="2,376 questions, mostly of 4 options",
    locations=("choice/arc_easy.jsonl", "arc_easy.jsonl", "arc_easy"),
    hub=HubSource("allenai/ai2_arc", "ARC-Easy"),
)
TASKS.declare(
    "arc_challenge",
    _Arc,
    description="ARC, challenge set: those that retrieval and word counts get wrong",
    size="1,172 questions, mostly of 4 options",
    headline="per byte",
    locations=("choice/arc_challenge.jsonl", "arc_challenge.jsonl", "arc_challenge"),
    hub=HubSource("allenai/ai2_arc", "ARC-Challenge"),
)


@TASKS.register("boolq")
class BoolQ(ChoiceTask):
    """`Passage\\nQuestion: ...?\\nAnswer:` and yes or no (lm-evaluation-harness, tasks/super_glue/boolq)."""

    description = "BoolQ, zero-shot: is yes or no more probable after a passage and a question (62.2% are yes)"
    size = "3,270 questions (validation)"
    licence = "CC BY-SA 3.0"
    locations = ("choice/boolq.jsonl", "boolq.jsonl", "boolq")
    hub = HubSource("aps/super_glue", "boolq", ("validation",))
    fixed_options = True

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            prompt = row.text("query").removeprefix("Passage: ").rstrip()
            return endings(f"{prompt}\nAnswer:", NO_YES, row.label("gold", (0, 1)))
        prompt = f"{row.text('passage')}\nQuestion: {row.text('question')}?\nAnswer:"
        key = "answer" if "answer" in row.fields else "label"  # BoolQ's own files, and SuperGLUE's
        value = row.value(key)
        return endings(prompt, NO_YES, int(value) if isinstance(value, bool) else row.label(key, (0, 1)))


@TASKS.register("hellaswag")
class HellaSwag(ChoiceTask):
    """`Activity: what happens` and an ending, cleaned as lm-evaluation-harness does (tasks/hellaswag).

    Rows with only `question` (the scene), `choices` by letter and `answer` have no activity before the scene.
    """

    description = "HellaSwag: which of four endings follows a scene"
    size = "10,042 scenes (validation), or as many as the file has"
    licence = "MIT"
    headline = "per byte"
    locations = ("choice/hellaswag.jsonl", "hellaswag.jsonl", "hellaswag", "choice/hellaswag-2000.json")
    hub = HubSource("Rowan/hellaswag", None, ("validation",))

    def question(self, row: Row) -> Question:
        if "endings" in row.fields:
            choices, answer = numbered_options(row, "endings", "label")
            scene = f"{row.text('activity_label')}: {row.text('ctx_a')} {str(row.value('ctx_b')).capitalize()}"
            return endings(cleaned(scene), [cleaned(choice) for choice in choices], answer)
        letters = row.inner("choices")
        choices = [cleaned(letters.text(letter)) for letter in sorted(letters.fields)]
        return endings(cleaned(row.text("question")).lstrip(), choices, row.label("answer", sorted(letters.fields)))


def cleaned(text: str) -> str:
    """A scene without the marks in brackets that WikiHow's part has."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


@TASKS.register("openbookqa")
class OpenBookQA(ChoiceTask):
    """The question's stem and an option (lm-evaluation-harness, tasks/openbookqa)."""

    description = "OpenBookQA: elementary science, which of four endings is true"
    size = "500 questions"
    licence = "none is stated (see allenai.org/data/open-book-qa)"
    headline = "per byte"
    locations = ("choice/openbook_qa.jsonl", "openbook_qa.jsonl", "openbookqa.jsonl", "openbookqa")
    hub = HubSource("allenai/openbookqa", "main")

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(row.text("query"), *numbered_options(row))
        return endings(row.text("question_stem"), *labelled_options(row))


@TASKS.register("piqa")
class Piqa(ChoiceTask):
    """`Question: ...\\nAnswer:` and a solution (lm-evaluation-harness, tasks/piqa)."""

    description = "PIQA: which of two ways to reach an everyday goal works"
    size = "1,838 goals (validation)"
    licence = "AFL 3.0"
    locations = ("choice/piqa.jsonl", "piqa.jsonl", "piqa")
    hub = HubSource("baber/piqa", None, ("validation",))

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(f"{row.text('query').rstrip()}\nAnswer:", *numbered_options(row))
        solutions = [row.text("sol1"), row.text("sol2")]
        return endings(f"Question: {row.text('goal')}\nAnswer:", solutions, row.label("label", (0, 1)))


@TASKS.register("winogrande")
class WinoGrande(ChoiceTask):
    """Partial evaluation (Trinh and Le, 2018): only what follows the gap is scored, as in lm-evaluation-harness
    (tasks/winogrande)."""

    description = "WinoGrande: which of two names fits a gap, by the probability of the rest of the sentence"
    size = "1,267 sentences"
    licence = "CC BY"
    locations = ("choice/winogrande.jsonl", "winogrande.jsonl", "winogrande")
    hub = HubSource("allenai/winogrande", "winogrande_xl", ("validation",))

    def question(self, row: Row) -> Question:
        if "context_options" in row.fields:
            contexts, answer = numbered_options(row, "context_options")
            return beginnings(contexts, row.text("continuation"), answer)
        before, gap, after = row.text("sentence").partition("_")
        if not gap or not after.strip():
            raise row.error("'sentence' is to have a gap (_) and something behind it")
        contexts = [before + row.text(option) for option in ("option1", "option2")]
        return beginnings(contexts, after.strip(), row.label("answer", (1, 2)))


@TASKS.register("lambada")
class Lambada(Task):
    """The passages as OpenAI wrote them for GPT-2 (lm-evaluation-harness, tasks/lambada/lambada_openai)."""

    description = "LAMBADA: the last word of a passage, by the most probable tokens; its perplexity beside it"
    size = "5,153 passages"
    licence = "CC BY 4.0 (LAMBADA)"
    metric = "accuracy, %"
    locations = ("choice/lambada_openai.jsonl", "lambada_openai.jsonl", "lambada.jsonl", "lambada")
    hub = HubSource("EleutherAI/lambada_openai", "default")

    def open(self, path: Path) -> LastWords:
        rows = question_rows(path, PASSAGE_EXAMPLE)
        return LastWords([_passage(row) for row in rows], rows.sha256)


def _passage(row: Row) -> tuple[str, str]:
    if "continuation" in row.fields:
        return row.text("context"), f" {row.text('continuation').strip()}"
    before, space, word = row.text("text").rpartition(" ")
    if not before.strip() or not word.strip():
        raise row.error("'text' is to end with a word after a space")
    return before, space + word


REPOSITORY = "Cross-Lingual-Consistency"
PROMPT, ANSWER, CANDIDATES = "Prompt", "Ans", "Candidate Ans"
GAP = "<mask>"


class _Bmlama(Task):
    licence = "CC BY-NC-SA 4.0 (mLAMA, of which it is made)"
    metric = metric("per token")
    fetch = f"`git clone https://github.com/Betswish/{REPOSITORY} DATA/{REPOSITORY}` gets it."

    def open(self, path: Path) -> MultipleChoice:
        """The questions of every language: one file each, `en.tsv` and so on."""
        files = files_of(path, ".tsv")
        rows = [row for file in files for row in table_rows(file, needed=(PROMPT, ANSWER, CANDIDATES))]
        if not rows:
            raise BraidError("the files have no rows", str(path))
        return MultipleChoice([_fact(row) for row in rows], sha256_of_files(files), headline="per token", begin="bos")


TASKS.declare(
    "bmlama17",
    _Bmlama,
    description="BMLAMA-17: which of up to ten answers makes the sentence of least perplexity, in each language",
    size="6,792 facts in each of up to 17 languages",
    locations=("bmlama/BMLAMA17", "BMLAMA17", f"{REPOSITORY}/1_easyrun/BMLAMA17"),
)
TASKS.declare(
    "bmlama53",
    _Bmlama,
    description="BMLAMA-53: the same with fewer facts in more languages",
    size="3,070 facts in each of up to 53 languages",
    locations=("bmlama/BMLAMA53", "BMLAMA53", f"{REPOSITORY}/1_easyrun/BMLAMA53"),
)


def _fact(row: Row) -> Question:
    prompt, answer = row.text(PROMPT), row.text(ANSWER).strip()
    candidates = [each.strip() for each in row.text(CANDIDATES).split(", ")]
    if prompt.count(GAP) != 1:
        raise row.error(f"the sentence is to have one gap, {GAP}")
    if answer not in candidates:
        raise row.error(f"the answer '{answer}' is not among the candidates")
    sentences = tuple(("", prompt.replace(GAP, candidate)) for candidate in candidates)
    return Question(sentences, candidates.index(answer), row.stem)
