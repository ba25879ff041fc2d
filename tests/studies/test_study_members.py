"""Composed models with members of their own: variants and whole models joined after they were trained."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.core.models.integrity import model_hash
from braidlm.edits.composing.path_models import posterior_shares
from braidlm.model.config.strict import encode
from braidlm.model.paths.average import AverageHead, PosteriorHead
from braidlm.model.paths.switches import use_paths
from braidlm.studies.decoding import decode_study
from braidlm.studies.report import study
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study_facts import study_facts
from braidlm.studies.tables import cost, training_time
from braidlm.training.features.distill.teachers import TEACHER
from tests.studies.toy_study import PATH_MODEL, composed, path, toy_study

SHORT: dict[str, Any] = {"budget": "2 steps"}
MIXED: dict[str, Any] = {"join": "mixture", "train": {"freeze": ["paths", "embedding"], **SHORT}}


def owners(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two owners train on what all share, each with its own text, and a mixture has both."""
    steps = {name: path(name, **SHORT) for name in ("stories", "maths")}
    steps["of_paths"] = composed(**MIXED)
    steps["shared"] = {"model": PATH_MODEL, "train": {"text": "shared", **SHORT}}
    for name in ("stories", "maths"):
        steps[f"{name}_owner"] = {"of": "shared", "train": {"domains": [name], **SHORT}}
    steps["together"] = composed("stories_owner", "maths_owner", **MIXED)
    steps["judged"] = {"average": ["stories_owner", "maths_owner"], "seeds": "each", "join": "posterior"}
    steps["student"] = {"distil": {"teacher": "judged"}, "train": {"text": "shared", **SHORT}}
    return toy_study(folder / "out", folder / "data", steps=steps) | changes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    console.set_quiet(True)
    try:
        return study(decode_study(owners(tmp_path_factory.mktemp("owners"))), device="cpu")
    finally:
        console.set_quiet(False)


def test_a_student_of_the_shared_text_reads_nothing_else(results: StudyResults) -> None:
    student = next(model for model in results.models if model.name == "student")
    assert student.run_folder is not None
    sets = yaml.safe_load((student.run_folder / "recipe.yaml").read_text())["data"]["sets"]
    assert {(name, s["subset"]["start"], s["subset"]["stop"]) for name, s in sets.items()} == {
        ("stories", 0.5, 1.0),
        ("maths", 0.5, 1.0),
    }


def test_members_are_made_before_what_is_composed_of_them(results: StudyResults) -> None:
    assert [model.name for model in results.models] == [
        *("stories", "maths", "of_paths", "shared"),
        *("stories_owner", "maths_owner", "together", "judged", "student"),
    ]


def test_an_average_may_weigh_its_members_by_the_text(results: StudyResults) -> None:
    """It has no training of its own, and its student learns from it, not from its members alike."""
    (judged,), (student,) = results.of("judged"), results.of("student")
    assert judged.run_folder is None
    model, ids = load_model(judged.folder), torch.arange(20)[None]
    assert isinstance(model.head, PosteriorHead)
    with torch.no_grad():
        each = [load_model(results.of(name)[0].folder)(ids).logits.log_softmax(-1) for name in model.head.names]
        wanted = torch.stack(each) + posterior_shares(torch.stack(each), ids, None)[..., None]
        assert torch.allclose(model(ids).logits, wanted.logsumexp(0), atol=1e-4)
    teachers = [source for source in load_lineage(student.folder)["sources"] if source.get("role") == TEACHER]
    assert [source["sha256"] for source in teachers] == [model_hash(judged.folder)]


def test_the_report_says_who_speaks_where(results: StudyResults) -> None:
    """Of each domain the member that was trained on it alone is the right one."""
    assert results.study.path_of_domains("judged") == {"stories": "stories_owner", "maths": "maths_owner"}
    assert results.study.path_of_domains("of_paths") == {}
    file = results.study.folder / "routes/layers.csv"
    rows = [row for row in csv.DictReader(file.read_text().splitlines()) if row["model"] == "judged"]
    assert {row["layer"] for row in rows} == {"head"}
    assert all(row["accuracy"] for row in rows)


