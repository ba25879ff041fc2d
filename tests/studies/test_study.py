"""A study from end to end, its errors, and the recipes of PaPaformer's experiment."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.files import LockedError, locked_folder
from braidlm.core.models.card import licence_of_folder
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.core.report.verdicts import spread
from braidlm.data.loading.open_data import open_data
from braidlm.data.loading.streams import TokenStream
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import encode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import FREEZABLE, path_names
from braidlm.studies.decoding import decode_study, load_study
from braidlm.studies.measure import _has_routes
from braidlm.studies.report import study
from braidlm.studies.results import StudyResults
from braidlm.studies.running import is_trained_from, run_study
from braidlm.studies.show import show
from braidlm.studies.tables import inactive_paths, quality, tables, training_time
from braidlm.training.train import train
from tests.report_pages import charts_of
from tests.studies.toy_study import DENSE, PATH_MODEL, PATHS, WHOLE_MODEL, composed, path, toy_study


def test_every_model_is_trained_and_measured(toy_results: StudyResults) -> None:
    assert toy_results.names("path") == ["stories", "maths"]
    assert toy_results.names("composed") == ["linear", "routed"]
    assert toy_results.names("whole") == ["dense"]
    assert len(toy_results.models) == 2 * 5, "two seeds"
    for model in toy_results.models:
        assert set(model.bits) == {"stories", "maths"}
        assert all(0 < bits < 20 for bits in model.bits.values())
        assert model.seconds > 0
        assert (model.folder / "config.json").is_file()
    composed = toy_results.of("linear")[0]
    assert path_names(load_model(composed.folder)) == ("stories", "maths")
    assert set(composed.silenced) == {"stories", "maths"}
    assert composed.silenced["stories"] != composed.bits


def test_seeds_differ_in_weights_and_share_the_data(toy_results: StudyResults) -> None:
    first, second = toy_results.of("dense")
    assert first.bits != second.bits
    assert first.tokens == second.tokens


def test_paths_and_composed_models_share_no_training_document(toy_results: StudyResults) -> None:
    def subset(name: str, kind: Any) -> dict[str, TokenStream]:
        from braidlm.training.recipe import decode_recipe

        recipe = yaml.safe_load((toy_results.of(name, kind)[0].run_folder / "recipe.yaml").read_text())
        return {s.name: s for s in open_data(decode_recipe(recipe).recipe.data).train}

    for domain in toy_results.domains:
        path, composed, whole = (
            subset(domain, "path")[domain],
            subset("linear", "composed")[domain],
            subset("dense", "whole")[domain],
        )
        documents = path.data.manifest.documents
        chosen = [set(stream.subset.choose(documents).tolist()) for stream in (path, composed, whole)]
        assert not chosen[0] & chosen[1]
        assert chosen[0] | chosen[1] == chosen[2]


def test_a_model_of_the_shared_text_reads_what_composed_models_read(tmp_path: Path) -> None:
    shared = {"model": WHOLE_MODEL, "train": {"text": "shared", "budget": "1 steps"}}
    steps = {"stories": path("stories", budget="1 steps"), "shared": shared}
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=steps, kept=0.7)
    made = decode_study(data)
    assert encode(decode_study(encode(made))) == encode(made)
    run = next(model.run for model in run_study(made, device="cpu") if model.name == "shared")
    sets = yaml.safe_load((run.folder / "recipe.yaml").read_text())["data"]["sets"]
    assert {(s["subset"]["start"], s["subset"]["stop"]) for s in sets.values()} == {(0.7, 1.0)}
    data["kept"] = None
    with pytest.raises(
        BraidError, match=r"steps\.shared\.train\.text: how much text is shared is not said; give the study"
    ):
        decode_study(data)


def test_an_owner_reads_its_own_text_and_what_others_share(tmp_path: Path) -> None:
    def owner(**train: Any) -> Any:
        steps = {"owner": {"model": WHOLE_MODEL, "train": {"budget": "1 steps", **train}}}
        return decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=steps, kept=0.7))

    made = owner(text={"maths": "shared"})
    assert encode(decode_study(encode(made))) == encode(made)
    (run,) = [model.run for model in run_study(made, device="cpu")]
    sets = yaml.safe_load((run.folder / "recipe.yaml").read_text())["data"]["sets"]
    read = {name: (one["subset"]["start"], one["subset"]["stop"]) for name, one in sets.items()}
    assert read == {"stories": (0.0, 1.0), "maths": (0.7, 1.0)}
    for text, message in (
        ({"mats": "shared"}, "the step does not read 'mats'. Did you mean 'maths'?"),
        ({"maths": "some"}, r"train\.text\.maths: 'some' is not one of all, kept, shared"),
        ("some", r"train\.text: 'some' is not one of all, kept, shared"),
    ):
        with pytest.raises(BraidError, match=message):
            owner(text=text)


def test_documents_are_read_in_the_order_of_the_study(tmp_path: Path) -> None:
    made = toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE, epochs=0.1)
    made["data"]["order"] = {"kind": "length", "descending": True}
    run_study(decode_study(made), "cpu")
    for domain in made["domains"]:
        table = (tmp_path / f"out/seed-1/dense/order/{domain}.tsv").read_text().splitlines()
        tokens = [int(row["tokens"]) for row in csv.DictReader(table, delimiter="\t")]
        assert tokens == sorted(tokens, reverse=True)


def test_paths_and_composed_models_may_be_trained_otherwise(toy_results: StudyResults) -> None:
    def training(name: str, kind: Any) -> dict[str, Any]:
        recipe = yaml.safe_load((toy_results.of(name, kind)[0].run_folder / "recipe.yaml").read_text())
        return {"tokens": recipe["training"]["budget"].split()[0], **recipe["training"]}

    composed, other, dense = training("linear", "composed"), training("routed", "composed"), training("dense", "whole")
    assert [t["optimizer"]["lr"] for t in (composed, other, dense)] == [1e-3, 3e-3, 3e-3]
    assert composed["batch"] == 8, "what it does not set is the study's"
    paths = sum(int(training(domain, "path")["tokens"]) for domain in toy_results.domains)
    halves = 2 * paths / (0.4 / 0.2)  # paths see their half twice as often as the dense model sees all
    assert halves == pytest.approx(int(dense["tokens"]), rel=0.1)


def test_a_composed_model_comes_from_its_paths(toy_results: StudyResults) -> None:
    model = toy_results.of("linear")[0]
    start = model.run_folder.parent / "linear-composed"
    lineage = load_lineage(start)
    assert lineage is not None
    assert [source["name"] for source in lineage["sources"]] == ["stories", "maths"]
    assert {licence_of_folder(folder) for folder in (model.folder, start)} == {"mit"}


def test_the_same_call_again_trains_nothing(toy_results: StudyResults, capsys: pytest.CaptureFixture[str]) -> None:
    before = {m.folder: (m.folder / "model.safetensors").stat().st_mtime_ns for m in toy_results.models}
    again = run_study(toy_results.study, device="cpu")
    assert [e.run.model for e in again] == [m.folder for m in toy_results.models]
    assert {path: (path / "model.safetensors").stat().st_mtime_ns for path in before} == before
    assert "is finished already" in capsys.readouterr().out


def test_a_study_of_another_process_is_let_be(tmp_path: Path) -> None:
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=PATHS | {"x": composed()})
    at_work = pytest.raises(LockedError, match=f"^{tmp_path / 'out'}: another `braid train` is at work here")
    with locked_folder(tmp_path / "out"), at_work:
        run_study(decode_study(data), device="cpu")
    assert list((tmp_path / "out").iterdir()) == []


def test_another_way_to_compose_is_composed_and_trained_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a stop between the two."""
    steps = PATHS | {"x": composed(start="mean")}
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=steps, epochs=0.05)
    paths = [e.run.model for e in run_study(decode_study(data), device="cpu")][:2]
    before = {path: (path / "model.safetensors").stat().st_mtime_ns for path in paths}
    data["steps"]["x"]["start"] = "random"

    def stopped(recipe: dict[str, Any], **options: Any) -> Any:
        if recipe["out"].endswith("x"):
            raise KeyboardInterrupt
        return train(recipe, **options)

    with monkeypatch.context() as patched:
        patched.setattr("braidlm.studies.running.train", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_study(decode_study(data), device="cpu")
    entries = run_study(decode_study(data), device="cpu")
    folder = tmp_path / "out" / "seed-1"
    assert is_trained_from(folder / "x", folder / "x-composed")
    lineage = load_lineage(folder / "x-composed")
    assert lineage is not None
    assert lineage["options"]["start"] == "random"
    record = load_lineage(entries[-1].run.model)
    assert record is not None
    assert record["sources"][-1]["sha256"] == lineage["weights"]["sha256"], "trained from the new one"
    assert {path: (path / "model.safetensors").stat().st_mtime_ns for path in paths} == before, "the paths stay"


def test_tables(toy_results: StudyResults) -> None:
    rows = {row[0]: row for row in quality(toy_results).rows}
    assert set(rows) == {"stories", "maths", "linear", "routed", "dense"}
    assert "±" in rows["dense"][-1]
    assert quality(toy_results).columns[-3:] == [*toy_results.domains, "mean"]
    times = {row[0]: row for row in training_time(toy_results).rows}
    assert times["dense"][1] == "–"
    assert times["linear, paths in parallel"][3]
    assert [row[1] for row in inactive_paths(toy_results).rows if row[0] == "linear"] == ["none", "stories", "maths"]


def test_a_number_stands_in_one_table(toy_results: StudyResults) -> None:
    of_models = [table for table in tables(toy_results) if table.name != "tables/silent-paths"]
    columns = [column for table in of_models for column in table.columns if column not in ("model", "")]
    assert len(columns) == len(set(columns)) > 8


def test_files(toy_results: StudyResults) -> None:
    folder = toy_results.study.folder
    with (folder / "tables" / "bits-per-byte.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    facts = json.loads((folder / "results.json").read_text())
    assert len(facts["models"]) == 10
    page = (folder / "report.html").read_text()
    assert "Training time" in page
    assert "Who goes where" in page
    assert 'href="routes/routes.html"' in page
    assert 'href="../report.html"' in (folder / "routes" / "routes.html").read_text()
    assert set(toy_results.domains) <= charts_of(folder / "report.html").keys()


def test_spread_by_hand() -> None:
    assert spread([1.0]) == "1.000"
    assert spread([1.0, 3.0]) == f"2.000 ± {math.sqrt(2):.3f}"
    assert spread([-1.0, -3.0], 1, "+") == "−2.0 ± 1.4"


def with_step(**step: Any) -> dict[str, Any]:
    """The paths, and one more step."""
    return {"steps": PATHS | {"x": step}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"epoch": 2}, "unknown key 'epoch'. Did you mean 'epochs'?"),
    "no domains": ({"domains": {}}, "domains: name at least one data set"),
    "nothing": ({"steps": {}}, "steps: nothing to do: name at least one step"),
    "a budget": ({"training": {"budget": "5 steps"}}, "training.budget: a study's budgets come from `epochs`"),
    "a misspelled training key": ({"training": {"bacth": 3}}, "training: unknown key 'bacth'. Did you mean 'batch'?"),
    "a misspelled training key of a step": (
        with_step(model=PATH_MODEL, train={"bacth": 3}),
        "steps.x.train: unknown key 'bacth'. Did you mean 'batch'?",
    ),
    "a misspelled key of a step's training": (
        with_step(model=PATH_MODEL, train={"epoch": 3}),
        "steps.x.train: unknown key 'epoch'. Did you mean 'epochs'?",
    ),
    "epochs and budget": (
        with_step(model=PATH_MODEL, train={"epochs": 1, "budget": "5 steps"}),
        "steps.x.train: give either epochs or a budget",
    ),
    "no domain": (with_step(model=PATH_MODEL, train={"domains": []}), "steps.x.train: domains: name at least one"),
    "an unknown training key": ({"training": {"zzz": 3}}, "There are: accumulation, activation_checkpointing, "),
    "a bad architecture": (with_step(model={"stages": ["blok"]}), "steps.x.model.stages[0]: unknown stage 'blok'"),
    "a bad named architecture": (
        {"models": {"x": {"widht": 3}}},
        "models.x: unknown key 'widht'. Did you mean 'width'?",
    ),
    "an unknown model": (with_step(model="pth") | {"models": {"path": PATH_MODEL}}, "Did you mean 'path'?"),
    "no model": (with_step(train={}), "steps.x: give either a `model` to train from scratch, or a model to train on"),
    "a misspelled kind": (with_step(composed=["stories", "maths"]), "unknown key 'composed'. Did you mean 'compose'?"),
    "two kinds": (with_step(compose=["stories"], average=["maths"]), "steps.x: compose and average are two steps"),
    "kept": ({"kept": 1.0}, "kept: expected a number above 0 and below 1, got 1"),
    "join": (with_step(compose=["stories", "maths"], join="shared_liner"), "unknown join 'shared_liner'. Did you mean"),
    "freeze": (
        with_step(**composed(train={"freeze": ["router"]})),
        "'router' is not one of paths, joins, blocks, modules, routers",
    ),
    "seeds": ({"seeds": [1, 1]}, "seeds: give at least one, each once"),
    "a circle": (
        {"steps": {"a": {"of": "b", "train": {}}, "b": {"of": "c", "train": {}}, "c": {"of": "a", "train": {}}}},
        "steps.a: steps read each other in a circle: a -> b -> c -> a",
    ),
    "a circle of teachers": (
        {"steps": {"a": {"distil": {"teacher": "b"}}, "b": {"distil": {"teacher": "a"}}}},
        "steps.a: steps read each other in a circle: a -> b -> a",
    ),
    "no held-out text": (
        {"domains": {"stories": {"source": "stories", "holdout": 0}}, "steps": DENSE},
        "domains.stories.holdout: a study compares its models on held-out text of every domain, and this has none",
    ),
    "itself": (with_step(of="x", train={}), "steps.x: it reads itself"),
    "several at once": (with_step(model={"widht": 3}) | {"epoch": 2}, "unknown key 'epoch'"),
}
OLD: dict[str, tuple[Any, str]] = {
    "paths": ({"share": 0.6, "model": PATH_MODEL}, "`kept: SHARE`, and for each domain `steps.DOMAIN: {model: ..., "),
    "composed": ({"x": {"join": "concat"}}, "`steps.NAME: {compose: [PATH, PATH], join: ..., train: {text: shared}}`"),
    "whole": ({"x": PATH_MODEL}, "`steps.NAME: {model: ..., train: {domains: [...], epochs: ...}}`"),
    "variants": ({"x": {"start": "dense"}}, "`steps.NAME: {of: MODEL, edit: [...], train: {domains: [...]}}`"),
    "averages": ({"x": {"members": ["dense"]}}, "`steps.NAME: {average: [MODEL, MODEL], seeds: each}`"),
    "distilled": ({"x": {"teacher": "dense"}}, "`steps.NAME: {distil: {teacher: AVERAGE, weight: ...}, train: "),
}


