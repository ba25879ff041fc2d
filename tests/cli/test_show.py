"""`braid show`: facts of presets, recipes, model folders, runs and packed data."""

import json
import shutil
from pathlib import Path

import pytest

import braidlm
from braidlm.data.packing.prepare import prepare
from braidlm.training.monitoring import speed


def test_a_preset_as_json(braid):
    facts = braid("show", "models/gpt2-28m", "--json").json()
    assert facts["kind"] == "preset"
    assert facts["about"].startswith("GPT-2 28M")
    assert facts["parameters"] == facts["active_parameters"] == 27_782_400
    assert (facts["vocab_size"], facts["width"], facts["context"], facts["layers"]) == (16_384, 384, 512, 12)
    assert facts["lineage"] is None
    assert not facts["vocab_size_assumed"]
    assert sum(stage["parameters"] for stage in facts["stages"]) == facts["parameters"]
    assert sum(stage["flops_per_token"] for stage in facts["stages"]) == facts["flops_per_token"]
    memory = facts["memory"]
    assert memory["weights_float32"] == 2 * memory["weights_bfloat16"] == 4 * 27_782_400
    assert memory["training_adamw"] == 16 * 27_782_400
    assert memory["cache_float32"] == 4 * 12 * 2 * 384 * 512


def test_flops_by_hand_and_by_length(braid):
    width, vocab, length = 384, 16_384, 128
    facts = braid("show", "models/gpt2-28m", "--json", "--length", length).json()
    products = 12 * 12 * width * width + vocab * width
    scores = 12 * 4 * width * (length + 1) / 2
    assert facts["flops_per_token"] == 2 * products + scores
    assert facts["length"] == length


def test_a_vocabulary_that_is_assumed_is_said(braid):
    shown = braid("show", "models/gpt2")
    assert shown.code == 0
    assert "124,439,808" in shown.out
    assert "50,257 (assumed)" in shown.out
    assert "note: The vocabulary comes from the tokenizer; counted here with GPT-2's 50,257 tokens." in shown.out
    assert braid("show", "models/gpt2", "vocab_size=1000", "--json").json()["notes"] == []


def test_losses_that_no_kernel_serves_are_said(braid):
    assert "Extra losses read the plain pass" in braid("show", "tiny/hybrid", "--json").json()["notes"][0]
    assert braid("show", "tiny/llama", "--json").json()["notes"] == []


def test_overrides(braid):
    facts = braid("show", "models/gpt2-28m", "stages.0.block.layers=3", "--json").json()
    assert facts["layers"] == 3
    assert facts == braidlm.show("models/gpt2-28m", ["stages.0.block.layers=3"])
    without = braid("show", "best/strict-small", "~steps.routed", "--json").json()
    assert [model["name"] for model in without["models"]] == ["dense"]


RECIPE = """
name: mine
model: {width: 32, context: 64, positions: learned, stages: [block]}
data: {length: 64, tokenizer: {kind: bpe, vocab_size: 300}, sets: {stories: {source: stories}}}
training: {budget: 9 steps}
"""


@pytest.mark.parametrize(
    ("overrides", "vocab_size", "problems"),
    [
        ([], 300, []),
        (["model.vocab_size=512"], 512, []),
        (["data.tokenizer.vocab_size=null"], 16_384, []),
        (["data.tokenizer.kind=bytes"], 258, []),
        (["data.tokenizer=some/hub-name"], 50_257, []),
        (["model.vocab_size=256"], 256, ["the tokenizer has 300 tokens, the model a vocabulary of 256"]),
        (["data.length=128"], 300, ["data.length is 128, and the model has 64 learned positions"]),
        (
            ["data.sets={a: {path: nowhere}}", "model.vocab_size=9"],
            9,
            ["data.sets.a.path: nowhere is not a packed data set"],
        ),
    ],
)
def test_a_recipe_of_a_run(braid, tmp_path: Path, overrides: list[str], vocab_size: int, problems: list[str]):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    facts = braid("show", tmp_path / "mine.yaml", *overrides, "--json").json()
    assert facts["kind"] == "recipe"
    assert (facts["vocab_size"], facts["problems"]) == (vocab_size, problems)
    assert facts["recipe"]["training"] == {"budget": "9 steps"}