def test_another_way_of_weighing_makes_it_anew(results: StudyResults) -> None:
    """It, and again what learns from it; all else is used again."""
    (mixture,) = results.of("together")
    before = (mixture.folder / "model.safetensors").stat().st_mtime_ns
    data = encode(results.study)
    data["steps"]["judged"]["join"] = "average"
    data["steps"] = {name: data["steps"][name] for name in ("shared", "stories_owner", "maths_owner", "judged")}
    console.set_quiet(True)
    try:
        made = run_study(decode_study(data), device="cpu")
        assert type(load_model(made[-1].model).head) is AverageHead
        again = run_study(results.study, device="cpu")
    finally:
        console.set_quiet(False)
    assert isinstance(load_model(next(one.model for one in again if one.name == "judged")).head, PosteriorHead)
    assert (mixture.folder / "model.safetensors").stat().st_mtime_ns == before


def test_each_member_alone_is_the_model_that_it_was(results: StudyResults) -> None:
    """Only the shares were trained: with the others inactive, a member answers as its own folder does."""
    (mixture,) = results.of("together")
    model, ids = load_model(mixture.folder), torch.arange(20)[None]
    assert list(mixture.silenced) == ["stories_owner", "maths_owner"]
    for name in mixture.silenced:
        use_paths(model, [name])
        with torch.no_grad():
            alone = load_model(results.of(name)[0].folder)(ids).logits.log_softmax(-1)
            assert torch.allclose(model(ids).logits.log_softmax(-1), alone, atol=1e-5)


def test_what_was_trained_before_is_counted_once(results: StudyResults) -> None:
    """The owners began with one model, whose words and seconds are theirs too."""
    (mixture,) = results.of("together")
    before = [results.of(name)[0] for name in ("shared", "stories_owner", "maths_owner")]
    assert results.before(mixture) == before
    assert [model.name for model in results.before(results.of("of_paths")[0])] == ["stories", "maths"]
    assert results.before(before[0]) == []
    assert results.before(before[1]) == results.before(results.of("judged")[0]) == before[:1]
    row = next(row for row in cost(results).rows if row[0] == "together")
    words, own = sum(getattr(model, results.unit) for model in before), getattr(mixture, results.unit)
    assert row[cost(results).columns.index(results.unit)] == f"{console.count(words)} + {console.count(own)}"
    stages = {row[0]: row[1:] for row in training_time(results).rows}
    assert stages["together"][0].count("+") == 2
    assert stages["of_paths"][0].count("+") == 1


def test_a_composed_model_reads_all_text_unless_it_says_otherwise(tmp_path: Path) -> None:
    steps: dict[str, Any] = {
        name: {"model": PATH_MODEL, "train": {"domains": [name], **SHORT}, "seeds": [2]}
        for name in ("stories", "maths")
    }
    steps["both"] = {"compose": ["stories", "maths"], "train": {"epochs": 0.1}}
    data = owners(tmp_path, steps=steps, kept=None, seeds=[1, 2])
    console.set_quiet(True)
    try:
        made = run_study(decode_study(data), device="cpu")
    finally:
        console.set_quiet(False)
    assert [(model.name, model.seed) for model in made] == [("stories", 2), ("maths", 2), ("both", 2)]
    facts = {row["name"]: row for row in study_facts("study", data)["models"]}
    assert facts["both"]["times"] == 1
    both = made[-1]
    assert both.run is not None
    assert both.run.progress.tokens == pytest.approx(facts["both"]["training"]["tokens"], rel=0.02)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ({"compose": ["shared", "storys_owner"]}, "steps.a.compose: there is no step 'storys_owner'. Did you mean"),
        ({"compose": ["shared", "shared"]}, "steps.a: compose: each is named once"),
        ({"compose": ["shared"]}, "steps.a: compose: name at least two"),
        (
            {"average": ["shared", "maths"], "join": "mixture"},
            "an average is not trained, and mixture has to be: write",
        ),
    ],
)
def test_mistakes(step: dict[str, Any], problem: str, tmp_path: Path) -> None:
    data = owners(tmp_path)
    with pytest.raises(BraidError) as caught:
        decode_study(data | {"steps": data["steps"] | {"a": step}})
    assert problem in str(caught.value)


def test_members_without_a_seed_in_common(tmp_path: Path) -> None:
    steps: dict[str, Any] = {f"seed_{seed}": {"model": PATH_MODEL, "seeds": [seed]} for seed in (1, 2)}
    steps["both"] = {"compose": ["seed_1", "seed_2"]}
    with pytest.raises(BraidError, match=r"steps.both.compose: no seed is that of every model that it reads"):
        decode_study(owners(tmp_path, steps=steps, seeds=[1, 2]))
