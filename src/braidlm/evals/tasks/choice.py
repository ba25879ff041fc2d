"""Benchmarks of multiple choice that many papers report without fine-tuning, MMLU, BMLAMA and LAMBADA.

Prompts are those of lm-evaluation-harness, without examples before them. Rows have the fields of the data set on the
Hub, or a complete prompt and options (`query`, `choices`, `gold`).

MMLU has 57 subjects, and is asked by the letter of the answer or by the answer itself. MMLU-STEM has the subjects whose
field is physics, chemistry, biology, computer science, math or engineering in `categories.py` of Hendrycks and others
(2021). lm-evaluation-harness has a group of the same name, in which anatomy is a nineteenth.

BMLAMA asks for facts in several languages, every question in each of them (Qi, Fernández and Bisazza, 2023).
"""

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from braidlm.core.errors import BraidError
from braidlm.evals.formats.options import Item, LastWords, Measure, MultipleChoice, beginnings, endings, metric
from braidlm.evals.rows import Row, Rows, TextFile, files_of, question_rows, rows_of, sha256_of_files, table_rows
from braidlm.evals.tasks.task import TASKS, HubSource, Task

EXAMPLE = '{"query": "The sky is", "choices": ["blue", "loud"], "gold": 0}'
NO_YES = ("no", "yes")


class ChoiceTask(Task):
    """A task whose rows are questions."""

    headline: Measure = "raw"
    fixed_options = False

    def __init_subclass__(cls) -> None:
        cls.metric = metric(cls.headline)

    def open(self, path: Path) -> MultipleChoice:
        rows = self.rows(path)
        items = [self.question(row) for row in rows]
        return MultipleChoice(items, rows.sha256, self.headline, fixed_options=self.fixed_options)

    def rows(self, path: Path) -> Rows:
        return question_rows(path, EXAMPLE)

    @abstractmethod
    def question(self, row: Row) -> Item:
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

    def question(self, row: Row) -> Item:
        if "query" in row.fields:
            return endings(f"{row.text('query').rstrip()}\nAnswer:", *numbered_options(row))
        return endings(f"Question: {row.text('question')}\nAnswer:", *labelled_options(row))


_about, _size = "ARC, easy set: science questions of schools", "2,376 questions, mostly of 4 options"
_where, _hub = ("choice/arc_easy.jsonl", "arc_easy.jsonl", "arc_easy"), HubSource("allenai/ai2_arc", "ARC-Easy")
TASKS.declare("arc_easy", _Arc, _about, _size, locations=_where, hub=_hub)
_about = "ARC, challenge set: those that retrieval and word counts get wrong"
_size, _hub = "1,172 questions, mostly of 4 options", HubSource("allenai/ai2_arc", "ARC-Challenge")
_where = ("choice/arc_challenge.jsonl", "arc_challenge.jsonl", "arc_challenge")
TASKS.declare("arc_challenge", _Arc, _about, _size, headline="per byte", locations=_where, hub=_hub)


@TASKS.register("boolq")
class BoolQ(ChoiceTask):
    """`Passage\\nQuestion: ...?\\nAnswer:` and yes or no (lm-evaluation-harness, tasks/super_glue/boolq)."""

    description = "BoolQ, zero-shot: is yes or no more probable after a passage and a question (62.2% are yes)"
    size = "3,270 questions (validation)"
    licence = "CC BY-SA 3.0"
    locations = ("choice/boolq.jsonl", "boolq.jsonl", "boolq")
    hub = HubSource("aps/super_glue", "boolq", ("validation",))
    fixed_options = True

    def question(self, row: Row) -> Item:
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

    def question(self, row: Row) -> Item:
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

    def question(self, row: Row) -> Item:
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

    def question(self, row: Row) -> Item:
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

    def question(self, row: Row) -> Item:
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
        rows = question_rows(path, '{"text": "She went back for her hat, and there it was: her hat"}')
        return LastWords([self.passage(row) for row in rows], rows.sha256)

    def passage(self, row: Row) -> tuple[str, str]:
        """One row as a context and its last word."""
        if "continuation" in row.fields:
            return row.text("context"), f" {row.text('continuation').strip()}"
        before, space, word = row.text("text").rpartition(" ")
        if not before.strip() or not word.strip():
            raise row.error("'text' is to end with a word after a space")
        return before, space + word


LETTERS, ANSWERS = ("A", "B", "C", "D"), range(4)
MMLU_EXAMPLE = '{"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "arithmetic"}'
MMLU_CSV_EXAMPLE = "1 + 1?,1,2,3,4,B"
FIELDS = {
    "physics": "astronomy, college_physics, conceptual_physics, high_school_physics",
    "chemistry": "college_chemistry, high_school_chemistry",
    "biology": "college_biology, high_school_biology",
    "computer science": "college_computer_science, computer_security, high_school_computer_science, machine_learning",
    "math": "abstract_algebra, college_mathematics, elementary_mathematics, high_school_mathematics, "
    "high_school_statistics",
    "engineering": "electrical_engineering",
}
"""The subjects of each field of MMLU-STEM."""
MMLU_SIZE, STEM_SIZE = "57 subjects, 14,042 questions of 4 options", "18 subjects, 3,018 questions of 4 options"


