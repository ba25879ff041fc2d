"""Averages of a study: members by seed or by domain, averaged exactly, and one model that learns from them."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from braidlm.cli.main import main
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, study_models
from braidlm.studies.report import study
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study_facts import study_facts
from braidlm.studies.tables import cost, quality, tables
from tests.studies.toy_study import PATH_MODEL, composed, path, toy_study

SHORT: dict[str, Any] = {"budget": "2 steps"}
MEMBERS: dict[str, Any] = {
    "dense": {"model": PATH_MODEL, "train": SHORT},
    "of_stories": {"model": PATH_MODEL, "train": {"domains": ["stories"], **SHORT}},
    "of_maths": {"model": PATH_MODEL, "train": {"domains": ["maths"], **SHORT}},
}


def averaged(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two seeds of a model of all text, and of one for each domain."""
    steps = MEMBERS | {
        "by_seed": {"average": ["dense"]},
        "by_source": {"average": ["of_stories", "of_maths"], "seeds": "each"},
        "student": {"distil": {"teacher": "by_seed", "weight": 0.7, "top_k": 9}, "seeds": [5], "train": SHORT},
    }
    made = toy_study(folder / "out", folder / "data", steps=steps)
    made["domains"] = {
        name: {"source": name, "documents": 500, "holdout": 0.4, "subset": {"stop": 0.2}} for name in made["domains"]
    }
    made |= {"seeds": [1, 2], "validation": {"every": "2 steps", "tokens": 600, "half": "choose"}}
    return made | changes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    console.set_quiet(True)
    try:
        return study(decode_study(averaged(tmp_path_factory.mktemp("averages"))), device="cpu")
    finally:
        console.set_quiet(False)


def test_models_of_one_configuration_are_built_once(tmp_path: Path) -> None:
    models = study_models(decode_study(averaged(tmp_path)))
    alike = {models[name] for name in ("dense", "of_stories", "of_maths", "student")}
    assert len(alike) == 1
    assert models["by_seed"] is not models["by_source"], "their paths have other names"


def test_every_model_is_there(results: StudyResults) -> None:
    made = [(model.name, model.kind, model.seed) for model in results.models if model.kind != "whole"]
    assert made == [
        ("by_source", "average", 1),
        ("by_source", "average", 2),
        ("by_seed", "average", 1),
        ("student", "distilled", 5),
    ]
    out = results.study.folder
    assert results.of("by_seed")[0].folder == out / "by_seed"
    assert [model.folder for model in results.of("by_source")] == [
        out / f"seed-{seed}" / "by_source" for seed in (1, 2)
    ]


def test_probabilities_are_averaged(results: StudyResults) -> None:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        members = [load_model(model.folder)(ids).logits.softmax(-1) for model in results.of("dense")]
        average = load_model(results.of("by_seed")[0].folder)
        assert torch.allclose(average(ids).logits.exp(), sum(members) / 2, atol=1e-5)
    assert load_lineage(results.of("by_seed")[0].folder)["options"]["join"] == {"kind": "average"}  # type: ignore[index]


def test_an_average_costs_what_its_members_cost(results: StudyResults) -> None:
    members, (average,) = results.of("dense"), results.of("by_seed")
    assert average.parameters == sum(model.parameters for model in members)
    assert average.words == sum(model.words for model in members)
    assert average.wall_seconds == pytest.approx(sum(model.wall_seconds for model in members))
    speeds = {row[0]: row[cost(results).columns.index("tokens/s")] for row in cost(results).rows}
    assert speeds["by_seed"] == "–", "nothing was trained at the members' speed together"
    assert speeds["dense"] != "–"


def test_a_distilled_model_has_a_members_size(results: StudyResults) -> None:
    (student,) = results.of("student")
    assert student.parameters == results.of("dense")[0].parameters
    lineage = load_lineage(student.folder)
    assert lineage is not None
    distill = lineage["recipe"]["training"]["distill"]
    assert (distill["weight"], distill["top_k"]) == (0.7, 9)
    assert distill["teachers"] == [{"model": str(model.folder), "weight": 1.0} for model in results.of("dense")]
    assert set(lineage["recipe"]["data"]["sets"]) == {"stories", "maths"}


def test_both_halves_are_in_one_table(results: StudyResults) -> None:
    table = quality(results)
    assert table.columns == ["model", "", "seeds", *results.domains, "choose half", "report half"]
    assert [row[:3] for row in table.rows] == [
        ["dense", "from scratch", "2"],
        ["of_stories", "from scratch", "2"],
        ["of_maths", "from scratch", "2"],
        ["by_source", "average", "2"],
        ["by_seed", "average", "1"],
        ["student", "distilled", "1"],
    ]
    for model in results.models:
        assert model.bits == model.halves["choose"]
        assert model.bits != model.halves["report"]
        if model.curve and set(model.curve[-1].bits) == set(model.bits):
            assert model.curve[-1].bits == pytest.approx(model.bits, abs=1e-5)
    assert tables(results)[0].name == "tables/bits-per-byte"
    assert (results.study.folder / "tables/bits-per-byte.csv").is_file()


