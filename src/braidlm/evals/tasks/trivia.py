"""TriviaQA without documents (closed book): a model answers from memory, and the answer may be any of the aliases.

Five solved questions precede each, or as many as `shots` says (ModuleFormer's Table 2 has 0, 1 and 5): the first five
of the data, which are not scored. Answers are compared as by TriviaQA's own script (Joshi and others, 2017): without
case, punctuation, articles and space. The harness's task, with which the paper measures, draws its examples from the
training set, and ends an answer also at a full stop or a comma; ours ends with the line.
"""

import re
import string
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.data.sources.format import ANSWER, QUESTION, TEMPLATE
from braidlm.evals.rows import Row, Rows, files_of, rows_of
from braidlm.evals.tasks.maths import MathsTask, Question
from braidlm.evals.tasks.task import TASKS, HubSource

SOLVED = 5
EXAMPLE = '{"question": "Which river ...?", "answer": {"value": "Danube", "aliases": ["The Danube"]}}'
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


@TASKS.register("triviaqa")
class TriviaQa(MathsTask):
    """Joshi and others (2017), asked as ModuleFormer's authors ask it."""

    description = "TriviaQA: questions of a quiz, answered from memory after 5 examples; any alias is right"
    size = "17,944 questions (validation, without documents)"
    licence = "Apache-2.0 (the data set; questions are their authors')"
    locations = ("choice/triviaqa_sm_sub.jsonl", "triviaqa.jsonl", "triviaqa")
    hub = HubSource("mandarjoshi/trivia_qa", "rc.nocontext", ("validation",))

    template = TEMPLATE.removesuffix(ANSWER).rstrip().replace(QUESTION, "{}")
    stop, max_tokens = "\n", 24
    is_right = staticmethod(lambda said, answers: normalised(said) in answers.split("\n"))

    def rows(self, path: Path) -> Rows:
        rows = rows_of(files_of(path, "*.jsonl"), path, EXAMPLE)
        self.examples = [_parts(row)[:2] for row in rows.rows[:SOLVED]]
        if len(rows.rows) <= SOLVED:
            raise BraidError(f"the first {SOLVED} questions are examples, and there are no others", str(path))
        return Rows(rows.rows[SOLVED:], rows.sha256)

    def question(self, row: Row) -> Question:
        text, answer, aliases = _parts(row)
        # A normalised answer has no newline, so that several are one text.
        return Question(text, "\n".join(dict.fromkeys(filter(None, map(normalised, (answer, *aliases))))))


def _parts(row: Row) -> tuple[str, str, list[str]]:
    """Question, answer and aliases: as on the Hub, or as others publish them, with the prompt as `context`."""
    if "context" in row.fields:
        text = row.text("context").removeprefix("Question:").removesuffix("Answer:").strip()
        return text, row.text("answer"), row.texts("aliases", least=0)
    answer = row.inner("answer")
    return row.text("question"), answer.text("value"), answer.texts("aliases", least=0)


def normalised(answer: str) -> str:
    """An answer as TriviaQA's script compares it."""
    plain = answer.replace("_", " ").lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