@pytest.mark.parametrize("key", OLD)
def test_a_key_of_before_says_what_is_written_now(key: str, tmp_path: Path) -> None:
    value, message = OLD[key]
    with pytest.raises(BraidError) as caught:
        decode_study(toy_study(tmp_path / "out", tmp_path / "data", **{key: value}))
    assert f"{key}: a study is a graph of `steps` now: write {message}" in str(caught.value)


def test_steps_are_done_after_what_they_read(tmp_path: Path) -> None:
    """Whatever the order of the recipe."""
    steps = {"late": composed(), "tuned": {"of": "late", "train": {}}} | PATHS
    assert decode_study(toy_study(tmp_path, tmp_path, steps=steps)).order == ["stories", "maths", "late", "tuned"]


def test_a_model_that_is_only_composed(tmp_path: Path) -> None:
    steps = {name: path(name, budget="1 steps") for name in PATHS} | {"x": {"compose": ["stories", "maths"]}}
    made = run_study(decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=steps)), device="cpu")[-1]
    assert (made.run, made.model) == (None, tmp_path / "out/seed-1/x")
    assert path_names(load_model(made.model)) == ("stories", "maths")


def test_whatever_can_be_frozen_may_be_named(tmp_path: Path) -> None:
    frozen = {"freeze": list(FREEZABLE)}
    steps = PATHS | {"linear": composed(train=frozen)}
    made = decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=steps, training=frozen))
    assert made.options_of("linear")["freeze"] == made.training["freeze"] == list(FREEZABLE)


UNBUILDABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "each says which model it is": (
        {"dense": {"model": WHOLE_MODEL | {"width": 9}}, "other": {"model": WHOLE_MODEL | {"width": 10}}},
        ["steps.dense: stages[0]: width 9 does not divide", "steps.other: rotary positions need an even head size"],
    ),
    "what is made of one that cannot": (
        {"base": {"model": WHOLE_MODEL | {"width": 9}}, "more": {"of": "base", "edit": [{"share": {"what": "feeds"}}]}},
        ["steps.base: stages[0]: width 9", "steps.more: 'base', which it is made of, cannot be built"],
    ),
    "too large": (
        {"dense": {"model": WHOLE_MODEL | {"width": 65_536, "stages": [{"block": {"layers": 100}}]}}},
        ["steps.dense: weights, gradients and AdamW's two moments need "],
    ),
}


@pytest.mark.parametrize("case", UNBUILDABLE)
def test_models_that_cannot_be_built_are_named_before_anything_is_prepared(case: str, tmp_path: Path) -> None:
    steps, messages = UNBUILDABLE[case]
    made = decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=steps))
    with pytest.raises(BraidError) as caught:
        run_study(made, device="cpu")
    assert all(message in str(caught.value) for message in messages), str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_run_says_which_model_of_the_study_it_is(tmp_path: Path) -> None:
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE, data={"length": 64, "cache": "x"})
    with pytest.raises(BraidError, match=r"^steps.dense: data.length is 64 and the model's context only 32"):
        run_study(decode_study(data | {"data": {**data["data"], "cache": str(tmp_path / "data")}}), device="cpu")