def test_a_study_that_was_moved_teaches_nobody_anew(results: StudyResults, tmp_path: Path) -> None:
    there = Path(shutil.copytree(results.study.folder, tmp_path / "else where"))
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*.safetensors")}
    run_study(replace(results.study, out=str(there)), device="cpu")
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*.safetensors")} == before


def test_nothing_is_made_twice_but_what_changed(results: StudyResults) -> None:
    made = results.study
    before = {model.folder: (model.folder / "model.safetensors").stat().st_mtime_ns for model in results.models}
    console.set_quiet(True)
    try:
        other = averaged(made.folder.parent)
        other["steps"]["dense"]["train"]["budget"] = "3 steps"
        again = run_study(decode_study(other), device="cpu")
    finally:
        console.set_quiet(False)
    changed = {m.name for m in again if before.get(m.model) != (m.model / "model.safetensors").stat().st_mtime_ns}
    assert changed == {"dense", "by_seed", "student"}


def test_what_it_takes_is_known_before(tmp_path: Path) -> None:
    data = averaged(tmp_path)
    made = decode_study(data)
    assert encode(decode_study(encode(made))) == encode(made)
    facts = {row["name"]: row for row in study_facts("study", data)["models"]}
    assert facts["by_seed"]["parameters"] == 2 * facts["dense"]["parameters"]
    assert facts["by_seed"]["training"]["seconds"] == 0
    assert facts["student"]["parameters"] == facts["dense"]["parameters"]


def test_teachers_that_are_stored_read_once(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for split in ("train", "dev"):
        (corpus / split).mkdir(parents=True)
        (corpus / split / "text.txt").write_text("One two three. " * 200)
    chunking = {"kind": "windows", "stride": 8, "words_per_epoch": 500}
    seconds = []
    for top_k in (9, None):
        student = {"distil": {"teacher": "by_seed", "top_k": top_k}}
        steps = {"dense": {"model": PATH_MODEL}, "by_seed": {"average": ["dense"]}, "student": student}
        data = averaged(tmp_path, epochs=10, steps=steps)
        data |= {"domains": {"english": {"folder": str(corpus)}}}
        data["data"]["chunking"] = chunking
        facts = {row["name"]: row["training"] for row in study_facts("study", data)["models"]}
        seconds.append(facts["student"]["seconds"] / facts["dense"]["seconds"])
    # Two members forward cost two thirds of a member's training: once in ten passes, or in each of them.
    assert seconds == pytest.approx([1 + 2 / 30, 1 + 2 / 3], rel=0.02)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ({"average": ["dens"]}, "steps.a.average: there is no step 'dens'. Did you mean 'dense'?"),
        ({"average": ["dense"], "seeds": "each"}, "steps.a: an average has at least two members"),
        ({"average": ["dense", "dense"]}, "steps.a: average: each is named once"),
        ({"average": ["dense"], "train": {}}, "steps.a: unknown key 'train'"),
        (
            {"distil": {"teacher": "by_sed"}},
            "steps.a.distil.teacher: there is no step 'by_sed'. Did you mean 'by_seed'?",
        ),
        ({"distil": {}}, "steps.a.distil.teacher: missing; it has no default"),
        ({"distil": {"teacher": "by_seed"}, "seeds": []}, "steps.a.seeds: expected at least one, got []"),
        ({"distil": {"teacher": "by_source"}, "seeds": [5]}, "steps.a.seeds: expected some of [1, 2], got [5]"),
        ({"distil": {"teacher": "by_seed"}, "train": {"batches": 3}}, "steps.a.train: unknown key 'batches'"),
        ({"distil": {"teacher": "by_seed"}, "model": {"widht": 3}}, "steps.a.model: unknown key 'widht'"),
        ({"distil": {"teacher": "pruned"}}, "steps.a.model: missing; 'pruned' was not trained with an architecture"),
    ],
)
def test_mistakes(step: dict[str, Any], problem: str, tmp_path: Path) -> None:
    data = averaged(tmp_path)
    data["steps"] |= {"a": step, "pruned": {"of": "dense", "edit": [{"share": {"what": "feeds"}}]}}
    with pytest.raises(BraidError) as caught:
        decode_study(data)
    assert problem in str(caught.value)


def test_an_average_has_several_students(tmp_path: Path) -> None:
    """Each student of an average for each seed learns from the average of its own seed; any model can teach."""
    taught: dict[str, Any] = {"distil": {"teacher": "by_source"}, "train": SHORT}
    data = averaged(tmp_path)
    for name in ("dense", "by_seed", "student"):
        del data["steps"][name]
    data["steps"] |= {"one": taught, "two": taught | {"seeds": [2]}}
    data["steps"]["three"] = taught | {"distil": {"teacher": "of_maths"}, "seeds": [2]}
    made = decode_study(data)
    assert [made.seeds_of(name) for name in ("one", "two", "three")] == [[1, 2], [2], [2]]
    assert made.domains_of("three") == ["maths"]
    console.set_quiet(True)
    try:
        students = [model for model in run_study(made, device="cpu") if model.kind == "distilled"]
    finally:
        console.set_quiet(False)
    assert [(model.name, model.seed) for model in students] == [("one", 1), ("one", 2), ("two", 2), ("three", 2)]
    for model in students:
        (teacher,) = model.parts
        assert (teacher.name, teacher.seed) == ("of_maths" if model.name == "three" else "by_source", model.seed)


