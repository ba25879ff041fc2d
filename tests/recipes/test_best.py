"""The recipes of `best/`: equal FLOPs, the settings of the whole budget, and the average of them at toy size."""

import csv
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.core.reading import read_json
from braidlm.data.corpora.builtin import documents
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import load_study
from braidlm.studies.show import show


def write_corpus(folder: Path) -> Path:
    for split, start, count in (("train", 0, 80), ("dev", 1000, 120)):
        (folder / split).mkdir(parents=True)
        (folder / split / "stories.txt").write_text("\n\n".join(documents("stories", 1, start, count)))
    return folder


def toy(corpus: Path, out: Path, *models: str) -> list[str]:
    """Overrides that leave everything of the recipes but their sizes and the seeds of students."""
    changes = [f"domains.english.folder={corpus}", f"out={out}", f"data.cache={corpus.parent / 'cache'}"]
    changes += ["data.length=32", "data.tokenizer.vocab_size=400", "data.chunking.words_per_epoch=300", "epochs=1"]
    changes += ["training.lengths=[{until: 0.7, length: 8}]", "training.batch=4", "training.warmup=2", "seeds=[1,2]"]
    changes += ["validation.tokens=400", *(f"{key}.every='300 words'" for key in ("checkpoints", "validation"))]
    changes += [f"tasks={{names: [bits_per_byte], data: {corpus}, settings: {{half: report, max_tokens: 400}}}}"]
    for model in models:
        changes += [
            f"models.{model}.{key}" for key in ("width=24", "block.attention.heads=2", "stages[0].block.layers=1")
        ]
        changes += [f"models.{model}.stages[1].block.layers=1"] if "routed" in model else []
    return changes


def test_both_sides_have_the_same_flops() -> None:
    models = {row["name"]: row for row in show("best/strict-small")["models"]}
    assert models["routed"]["flops_per_token"] == pytest.approx(models["dense"]["flops_per_token"], rel=0.01)
    assert models["dense"]["flops_per_token"] == pytest.approx(58e6, rel=0.01)


def test_the_pair_for_a_cpu_has_the_same_models_and_needs_no_files() -> None:
    facts = show("best/strict-small-cpu")
    assert (facts["domains"], facts["problems"]) == ({"english": "stories"}, [])
    small, full = (load_study(f"best/strict-small{end}") for end in ("-cpu", ""))
    models = {row["name"]: row for row in facts["models"]}
    assert list(models) == list(full.steps)
    assert models["routed"]["flops_per_token"] == pytest.approx(models["dense"]["flops_per_token"], rel=0.01)
    assert all(row["parameters"] < 2e6 and row["training"]["words"] == 300_000 for row in models.values())
    assert small.data.chunking.kind == full.data.chunking.kind
    assert all(small.training[key] == full.training[key] for key in ("optimizer", "schedule", "average"))


def test_every_model_of_the_search_has_the_same_flops_and_one_change() -> None:
    pair, search = (load_study(f"best/{name}") for name in ("strict-small", "search"))
    usual, ours = encode(pair), encode(search)
    assert {key for key in ours if ours[key] != usual.get(key)} == {"name", "seeds", "models", "steps"}
    assert search.steps["dense"] == pair.steps["dense"]
    assert search.steps["routed"].train == pair.steps["routed"].train
    for row in show("best/search")["models"]:
        assert row["flops_per_token"] == pytest.approx(58.2e6, rel=0.015)
        twin = "routed" if row["name"].startswith("routed") else "dense"
        assert row["parameters"] == pytest.approx(51.75e6 if twin == "routed" else 24.4e6, rel=0.05)
        changed = [
            search.model_of(row["name"]) != search.model_of(twin),
            search.options_of(row["name"]) != search.options_of(twin),
        ]
        assert changed.count(True) == (row["name"] != twin)


def test_the_whole_budget() -> None:
    made = encode(load_study("best/strict-small"))
    assert made["epochs"] * made["data"]["chunking"]["words_per_epoch"] == 100_000_000
    assert made["training"]["optimizer"]["weight_decay"] == 1.0
    assert made["validation"]["half"] == "choose"


def test_averages_have_the_settings_of_the_pair_but_for_two_and_their_students_its_models() -> None:
    pair, averaged = (encode(load_study(f"best/{name}")) for name in ("strict-small", "average"))
    others = {"name", "models", "steps", "data", "training"}
    assert {key for key in averaged if averaged[key] != pair.get(key)} == others
    for key, changed in (("data", {"chunking"}), ("training", {"schedule", "average"})):
        assert {name for name in pair[key] if pair[key][name] != averaged[key].get(name)} == changed
    alone = {row["name"]: row for row in show("best/strict-small")["models"]}
    models = {row["name"]: row for row in show("best/average-and-dense")["models"]}
    assert models["together"]["flops_per_token"] == 3 * models["wide"]["flops_per_token"]
    for student, model in (("routed_student", "routed"), ("dense_student", "dense")):
        for count in ("parameters", "flops_per_token"):
            assert models[student][count] == alone[model][count]


@pytest.mark.slow
def test_from_text_to_the_table(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    changes = [*toy(corpus, tmp_path / "out", "wide", "routed", "dense"), "data.chunking.stride=8"]
    changes += [f"+steps.{name}_student.seeds=[1]" for name in ("routed", "dense")]
    assert main(["train", "best/average-and-dense", *changes, "--device", "cpu"]) == 0
    rows = list(csv.DictReader((tmp_path / "out/tables/bits-per-byte.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["wide", "together", "routed_student", "dense_student"]
    assert [row["seeds"] for row in rows] == ["2", "1", "1", "1"]
    tasks = csv.DictReader((tmp_path / "out/tables/tasks.csv").read_text().splitlines())
    scores = {row["model"]: row["bits_per_byte"] for row in tasks}
    for row in rows:  # `braid eval` and the study score the report half alike
        bits = [text.split(" ")[0] for text in (row["report half"], scores[row["model"]])]
        assert float(bits[0]) == pytest.approx(float(bits[1]), abs=0.006)
        assert row["choose half"] != row["report half"]
    assert (tmp_path / "out/together/model.safetensors").is_file()
    assert (tmp_path / "out/report.html").is_file()


@pytest.mark.slow
def test_the_pair_ends_with_the_mean_of_its_last_weights(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    changes = [*toy(corpus, tmp_path / "out", "routed", "dense"), "seeds=[1]", "training.average.share=0.5"]
    assert main(["train", "best/strict-small", *changes, "checkpoints.every='100 words'", "--device", "cpu"]) == 0
    for model in ("routed", "dense"):
        folders = sorted((tmp_path / "out/seed-1" / model / "checkpoints").iterdir())
        averaged = [read_json(folder / "lineage.json")["training"].get("averaged", 0) for folder in folders]
        assert averaged[0] == 0 < 1 < averaged[-1]
