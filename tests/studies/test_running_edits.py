"""Variants: what edits and further training make of a trained model."""

import contextlib
import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from braidlm.core import console
from braidlm.core.console import count
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.model.config.strict import encode
from braidlm.model.paths.switches import module_routers
from braidlm.studies import running
from braidlm.studies.decoding import TrainedModel, decode_study, study_models
from braidlm.studies.report import learning_chart, study
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.show import show
from braidlm.studies.tables import cost, tables, variants
from braidlm.training.saving.checkpoints import Checkpoints
from tests.report_pages import charts_of
from tests.studies.toy_study import WHOLE_MODEL, toy_study
from tests.tiny_models import random_ids

EXPERTS = {"experts": {"names": 4, "router": {"top_k": 2, "compute": "dense"}}}
"""Not the faster one here and now: two runs of one recipe are compared bit for bit."""
MODULES: dict[str, Any] = {
    **WHOLE_MODEL,
    "block": {"attention": {"heads": 2}, "feed": {"kind": "mlp", "hidden": 24, **EXPERTS}},
}
BASE: dict[str, Any] = {"base": {"model": MODULES, "train": {"domains": ["stories"], "budget": "10 steps"}}}
VARIANTS: dict[str, Any] = {
    "tuned": {"of": "base", "train": {"domains": ["maths"], "budget": "8 steps"}},
    "joint": {
        "of": "base",
        "train": {
            "domains": {"maths": 4, "stories": 1},
            "budget": "600 tokens",
            "freeze": ["embedding"],
            "optimizer": {"lr": 1e-3},
        },
    },
    "tuned_pruned": {
        "of": "tuned",
        "edit": [{"prune": {"text": "maths", "keep": 0.9, "tokens": 400}}],
        "series": "tuned",
    },
    "pruned_tuned": {
        "of": "base",
        "edit": [{"prune": {"text": "stories", "keep": 0.9, "tokens": 400}}],
        "train": {"domains": ["maths"], "epochs": 0.05},
        "series": "pruned",
    },
}


def variants_study(tmp_path: Path, variants: dict[str, Any] = VARIANTS, **changes: Any) -> dict[str, Any]:
    """Plain data of a study with a base of stories alone, and variants of it."""
    return toy_study(tmp_path / "out", tmp_path / "data", steps=BASE | variants, **changes)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    """The study, run once."""
    console.set_quiet(True)
    try:
        data = variants_study(tmp_path_factory.mktemp("variants"), seeds=[1, 2])
        return study(decode_study(data), device="cpu")
    finally:
        console.set_quiet(False)


def recipe_of(results: StudyResults, name: str) -> dict[str, Any]:
    folder = results.of(name)[0].run_folder
    assert folder is not None
    recipe: dict[str, Any] = yaml.safe_load((folder / "recipe.yaml").read_text())
    return recipe


def test_every_variant_is_made_and_measured_on_every_domain(made: StudyResults) -> None:
    assert made.names("whole") == ["base"]
    assert made.names("variant") == list(VARIANTS)
    assert len(made.models) == 2 * 5, "two seeds"
    for model in made.models:
        assert set(model.bits) == {"stories", "maths"}
        assert (model.folder / "config.json").is_file()


def test_a_whole_model_is_trained_on_its_own_domains(made: StudyResults) -> None:
    recipe = recipe_of(made, "base")
    assert list(recipe["data"]["sets"]) == ["stories"]
    assert recipe["training"]["budget"] == "10 steps"


def test_shares_budgets_and_options_of_a_variants_training(made: StudyResults) -> None:
    recipe = recipe_of(made, "joint")
    assert recipe["data"]["mix"]["weights"] == {"maths": 4, "stories": 1}
    assert recipe["training"]["budget"] == "600 tokens"
    assert recipe["training"]["freeze"] == ["embedding"]
    assert recipe["training"]["optimizer"]["lr"] == 1e-3
    assert recipe["training"]["batch"] == 8, "what it does not set is the study's"
    assert recipe_of(made, "tuned")["start_from"] == str(made.of("base")[0].folder)