def test_models_that_were_trained_on_are_averaged(tmp_path: Path) -> None:
    """They have the architecture of what they started from; what was edited since has another."""
    more = {"of": "of_maths", "train": {"domains": ["stories"], **SHORT}}
    steps = {name: MEMBERS[name] for name in ("dense", "of_maths")} | {"more": more, "again": {**more, "of": "more"}}
    steps["owners"] = {"average": ["dense", "again"], "seeds": "each"}
    steps["student"] = {"distil": {"teacher": "owners"}, "train": SHORT}
    data = averaged(tmp_path, steps=steps, seeds=[1])
    console.set_quiet(True)
    try:
        made = run_study(decode_study(data), device="cpu")
    finally:
        console.set_quiet(False)
    (average,) = (model for model in made if model.kind == "average")
    assert [part.name for part in average.parts] == ["dense", "again"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        members = [load_model(part.model)(ids).logits.softmax(-1) for part in average.parts]
        assert torch.allclose(load_model(average.model)(ids).logits.exp(), sum(members) / 2, atol=1e-5)
    facts = {row["name"]: row for row in study_facts("study", data)["models"]}
    assert facts["owners"]["parameters"] == 2 * facts["dense"]["parameters"]
    data["steps"]["more"]["edit"] = [{"share": {"what": "feeds"}}]
    with pytest.raises(
        BraidError, match=r"steps\.owners\.average: 'again' is edited, and what it becomes is not known"
    ):
        decode_study(data)


def test_a_sweep_of_studies(tmp_path: Path) -> None:
    """Every combination is a study of its own, and the runs of all are in one table."""
    file = tmp_path / "swept.yaml"
    file.write_text(yaml.safe_dump(averaged(tmp_path, steps={"dense": MEMBERS["dense"]}, seeds=[1])))
    rates = "training.optimizer.lr=0.001,0.002"
    assert main(["train", str(file), rates, "--multirun", "--device", "cpu"]) == 0
    rows = list(csv.DictReader((tmp_path / "out/runs.csv").read_text().splitlines()))
    assert [(row["run"], row["training.optimizer.lr"], row["state"]) for row in rows] == [
        (f"training.optimizer.lr={rate}/seed-1/dense", rate, "done") for rate in ("0.001", "0.002")
    ]
    assert (tmp_path / "out/training.optimizer.lr=0.001/report.html").is_file()


def test_some_models_have_some_seeds(tmp_path: Path) -> None:
    """Of what is costly fewer are trained; averages are of the seeds that there are."""
    data = averaged(tmp_path)
    data["steps"]["of_stories"]["seeds"] = data["steps"]["of_maths"]["seeds"] = [2]
    console.set_quiet(True)
    try:
        made = run_study(decode_study(data), device="cpu")
    finally:
        console.set_quiet(False)
    seeds = [(model.name, model.seed) for model in made]
    assert [(name, seed) for name, seed in seeds if name != "student"] == [
        ("dense", 1),
        *((name, 2) for name in ("dense", "of_stories", "of_maths", "by_source")),
        ("by_seed", 1),
    ]
    facts = {row["name"]: row["times"] for row in study_facts("study", data)["models"]}
    assert facts == {"dense": 2, "of_stories": 1, "of_maths": 1, "by_seed": 1, "by_source": 1, "student": 1}


@pytest.mark.parametrize(
    ("seeds", "problem"),
    [
        ([], r"steps.of_maths.seeds: expected some of \[1, 2\], got \[\]"),
        ([3], r"some of \[1, 2\], got \[3\]"),
        ([1], "steps.by_source: an average for each seed needs members of the same seeds"),
    ],
)
def test_seeds_that_do_not_fit(seeds: list[int], problem: str, tmp_path: Path) -> None:
    data = averaged(tmp_path)
    data["steps"]["of_maths"]["seeds"] = seeds
    with pytest.raises(BraidError, match=problem):
        decode_study(data)


def test_shares_of_paths_are_learned(tmp_path: Path) -> None:
    """A mixture of paths learns its router alone, on the text that they did not see."""
    join = {"kind": "mixture", "per_token": True}
    steps = {name: path(name, **SHORT) for name in ("stories", "maths")}
    steps["mixture"] = composed(join=join, train={"freeze": ["paths", "embedding"], **SHORT})
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=steps)
    console.set_quiet(True)
    try:
        (mixture,) = (model for model in run_study(decode_study(data), device="cpu") if model.kind == "composed")
        before = load_model(tmp_path / "out/seed-1/mixture-composed").state_dict()
    finally:
        console.set_quiet(False)
    after = load_model(mixture.model).state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"head.mixture.bias", "head.mixture.router.weight"}
    data["steps"]["mixture"]["blocks"] = 2
    with pytest.raises(BraidError, match="models stay as they are: blocks cannot be chosen"):
        decode_study(data)