@pytest.mark.parametrize("case", BAD)
def test_bad_studies_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    with pytest.raises(BraidError) as caught:
        decode_study(toy_study(tmp_path / "out", tmp_path / "data", **changes))
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_study_is_written_in_full_and_read_back_the_same(tmp_path: Path) -> None:
    made = decode_study(toy_study(tmp_path / "out", tmp_path / "data"))
    assert encode(decode_study(encode(made))) == encode(made)


def test_the_command_line_runs_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE, epochs=0.05)
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(data))
    assert main(["train", str(file), "--device", "cpu", "seeds=[3]"]) == 0
    shown = capsys.readouterr().out
    assert "Bits per byte on held-out text" in shown
    assert (tmp_path / "out" / "seed-3" / "dense").is_dir()
    assert main(["show", str(file)]) == 0
    assert "dense" in capsys.readouterr().out


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BraidError, match="a study runs in one process"):
        study(decode_study(toy_study(tmp_path / "out", tmp_path / "data")))


def test_the_papers_phase_2_compares_models_of_equal_size() -> None:
    models = {row["name"]: row for row in show("papers/papaformer/phase2")["models"]}
    assert models["dense"]["parameters"] == pytest.approx(models["shared_linear"]["parameters"], rel=0.005)


def test_the_papers_sizes() -> None:
    facts = show("papers/papaformer/phase2-tinystories", ["data.tokenizer.vocab_size=50278"])
    sizes = {row["name"]: row["parameters"] for row in facts["models"]}
    assert sizes["shared_linear"] == pytest.approx(29.35e6, rel=0.001), "29.35M as counted, 28.5M as printed"
    assert sizes["stories"] == pytest.approx(13.5e6, rel=0.02)
    assert facts["parameters"] == sizes["shared_linear"]


@pytest.mark.parametrize(
    "name", ["phase1", "phase2", "phase2-files", "collapse", "phase1-tinystories", "phase2-tinystories"]
)
def test_every_study_of_the_paper_loads(name: str) -> None:
    assert load_study(f"papers/papaformer/{name}").domains


@pytest.mark.parametrize(
    ("stage", "readable"),
    [
        ("block", False),
        ({"parallel": {"paths": 2, "join": "shared_linear", "to": 32}}, False),
        ({"parallel": {"paths": 2, "join": "gumbel_v1"}}, True),
    ],
)
def test_routes_are_shown_where_they_can_be_read(tmp_path: Path, stage: Any, readable: bool) -> None:
    """A join without a router whose output is wider than its paths says nothing about who goes where."""
    block = {"attention": {"heads": 2}}
    architecture = {"width": 16, "tie_embeddings": False, "block": block, "stages": [stage]}
    model = BraidForCausalLM(BraidConfig(architecture, vocab_size=10))
    save_model(model, tmp_path / "model", None, {"made_by": "test"})
    assert _has_routes(tmp_path / "model") is readable
