"""MMLU-STEM: the 18 subjects of MMLU that its authors count as science, technology, engineering and mathematics.

They are those whose field is physics, chemistry, biology, computer science, math or engineering in `categories.py` of
Hendrycks and others (2021). lm-evaluation-harness has a group of the same name, in which anatomy is a nineteenth.
"""

from braidlm.evals.tasks.choice.mmlu import MmluTask
from braidlm.evals.tasks.task import TASKS

FIELDS = {
    "physics": ("astronomy", "college_physics", "conceptual_physics", "high_school_physics"),
    "chemistry": ("college_chemistry", "high_school_chemistry"),
    "biology": ("college_biology", "high_school_biology"),
    "computer science": (
        "college_computer_science",
        "computer_security",
        "high_school_computer_science",
        "machine_learning",
    ),
    "math": (
        "abstract_algebra",
        "college_mathematics",
        "elementary_mathematics",
        "high_school_mathematics",
        "high_school_statistics",
    ),
    "engineering": ("electrical_engineering",),
}
"""The subjects of each field."""


class StemTask(MmluTask):
    """The questions about these subjects."""

    subjects = tuple(subject for subjects in FIELDS.values() for subject in subjects)
    size = "18 subjects, 3,018 questions of 4 options"


@TASKS.register("mmlu_stem")
class MmluStem(StemTask):
    """As `mmlu`."""

    description = "MMLU-STEM: the letter of the answer in 18 subjects of science, without examples"


@TASKS.register("mmlu_stem_5shot")
class MmluStemFiveShots(StemTask):
    """As `mmlu_5shot`, which is how papers report it."""

    description = "MMLU-STEM: the letter of the answer after five examples of the subject"
    shots = 5
