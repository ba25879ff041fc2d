"""Composed models with members of their own: variants and whole models joined after they were trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_study import PATH_MODEL, toy_study

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.model.paths.switches import use_paths
from braidlm.studies.decoding import decode_study
from braidlm.studies.report import study
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.show import study_facts
from braidlm.studies.tables import summary, training_time

SHORT: dict[str, Any] = {"budget": "2 steps"}
MIXED: dict[str, Any] = {"join": "mixture", "freeze": ["paths", "embedding"], **SHORT}


def owners(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two owners train on what all share, each with its own text, and a mixture has both."""
    made = toy_study(
        folder / "out", folder / "data", whole={"shared": {"model": PATH_MODEL, "text": "shared", **SHORT}}
    )
    made["paths"] = {"model": PATH_MODEL, "share": 0.5, **SHORT}
    variants = {f"{name}_owner": {"start": "shared", "domains": [name], **SHORT} for name in ("stories", "maths")}
    composed = {"together": {"members": ["maths_owner", "stories_owner"], **MIXED}, "of_paths": MIXED}
    return made | {"variants": variants, "composed": composed} | changes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    console.set_quiet(True)
    try:
        return study(decode_study(owners(tmp_path_factory.mktemp("owners"))), device="cpu")
    finally:
        console.set_quiet(False)


def test_members_are_made_before_what_is_composed_of_them(results: StudyResults) -> None:
    assert [model.name for model in results.models] == [
        *("stories", "maths", "of_paths", "shared"),
        *("stories_owner", "maths_owner", "together"),
    ]


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
    row = next(row for row in summary(results).rows if row[0] == "together")
    words = sum(model.words for model in before)
    assert row[summary(results).columns.index("words")] == f"{console.count(words)} + {console.count(mixture.words)}"
    stages = {row[0]: row[1:] for row in training_time(results).rows}
    assert stages["together"][0].count("+") == 2
    assert stages["of_paths"][0].count("+") == 1


def test_it_is_used_again(results: StudyResults) -> None:
    (mixture,) = results.of("together")
    weights = mixture.folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    console.set_quiet(True)
    try:
        run_study(results.study, device="cpu")
    finally:
        console.set_quiet(False)
    assert weights.stat().st_mtime_ns == written


def test_without_paths_it_is_trained_on_all_text(tmp_path: Path) -> None:
    whole = {name: {"model": PATH_MODEL, "domains": [name], "seeds": [2], **SHORT} for name in ("stories", "maths")}
    composed = {"both": {"members": ["stories", "maths"], "join": "shared_linear", "epochs": 0.1}}
    data = owners(tmp_path, paths=None, whole=whole, variants={}, composed=composed, seeds=[1, 2])
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
    ("changes", "problem"),
    [
        (
            {"composed": {"a": {"members": ["shared", "storys_owner"]}}},
            "composed.a.members: there is no path, whole model or variant without edits 'storys_owner'",
        ),
        ({"composed": {"a": {"members": ["shared", "shared"]}}}, "composed.a.members: each is named once"),
        ({"composed": {"a": {"members": ["shared"]}}}, "composed.a.members: name at least two"),
        ({"paths": None, "composed": {"a": MIXED}}, "there are no paths to compose; give `paths`, or its `members`"),
        (
            {
                "variants": {"more": {"start": "a", "domains": ["maths"]}},
                "composed": {"a": {"members": ["shared", "maths"]}},
            },
            "variants.more.start: 'a' has members, and is made after all variants",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        decode_study(owners(tmp_path, **changes))
    assert problem in str(caught.value)


def test_members_without_a_seed_in_common(tmp_path: Path) -> None:
    whole = {f"seed_{seed}": {"model": PATH_MODEL, "seeds": [seed]} for seed in (1, 2)}
    composed = {"both": {"members": ["seed_1", "seed_2"]}}
    with pytest.raises(BraidError, match=r"composed.both.members: no seed is that of every member"):
        decode_study(owners(tmp_path, whole=whole, variants={}, composed=composed, seeds=[1, 2]))
