"""Studies whose steps are of any kinds, in any order and with any options: planned and run, or an error in words."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, note

from braidlm.edits.composing.path_models import composing_joins
from braidlm.edits.edit import edits, load_edits
from braidlm.studies.decoding import decode_study
from braidlm.studies.report import study
from braidlm.studies.running import run_study
from braidlm.studies.steps import KINDS, StepTraining, TrainStep
from braidlm.studies.study import Study, StudyTraining
from braidlm.studies.study_facts import study_facts
from tests.fuzz.choices import CASES, architecture_of, options_of
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import seeded
from tests.fuzz.test_fuzz_edits import KNOWN as OF_EDITS
from tests.fuzz.test_fuzz_training import KNOWN as OF_TRAINING
from tests.fuzz.test_fuzz_training import given_set
from tests.tiny_models import BASE

load_edits()
OF_STUDIES: dict[str, list[Any]] = {
    "domains": [["stories"], {"stories": 2, "maths": 1}, None, None, None],
    "epochs": [0.02, 0.05],
    "SampleConfig.tokens": [2],
    "kept": [None, 0.7],
    "seeds": [None, None, [1], [2]],
    "Study.seeds": [[1], [1, 2], [2, 1]],
    "gpus": [None],
    "join": [*sorted(composing_joins), {"kind": "routed", "top_k": 1}],
    "tasks": [None],
    "out": [None],
    "licence": [None, "mit"],
    "layers": [None, 1, 2],
    "text": ["all", "kept", "shared"],
    "AverageStep.seeds": ["all", "each"],
    "AverageStep.join": ["average", "posterior"],
    "parallel": ["auto"],
}
TOP = ("epochs", "kept", "seeds", "licence", "checkpoints", "validation", "samples", "log")


@seeded(40)
@given(CASES)
def test_planned(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory, rng: Random) -> None:
    data = study_of(rng, sets, tmp_path_factory.mktemp("studies") / "study")
    note(f"study {data}")
    with honest():
        study_facts("mine", data)


@seeded(2)
@given(CASES)
def test_run(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory, rng: Random) -> None:
    """All its models are made and measured; and the same call again finds them."""
    data = study_of(rng, sets, tmp_path_factory.mktemp("studies") / "study", most=3)
    note(f"study {data}")
    with honest():
        first = study(decode_study(data), device="cpu")
        again = run_study(decode_study(data), device="cpu")
        assert [one.model for one in again] == [one.folder for one in first.models]


def study_of(rng: Random, sets: dict[str, str], out: Path, most: int = 6) -> dict[str, Any]:
    known = OF_TRAINING | OF_STUDIES
    data: dict[str, Any] = {
        "out": str(out),
        "domains": {
            name: given_set(rng, sets[name]) | {"holdout": 0.1} for name in rng.sample(list(sets), rng.randint(1, 2))
        },
        "models": {"small": BASE, "other": {**BASE, **architecture_of(rng)}},
        "steps": {},
        "training": {"batch": 2} | options_of(rng, StudyTraining, known, most=1),
        "validation": {"tokens": 64},
        "epochs": 0.02,
        "kept": 0.5,
        "data": {"length": 16},
    }
    chosen = {key: value for key, value in options_of(rng, Study, known, most=2).items() if key in TOP}
    for number in range(rng.randint(1, most)):
        data["steps"][f"step_{number}"] = step_of(rng, list(data["steps"]), known)
    if isinstance(validation := chosen.get("validation"), dict):
        chosen["validation"] = {"tokens": 64} | validation
    return data | chosen


def step_of(rng: Random, names: list[str], known: dict[str, list[Any]]) -> dict[str, Any]:
    """A step of what is there already; once in a while it reads itself, or what comes later or never."""
    kind = rng.choice([TrainStep, TrainStep, *KINDS.values()]) if len(names) > 1 else TrainStep
    if rng.random() < 0.03 or not names:
        names = [*names, "step_1", "nothing"]
    own: dict[str, list[Any]] = {
        "of": names,
        "compose": [names[-2:], names[:2], rng.sample(names, len(names))],
        "average": [names[:2], names[-2:]],
        "teacher": names,
        "model": ["small", "other"],
        "edit": [[edit_of(rng)], [edit_of(rng), edit_of(rng)]],
    }
    step = options_of(rng, kind, known | own, most=2)
    step.pop("train", None)
    if kind is TrainStep:
        chosen = "of" if rng.random() < 0.3 else "model"
        step = {key: value for key, value in step.items() if key not in ("of", "model")}
        step[chosen] = rng.choice(own[chosen])
    if (rng.random() < 0.5 and kind.kind != "average") or (kind is TrainStep and "of" in step):
        training = options_of(rng, StepTraining, known, most=2)
        training.pop(rng.choice(["budget", "epochs"]), None)
        step["train"] = training | options_of(rng, StudyTraining, known, most=rng.choice([0, 0, 1]))
    return step


def edit_of(rng: Random) -> dict[str, Any]:
    kind = rng.choice(sorted(edits))
    options = options_of(rng, edits[kind], OF_EDITS)
    return {kind: options | ({"text": "stories"} if "text" in options else {})}