def test_a_variant_without_domains_is_only_edited(made: StudyResults) -> None:
    pruned, tuned = made.of("tuned_pruned")[0], made.of("tuned")[0]
    assert pruned.run_folder is None
    assert (pruned.tokens, pruned.trainable) == (0, None)
    assert pruned.parameters <= 0.9 * tuned.parameters
    assert made.base_of(pruned).name == "base"
    lineage = load_lineage(pruned.folder)
    assert lineage is not None
    assert lineage["options"]["text"].startswith(str(made.study.data.cache)), "the packed domain"


def test_a_variant_is_edited_and_then_trained(made: StudyResults) -> None:
    model = made.of("pruned_tuned")[0]
    assert model.parameters <= 0.9 * made.of("base")[0].parameters
    assert model.tokens > 0
    record = load_lineage(model.folder)
    edited = load_lineage(model.folder.parents[2] / "pruned_tuned-1-prune")
    assert record is not None
    assert edited is not None
    assert record["sources"][-1]["sha256"] == edited["weights"]["sha256"]


def test_trainable_parameters(made: StudyResults) -> None:
    base, tuned, joint = (made.of(name)[0] for name in ("base", "tuned", "joint"))
    assert base.trainable == tuned.trainable == base.parameters
    assert joint.trainable is not None
    assert 0 < joint.trainable < base.parameters, "the embedding is frozen"


def test_the_table_has_changes_against_the_base(made: StudyResults) -> None:
    table = variants(made)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["base", *VARIANTS]
    assert rows["base"]["stories, change"] == "–"
    assert rows["joint"]["made by"] == "maths 4 : stories 1"
    assert rows["tuned_pruned"]["made by"] == "tuned, prune"
    change = sum(m.bits["maths"] - made.base_of(m).bits["maths"] for m in made.of("tuned")) / 2
    assert rows["tuned"]["maths, change"].startswith(f"{change:+.3f}".replace("-", "−"))
    assert "±" in rows["tuned"]["maths, change"]


def test_what_a_variant_began_with_is_counted_with_what_it_saw(made: StudyResults) -> None:
    chart = learning_chart(made, "maths")
    assert chart is not None
    assert chart.x_label == "tokens seen, those before its own training included"
    base, tuned = made.of("base")[0].tokens, made.of("tuned")[0].tokens
    assert chart.series["tuned"][0][-1] == base + tuned
    seen = {row[0]: row[4] for row in cost(made).rows}
    assert seen["tuned"] == f"{count(base)} + {count(tuned)}"
    assert seen["tuned_pruned"] == count(base + tuned)


