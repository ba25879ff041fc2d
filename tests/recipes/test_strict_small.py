"""MoEP's strict-small study: its sizes, its corpus, and the whole of it at toy size."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_lineage
from braidlm.core.models.runs import read_metrics
from braidlm.data.corpora.builtin import documents
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import load_study
from braidlm.studies.report import study, study_report
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.show import show
from braidlm.studies.tables import cost, learning, quality, tables
from tests.report_pages import charts_of

RECIPE = "papers/moep/strict-small"
MODELS = ("gpt2", "moep", "moep_swiglu")
MARKS = ["250", "500", "750", "1k", "2k", "3k"]


def write_corpus(folder: Path, train: str = "train_10M", stories: int = 60) -> Path:
    for split, start, count in ((train, 0, stories), ("dev", 1000, 4)):
        (folder / split).mkdir(parents=True)
        for name in ("stories", "maths"):
            text = "\n\n".join(documents(name, 1, start, count))
            (folder / split / f"{name}.{split.split('_')[0]}").write_text(text + "\n")
    return folder


def toy(corpus: Path, out: Path, *more: str) -> list[str]:
    """Overrides that leave everything of the recipe but its sizes; the widths of all models follow from one key."""
    changes = [f"domains.english.folder={corpus}", f"out={out}", f"data.cache={corpus.parent / 'cache'}"]
    changes += ["data.length=32", "data.tokenizer.vocab_size=400", "data.chunking.stride=8"]
    changes += ["data.chunking.words_per_epoch=1000", "epochs=3", "training.batch=4", "training.warmup=2"]
    changes += [f"{key}.every='250 words to 1k, then 1k'" for key in ("checkpoints", "validation")]
    changes += ["models.gpt2.width=32", "models.gpt2.stages[0].block.layers=2"]
    changes += [f"models.{name}.stages[2].parallel.layers=1" for name in MODELS[1:]]
    return [*changes, *more]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    folder = tmp_path_factory.mktemp("strict-small")
    corpus = write_corpus(folder / "corpus")
    console.set_quiet(True)
    try:
        return study(RECIPE, toy(corpus, folder / "out"), device="cpu")
    finally:
        console.set_quiet(False)


def test_the_papers_sizes() -> None:
    models = {row["name"]: row for row in show(RECIPE)["models"]}
    assert tuple(models) == MODELS
    assert models["gpt2"]["parameters"] == pytest.approx(28e6, rel=0.01)
    assert models["moep"]["parameters"] == pytest.approx(28.43e6, rel=0.0005)
    assert models["moep"]["active_parameters"] == pytest.approx(19.4e6, rel=0.01)
    assert models["moep_swiglu"]["parameters"] == pytest.approx(38e6, rel=0.02)


def test_tables_2_and_3_of_the_paper() -> None:
    made = encode(load_study(RECIPE))
    training = made["training"]
    assert (training["batch"], training["warmup"], made["seeds"], made["epochs"]) == (16, "800 steps", [42], 10)
    assert training["optimizer"]["lr"] == 3e-4
    assert (training["optimizer"]["betas"], training["optimizer"]["eps"]) == ([0.9, 0.95], 1e-8)
    assert made["data"]["chunking"] == {"kind": "windows", "stride": 128, "words_per_epoch": 10_000_000}
    assert (made["data"]["length"], made["data"]["tokenizer"]["vocab_size"]) == (512, 16_384)
    assert made["checkpoints"] == {"every": "1M words to 10M, then 10M", "keep": None}
    assert made["validation"]["every"] == made["checkpoints"]["every"]
    for model in made["models"].values():
        assert (model["positions"]["kind"], model["tie_embeddings"], model["context"]) == ("learned", True, 512)
        assert (model["initialisation"]["kind"], model["initialisation"]["std"]) == ("normal", 0.02)
        assert model["dropout"] == 0.1 or model["dropout"]["embedding"] == 0.1
    for name in MODELS[1:]:
        stages = made["models"][name]["stages"]
        routed = stages[2]["parallel"]
        assert (routed["layers"], len(routed["paths"]), routed["join"]["kind"]) == (10, 4, "routed")
        assert routed["join"]["losses"] == {"switch": 0.2}
        for at in (1, 3):
            experts = stages[at]["project"]["experts"]
            assert (len(experts["names"]), experts["router"]["top_k"]) == (4, 2)
            assert experts["router"]["losses"] == {"switch": 0.2}


def test_one_key_gives_the_width_of_every_model() -> None:
    made = encode(load_study(RECIPE, ["models.gpt2.width=64", "data.tokenizer.vocab_size=4096", "data.length=128"]))
    for model in made["models"].values():
        assert (model["width"], model["vocab_size"], model["context"]) == (64, 4096, 128)
    without_gpt2 = {name: load_study(name, ["~steps.gpt2"]) for name in (RECIPE, f"{RECIPE}-cpu")}
    widths = {name: {m.architecture.width for m in map(one.model_of, one.steps)} for name, one in without_gpt2.items()}
    assert widths == {RECIPE: {384}, f"{RECIPE}-cpu": {64}}


def test_the_study_for_a_cpu_has_the_papers_models_and_needs_no_files() -> None:
    facts = show(f"{RECIPE}-cpu")
    assert tuple(row["name"] for row in facts["models"]) == MODELS
    assert facts["domains"] == {"english": "stories"}
    assert facts["problems"] == []
    assert all(row["parameters"] < 1.2e6 for row in facts["models"])
    made, full = load_study(f"{RECIPE}-cpu"), load_study(RECIPE)
    assert made.epochs * 100_000 == 300_000, "words"
    assert made.data.chunking.kind == full.data.chunking.kind


def test_the_study_for_a_cpu_takes_a_corpus(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", stories=2)
    made = load_study(f"{RECIPE}-cpu", ["domains.english.source=null", f"domains.english.folder={corpus}"])
    assert made.domains["english"].resolved("english").validation


def test_every_mark_of_words_has_a_complete_model_folder(results: StudyResults) -> None:
    for model in results.models:
        checkpoints = model.run_folder / "checkpoints"
        assert {folder.name for folder in checkpoints.iterdir()} == {f"chck_{mark}" for mark in MARKS}
        for mark in MARKS:
            lineage = load_lineage(checkpoints / f"chck_{mark}")
            assert lineage is not None
            assert lineage["training"]["words"] == int(mark.replace("k", "000"))
            assert (checkpoints / f"chck_{mark}" / "tokenizer.json").is_file()
    assert load_config(results.of("moep")[0].folder).bos_token_id == 1


def test_models_see_the_same_batches(results: StudyResults) -> None:
    positions = [
        json.loads((model.run_folder / "states" / "chck_3k" / "position.json").read_text()) for model in results.models
    ]
    for first, second in pairwise(positions):
        assert first["loader"] == second["loader"]
        assert first["progress"] == second["progress"]
    assert [m.tokens for m in results.models] == [results.models[0].tokens] * 3


def test_the_use_of_every_router_is_recorded(results: StudyResults) -> None:
    """Two projections and one layer of blocks."""
    for name in MODELS[1:]:
        line = read_metrics(results.of(name)[0].run_folder, "train")[-1]
        assert len(line["usage"]) == len(line["entropy"]) == len(line["lowest"]) == 3
        assert all(len(shares) == 4 for shares in line["usage"].values())
        assert all(0 <= value <= 1 for key in ("entropy", "lowest") for value in line[key].values())
        assert line["routing_loss"] >= 3 * 0.2 * 0.99, "three routers at weight 0.2; 1 is even"
    assert "usage" not in read_metrics(results.of("gpt2")[0].run_folder, "train")[-1]


def test_who_goes_where_in_every_model_that_routes(results: StudyResults) -> None:
    with open(results.study.folder / "routes" / "shares.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == set(MODELS[1:])
    assert {row["layer"] for row in rows} == {
        "stages.1.experts.router",
        "stages.2.layers.0.join.router",
        "stages.3.experts.router",
    }
    assert "Who goes where" in (results.study.folder / "report.html").read_text()


def test_one_table_and_one_picture_of_every_checkpoint(results: StudyResults) -> None:
    table = learning(results)
    assert table.columns == ["words", *MODELS]
    assert [row[0] for row in table.rows] == ["250", "500", "750", "1000", "2000", "3000"]
    for model, column in zip(results.models, zip(*(row[1:] for row in table.rows), strict=True), strict=True):
        written = [line["bits_per_byte"] for line in read_metrics(model.run_folder, "validation")]
        assert [float(cell) for cell in column] == pytest.approx(written, abs=1e-3)
        assert model.bits["english"] == pytest.approx(written[-1], abs=1e-3), "all of the dev files"
    folder = results.study.folder
    assert (folder / "tables" / "learning.csv").read_text().startswith("words,gpt2,moep,moep_swiglu\n")
    assert charts_of(folder / "report.html")["english"]["x_label"] == "words seen"
    page = (folder / "report.html").read_text()
    assert "words seen" in page
    assert "Models trained from scratch on the same batches" in page


def test_what_would_be_said_twice_is_said_once(results: StudyResults) -> None:
    assert quality(results).columns[-1] == "english", "the mean of one domain is that domain"
    assert [table.name for table in tables(results)] == ["tables/bits-per-byte", "tables/cost"]
    assert learning(results).name in [table.name for table in study_report(results, None).tables]
    ends = replace(results, models=[replace(model, curve=model.curve[-1:]) for model in results.models])
    assert not study_report(ends, None).tables, "one validation is no learning curve"


def test_size_speed_and_wall_clock_stand_side_by_side(results: StudyResults) -> None:
    table = cost(results)
    assert table.columns[-3:] == ["tokens/s", "training", "wall clock"]
    assert [row[0] for row in table.rows] == list(MODELS)
    for row, model in zip(table.rows, results.models, strict=True):
        assert row[1] == f"{model.parameters:,}"
        assert model.active_parameters < model.parameters or model.name == "gpt2"
        assert "–" not in row
        assert model.wall_seconds > model.seconds > 0, "validating and saving take time too"
    facts = json.loads((results.study.folder / "results.json").read_text())
    assert facts["models"][0]["curve"][0][1] == 250


def test_one_model_alone_and_then_the_others(
    results: StudyResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Path(results.study.domains["english"].folder or "")
    alone = load_study(RECIPE, toy(corpus, tmp_path / "out", "~steps.moep", "~steps.moep_swiglu"))
    first = run_study(alone, device="cpu")
    assert [entry.name for entry in first] == ["gpt2"]
    assert first[0].run.model.parts[-4:-1] == ("seed-42", "gpt2", "checkpoints")
    capsys.readouterr()
    more = run_study(load_study(RECIPE, toy(corpus, tmp_path / "out", "~steps.moep_swiglu")), device="cpu")
    assert [entry.name for entry in more] == ["gpt2", "moep"]
    assert "gpt2 is finished already" in capsys.readouterr().out


def test_a_corpus_that_is_not_there_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        study(RECIPE, [f"domains.english.folder={tmp_path / 'nowhere'}", f"out={tmp_path / 'out'}"])
    assert "the corpus 'english' is not there" in str(caught.value)
    assert "Name it with `domains.english.folder=DIR`" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert any("domains.english.folder=DIR" in problem for problem in show(RECIPE)["problems"])


def test_a_corpus_smaller_than_an_epoch_is_told_with_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", "train", stories=2)
    small = ["data.chunking.stride=32", "data.chunking.words_per_epoch=5000", "epochs=0.1"]
    more = ["~steps.moep", "~steps.moep_swiglu", "checkpoints.every='1k words'", "validation.every='1k words'"]
    models = run_study(load_study(RECIPE, toy(corpus, tmp_path / "out", *small, *more)), device="cpu")
    output = capsys.readouterr()
    assert "and an epoch should show 5,000: epochs repeat sooner." in output.err
    assert "The budget is 500 words and the data has" in output.out
    assert models[0].run.progress.words == 500, "exactly the budget"