@pytest.mark.parametrize(("budget", "tokens"), [("9 steps", 9 * 8 * 2 * 64), ("500 tokens", 500), ("1000 words", 1400)])
def test_the_expected_time_of_a_run(
    braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, tokens: int
) -> None:
    """Three forward passes' FLOPs for every token, and one for every token that a validation reads."""
    monkeypatch.setattr(speed, "_product_speed", lambda device: 1e9)
    (tmp_path / "mine.yaml").write_text(
        RECIPE.replace("{budget: 9 steps}", f"{{budget: {budget}, batch: 8, accumulation: 2}}")
    )
    facts = braid("show", tmp_path / "mine.yaml", "validation.tokens=100", "--json").json()
    assert facts["expected_seconds"] == pytest.approx((3 * tokens + 100) * facts["flops_per_token"] / 0.3e9)
    often = braid(
        "show", tmp_path / "mine.yaml", "validation.tokens=100", "validation.every='300 tokens'", "--json"
    ).json()
    times = -(-tokens // 300)
    assert often["expected_seconds"] == pytest.approx((3 * tokens + 100 * times) * facts["flops_per_token"] / 0.3e9)
    assert "expected time" in braid("show", tmp_path / "mine.yaml").out
    assert "expected time" not in braid("show", "models/gpt2").out, "a preset is not trained"


def test_every_problem_of_a_recipe_at_once(braid, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    shown = braid("show", tmp_path / "mine.yaml", "model.widht=3", "training.batch=x", "data.lenght=1")
    assert shown.code == 2
    assert shown.out == ""
    assert "model: unknown key 'widht'. Did you mean 'width'?" in shown.err
    assert "training.batch: expected a whole number from 1 to 1000000, got 'x'" in shown.err
    assert "data: unknown key 'lenght'. Did you mean 'length'?" in shown.err


def test_a_model_folder(braid, model_folder: Path):
    facts = braid("show", model_folder, "--json").json()
    assert facts["kind"] == "model"
    assert facts["problems"] == []
    assert facts["lineage"]["made_by"] == "a test"
    assert facts["tokenizer"] == facts["lineage"]["tokenizer"]
    assert facts["vocab_size"] == 258
    shown = braid("show", model_folder)
    for text in ("0: block", "total", "made by", "a test", "7 steps, 700 tokens, 70 words", facts["tokenizer"][:16]):
        assert text in shown.out
    assert "problem" not in shown.out


def test_frozen_parts_are_named(braid, model_folder: Path):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"frozen": ["embedding", "head"]}))
    assert "note: Training leaves these parts as they are: embedding, head." in braid("show", model_folder).out


def test_a_damaged_model_folder_is_shown_with_its_problems(braid, model_folder: Path):
    config = json.loads((model_folder / "config.json").read_text())
    config["vocab_size"] = 200
    (model_folder / "config.json").write_text(json.dumps(config))
    (model_folder / "lineage.json").unlink()
    problems = "\n".join(braid("show", model_folder, "--json").json()["problems"])
    assert "model.embedding.weight is [258, 32], the configuration says [200, 32]" in problems
    assert "lineage.json is missing" in problems
    assert "the tokenizer has 258 tokens, the model a vocabulary of 200" in problems
    assert "problem: lineage.json is missing" in braid("show", model_folder).out


def test_a_run_shows_its_newest_checkpoint_and_last_records(braid, run_folder: Path):
    facts = braid("show", run_folder, "--json").json()
    assert facts["kind"] == "run"
    assert facts["lineage"]["training"] == {"steps": 10}
    assert facts["run"] == {
        "checkpoint": "step-10",
        "train": {"step": 10, "loss": 4.5, "tokens": 1000},
        "validation": {"step": 10, "loss": 4.75},
    }
    shown = braid("show", run_folder).out
    assert "step 10, loss 4.5, tokens 1,000" in shown
    assert "step-10" in shown


def test_a_run_before_its_first_checkpoint(braid, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    facts = braid("show", tmp_path, "--json").json()
    assert (facts["kind"], facts["vocab_size"], facts["run"]) == ("run", 300, {"checkpoint": None})
    assert "no checkpoint yet" in facts["notes"][0]


def test_packed_data(braid, tmp_path: Path):
    (tmp_path / "x.txt").write_text("One day a cat sat.\n\nThe end came soon.\n")
    data = braidlm.prepare([str(tmp_path / "x.txt")], tmp_path / "packed", tokenizer="bytes", workers=1)
    braid("list", "recipes")  # takes what preparing printed
    facts = braid("show", data.folder, "--json").json()
    assert (facts["kind"], facts["tokens"]) == ("data", data.manifest.tokens)
    shown = braid("show", data.folder).out
    for text in (f"{data.manifest.tokens}", "tokens per word", "x.txt", "fields (text), joiner \\n, separator blank"):
        assert text.replace(" ", "") in "".join(shown.split()), "long paths are broken anywhere"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models/gpt2-82m"], "there is no recipe and no folder 'models/gpt2-82m'. Did you mean 'models/gpt2-28m'?"),
        (["nothing.yaml"], "nothing.yaml: this file does not exist"),
        (["models/gpt2", "block.attention.heads=7"], "models/gpt2: width 768 does not divide into 7 heads"),
        (["models/gpt2", "--length", "0"], "length: expected a whole number from 1 to"),
        (["models/gpt2", "--length", "2000"], "length 2000 is more than the model's 1024 learned positions"),
    ],
)
def test_errors(braid, arguments: list[str], text: str):
    shown = braid("show", *arguments)
    assert (shown.code, shown.out) == (2, "")
    assert text in shown.err