def test_files(made: StudyResults) -> None:
    folder = made.study.folder
    with (folder / "tables" / "variants.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    assert len(json.loads((folder / "results.json").read_text())["models"]) == 10
    assert {"stories-maths", "stories-parameters", "maths-parameters"} <= charts_of(folder / "report.html").keys()
    assert "What edits and further training make" in (folder / "report.html").read_text()
    assert [table.name for table in tables(made)[:2]] == ["tables/bits-per-byte", "tables/variants"]


def test_the_same_call_again_makes_nothing(made: StudyResults) -> None:
    before = _times(made.models)
    again = run_study(made.study, device="cpu")
    assert [model.model for model in again] == [model.folder for model in made.models]
    assert _times(made.models) == before


def test_a_study_that_was_moved_trains_nothing(made: StudyResults, tmp_path: Path) -> None:
    there = Path(shutil.copytree(made.study.folder, tmp_path / "else where"))
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*.safetensors")}
    run_study(replace(made.study, out=str(there)), device="cpu")
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*.safetensors")} == before
    assert str(made.study.folder) not in (there / "seed-1" / "tuned" / "recipe.yaml").read_text()


def _times(models: list[Any]) -> dict[Path, int]:
    return {m.folder: (m.folder / "model.safetensors").stat().st_mtime_ns for m in models}


def some(made: StudyResults, tmp_path: Path, *variants: str) -> dict[str, Any]:
    """The base and some of the variants; with the tokenizer and the packed text of the study above."""
    data = variants_study(tmp_path, variants={name: VARIANTS[name] for name in variants})
    return data | {"data": data["data"] | {"cache": str(made.study.data.cache)}}


def _run(data: dict[str, Any], **options: Any) -> dict[str, TrainedModel]:
    return {model.name: model for model in run_study(decode_study(data), device="cpu", **options)}


def test_stopped_anywhere_it_goes_on_as_if_never_stopped(
    made: StudyResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped once before and once after each edit and the first checkpoint of each training."""
    stops: list[str] = []

    def stop_once(place: str) -> None:
        if place not in stops:
            stops.append(place)
            raise KeyboardInterrupt

    def stopping(function: Callable[..., Any], what: Callable[..., str]) -> Callable[..., Any]:
        def stopped(*arguments: Any, **options: Any) -> Any:
            stop_once(f"before {what(*arguments)}")
            result = function(*arguments, **options)
            stop_once(f"after {what(*arguments)}")
            return result

        return stopped

    monkeypatch.setattr(running, "edit", stopping(running.edit, lambda kind, start, out: out.name))
    monkeypatch.setattr(Checkpoints, "save", stopping(Checkpoints.save, lambda self, *_: self.models.parent.name))
    data = some(made, tmp_path, "pruned_tuned")
    models: dict[str, TrainedModel] = {}
    while not models:
        with contextlib.suppress(KeyboardInterrupt):
            models = _run(data | {"checkpoints": {"every": "4 steps"}})
    names = ["base", "pruned_tuned-1-prune", "pruned_tuned"]
    assert stops == [f"{when} {name}" for name in names for when in ("before", "after")]
    for name, model in models.items():
        undisturbed = made.of(name)[0].folder / "model.safetensors"
        assert (model.model / "model.safetensors").read_bytes() == undisturbed.read_bytes(), name


def test_what_changed_is_made_anew(made: StudyResults, tmp_path: Path) -> None:
    """Other options of an edit, a base that was trained on, and a fresh start."""
    data = some(made, tmp_path, "tuned", "tuned_pruned")
    first = _run(data)
    data["steps"]["tuned_pruned"]["edit"] = [{"prune": {"text": "maths", "keep": 0.8, "tokens": 400}}]
    second = _run(data)
    lineage = load_lineage(second["tuned_pruned"].model)
    assert lineage is not None
    assert lineage["options"]["keep"] == 0.8
    assert first["tuned"].model == second["tuned"].model
    before = {name: (model.model / "model.safetensors").read_bytes() for name, model in second.items()}
    data["steps"]["base"]["train"]["budget"] = "12 steps"
    third = _run(data)
    for name in before:
        assert (third[name].model / "model.safetensors").read_bytes() != before[name], name
    record, base = load_lineage(third["tuned"].model), load_lineage(third["base"].model)
    assert record is not None
    assert base is not None
    assert record["sources"][-1]["sha256"] == base["weights"]["sha256"]
    weights = third["tuned_pruned"].model / "model.safetensors"
    written = weights.stat().st_mtime_ns
    _run(data, fresh=True)
    assert weights.stat().st_mtime_ns != written


def test_a_folder_as_the_start(made: StudyResults, tmp_path: Path) -> None:
    folder = made.of("base")[0].folder
    given = {"tuned": {"of": str(folder), "train": {"domains": ["maths"], "budget": "2 steps"}}}
    data = variants_study(tmp_path) | {"steps": given}
    data["data"]["cache"] = made.study.data.cache  # the tokenizer is the base's
    results = study(decode_study(data), device="cpu")
    assert [(m.name, m.kind) for m in results.models] == [("base", "given"), ("tuned", "variant")]
    assert [row[0] for row in variants(results).rows] == ["base", "tuned"]


def test_show_lists_variants(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(variants_study(tmp_path), sort_keys=False))
    facts = show(str(file))
    assert [(row["name"], row["kind"]) for row in facts["models"]][:2] == [("base", "whole"), ("tuned", "variant")]
    assert facts["models"][1]["training"]["tokens"] == 8 * 8 * 32
    assert "Edited models are counted before those edits that need the trained model" in " ".join(facts["notes"])


def test_it_is_written_in_full_and_read_back_the_same(tmp_path: Path) -> None:
    made = decode_study(variants_study(tmp_path))
    assert encode(decode_study(encode(made))) == encode(made)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to do": ({"of": "base"}, "steps.x: nothing is done: give edits"),
    "no edit": ({"of": "base", "edit": []}, "steps.x: edit: name at least one edit"),
    "an unknown domain": ({"of": "base", "train": {"domains": ["math"]}}, "no domain 'math'. Did you mean 'maths'?"),
    "an unknown edit": ({"of": "base", "edit": ["prun"]}, "edit[0]: unknown edit 'prun'. Did you mean 'prune'?"),
    "an unknown option": (
        {"of": "base", "edit": [{"prune": {"text": "maths", "thresh": 1}}]},
        "steps.x.edit[0].prune: unknown key 'thresh'. Did you mean 'threshold'?",
    ),
    "two edits in one": ({"of": "base", "edit": [{"prune": {}, "share": {}}]}, "expected one edit's name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_variants_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    spec, message = BAD[case]
    with pytest.raises(BraidError) as caught:
        decode_study(variants_study(tmp_path, variants={"x": spec}))
    assert message in str(caught.value)


def test_problems_of_several_variants_are_in_one_error(tmp_path: Path) -> None:
    specs = {name: {"of": "base", "edit": [{"prune": {"text": "maths", "keep": 7}}]} for name in ("x", "y")}
    with pytest.raises(BraidError) as caught:
        decode_study(variants_study(tmp_path, variants=specs))
    assert all(f"steps.{name}.edit[0].prune.keep" in str(caught.value) for name in specs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"of": "no/such", "train": {"domains": ["maths"]}}, "steps.x: no/such: there is no such folder"),
        ({"of": "base", "edit": [{"prune": {"text": "no-such.txt", "keep": 0.9}}]}, "steps.x: no-such.txt"),
    ],
)
def test_what_is_missing_is_said_before_any_work(spec: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        run_study(decode_study(variants_study(tmp_path, variants={"x": spec})), device="cpu")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_owners_insert_into_one_base(tmp_path: Path) -> None:
    """Modules that steps inserted and trained stand side by side, under the names of these steps."""
    insert = {"insert": {"modules": 1, "router": "rows", "embedding": "frozen"}}
    owners = {
        f"{domain}_owner": {"of": "base", "edit": [insert], "train": {"domains": [domain], "budget": "2 steps"}}
        for domain in ("stories", "maths")
    }
    together = {"compose": list(owners), "join": "modules"}
    trained = together | {"train": {"budget": "2 steps"}}
    planned = decode_study(variants_study(tmp_path, owners | {"together": together, "routed": trained}))
    counted, results = study_models(planned), study(planned, "cpu")
    (whole,), (routed,) = results.of("together"), results.of("routed")
    for name, made in counted.items():
        if name in owners or name == "together":
            assert made.config.architecture == load_model(results.of(name)[0].folder).config.architecture
    assert set(whole.silenced) == set(owners)
    before, after = load_model(whole.folder), load_model(routed.folder)
    assert module_routers(before)[0].choices[4:] == ("stories_owner_1", "maths_owner_1")
    changed = {n for n, tensor in before.state_dict().items() if not torch.equal(tensor, after.state_dict()[n])}
    assert changed
    assert all(".router." in name for name in changed)
    without = load_model(whole.folder, without=["maths_owner*"])
    alone = load_model(results.of("stories_owner")[0].folder)
    ids = random_ids(2, 8, vocab_size=without.config.vocab_size)
    torch.testing.assert_close(without(ids).logits, alone(ids).logits)