class MmluTask(ChoiceTask):
    """Questions of all subjects, or of some, read from the CSV files of the original or from rows as on the Hub."""

    size = MMLU_SIZE
    licence = "MIT"
    locations = ("choice/mmlu", "mmlu")
    hub = HubSource("cais/mmlu", "all", ("dev", "test"))
    shots = 0
    subjects: tuple[str, ...] = ()
    """The subjects that are asked about; none for all."""
    fixed_options = True

    def rows(self, path: Path) -> Rows:
        files, dev_files = _mmlu_files(path, "test"), _mmlu_files(path, "dev") if self.shots else []
        self.examples: dict[str, list[Row]] = {}
        for row in _mmlu_rows(dev_files):
            self.examples.setdefault(row.text("subject"), []).append(row)
        rows = [row for row in _mmlu_rows(files) if not self.subjects or row.text("subject") in self.subjects]
        if self.subjects and not rows:
            raise BraidError(f"there is no question about {', '.join(self.subjects)}", str(path))
        return Rows(rows, sha256_of_files([*files, *dev_files]))

    def question(self, row: Row) -> Item:
        """A question after a line on its subject and examples from the development set (tasks/mmlu/default)."""
        subject = row.text("subject")
        examples = self.examples.get(subject, [])
        if len(examples) < self.shots:
            raise row.error(f"there are {len(examples)} examples of this subject, and {self.shots} are to be shown")
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        prompts = [(_mmlu_prompt(each), each.label("answer", ANSWERS)) for each in (*examples[: self.shots], row)]
        solved = "".join(f"{prompt} {LETTERS[answer]}\n\n" for prompt, answer in prompts[:-1])
        return endings(about + solved + prompts[-1][0], LETTERS, prompts[-1][1], subject)


_about = "MMLU: the letter of the answer, without examples; small models are near chance"
TASKS.declare("mmlu", MmluTask, _about, MMLU_SIZE)
_about = "MMLU: the letter of the answer after five examples of the subject"
TASKS.declare("mmlu_5shot", MmluTask, _about, MMLU_SIZE, shots=5)  # as papers report it; needs a long context
_stem = tuple(", ".join(FIELDS.values()).split(", "))
_about = "MMLU-STEM: the letter of the answer in 18 subjects of science, without examples"
TASKS.declare("mmlu_stem", MmluTask, _about, STEM_SIZE, subjects=_stem)
_about = "MMLU-STEM: the letter of the answer after five examples of the subject"
TASKS.declare("mmlu_stem_5shot", MmluTask, _about, STEM_SIZE, subjects=_stem, shots=5)


@TASKS.register("mmlu_continuation")
class MmluContinuation(MmluTask):
    """`Question: ...\\nAnswer:` and the answer's own words (tasks/mmlu/continuation): tells more of small models."""

    description = "MMLU: the answer's own words after the question"
    fixed_options = False

    def question(self, row: Row) -> Item:
        subject = row.text("subject")
        about = f"The following are questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        prompt = f"{about}Question: {row.text('question').strip()}\nAnswer:"
        return endings(prompt, row.texts("choices"), row.label("answer", ANSWERS), subject)


def _mmlu_prompt(row: Row) -> str:
    choices = row.texts("choices")
    if len(choices) != len(LETTERS):
        raise row.error(f"there are {len(choices)} options, and {len(LETTERS)} are expected")
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([row.text("question").strip(), *options, "Answer:"])


def _mmlu_files(path: Path, split: str) -> list[TextFile]:
    """CSV files in a folder of the split's name, or one JSONL file."""
    if path.is_file() and split == "test":
        return files_of(path)
    if (path / f"{split}.jsonl").is_file():
        return files_of(path / f"{split}.jsonl")
    if not (path / split).is_dir():
        raise BraidError(f"there is no {split}/SUBJECT_{split}.csv and no {split}.jsonl here", str(path))
    return files_of(path / split, "*.csv")


def _mmlu_rows(files: list[TextFile]) -> Iterator[Row]:
    for file in files:
        if not file.name.endswith(".csv"):
            yield from rows_of([file], file.where, MMLU_EXAMPLE)
            continue
        # Question, four options, letter: no heading; the subject is the file's name.
        subject = file.stem.rpartition("_")[0] or file.stem
        for row in table_rows(file, ("question", *LETTERS, "answer"), MMLU_CSV_EXAMPLE):
            choices, answer = [row.fields[letter] for letter in LETTERS], row.label("answer", LETTERS)
            fields = {"question": row.fields["question"], "choices": choices, "answer": answer, "subject": subject}
            yield replace(row, fields=fields)


REPOSITORY = "Cross-Lingual-Consistency"


class _Bmlama(Task):
    """As its authors do for causal models, every candidate is put into the sentence's gap, and the sentence with the
    lowest perplexity (mean over its tokens, the first given the BOS token) is the model's answer."""

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