def test_folders_that_are_nothing_or_cannot_change(braid, tmp_path: Path, model_folder: Path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "circle: these links lead in a circle" in braid("show", tmp_path / "circle").err
    (tmp_path / "empty").mkdir()
    assert "neither a model folder (no config.json) nor a run" in braid("show", tmp_path / "empty").err
    shown = braid("show", model_folder, "width=3")
    assert shown.code == 2
    assert "overrides change a recipe, and this is a folder: width=3" in shown.err
    (model_folder / "config.json").write_text('{"model_type": "bert"}')
    assert "this is an encoder ('bert')" in braid("show", model_folder).err
    (model_folder / "config.json").write_text('{"model_type": "mamba"}')  # a decoder, though one without attention
    assert "'mamba'" in braid("show", model_folder).out


def test_models_side_by_side(braid, model_folder: Path, run_folder: Path):
    shown = braid("show", model_folder, run_folder)
    assert shown.code == 0
    assert shown.out.splitlines()[0].split() == ["model", "run"]
    assert [line.split()[1:] for line in shown.out.splitlines() if line.startswith("trained steps")] == [
        ["steps", "7", "10"]
    ]
    facts = braid("show", model_folder, "models/gpt2", "width=64", "block.attention.heads=4", "--json").json()
    assert [model["width"] for model in facts["models"]] == [32, 64]


def test_a_study_shows_words_epochs_checkpoints_and_time(braid):
    facts = braid("show", "papers/moep/strict-small", "--json").json()
    training = facts["models"][0]["training"]
    assert (training["words"], training["epochs"], training["checkpoints"]) == (100_000_000, 10, 19)
    assert facts["expected_seconds"] > 0
    shown = braid("show", "papers/moep/strict-small").out
    assert "expected time" in shown
    assert "checkpoints" in shown


def test_a_studys_folder_shows_its_models(braid, run_folder: Path, tmp_path: Path):
    study = tmp_path / "study"
    for name in ("dense", "routed"):
        shutil.copytree(run_folder, study / "seed-1" / name)
    facts = braid("show", study, "--json").json()
    assert [Path(model["name"]).name for model in facts["models"]] == ["dense", "routed"]
    assert braid("show", study / "dense", "--json").json()["name"] == str(study / "seed-1" / "dense")
    assert braid("show", study).out.splitlines()[0].split() == ["dense", "routed"]


def test_a_folder_of_transformers_is_shown_as_braid_reads_it(braid, capsys, tmp_path: Path, made_model: Path):
    braidlm.convert(made_model, tmp_path / "gpt2", to="gpt2")
    capsys.readouterr()
    ours, theirs = (braid("show", folder, "--json").json() for folder in (made_model, tmp_path / "gpt2"))
    assert theirs["parameters"] == ours["parameters"]
    assert "This is a 'gpt2' folder" in theirs["notes"][0]


def test_a_converted_model_names_its_source_without_the_sources_recipe(braid, capsys, tmp_path: Path, made_model: Path):
    braidlm.convert(made_model, tmp_path / "gpt2", to="gpt2")
    lineage = json.loads((tmp_path / "gpt2" / "lineage.json").read_text())
    lineage["sources"][0]["lineage"] = {"recipe": {"training": {"batch": 16}}, "training": {"steps": 100}}
    (tmp_path / "gpt2" / "lineage.json").write_text(json.dumps(lineage))
    capsys.readouterr()
    shown = " ".join(braid("show", tmp_path / "gpt2").out.split())
    assert "lineage (training (steps 100))" in shown
    assert "batch" not in shown
    weights = lineage["sources"][0]["weights"][0]["sha256"]
    assert weights[:12] in shown
    assert weights[:13] not in shown


def test_a_name_far_from_every_recipe_is_answered_in_two_lines(braid):
    assert len(braid("show", "nothing-of-this-name").err) < 300


def test_a_misspelled_folder_is_told_from_a_misspelled_recipe(braid, model_folder: Path):
    assert f"Did you mean '{model_folder}'?" in braid("show", f"{model_folder}l").err
    assert "there is no recipe and no folder 'tiny/lama'. Did you mean 'tiny/llama'?" in braid("show", "tiny/lama").err


def test_a_data_set_at_an_address(braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    address = f"file://{tmp_path}/packed"
    prepare("stories", address, documents=9, tokenizer="bytes", workers=1)
    assert f"packed data {address}" in (shown := braid("show", address).out)
    assert "documents        9" in shown
    assert "no packed data set at this address" in braid("show", f"{address}-not").err
