"""What a user can get wrong: each answered with what, where and what to do, exit code 2, and nothing half-written."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.packing.prepare import prepare
from braidlm.training import trainable
from braidlm.training.run_folder import check_folder
from braidlm.training.saving import checkpoints
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes, written


@pytest.fixture
def recipe(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good recipe in an empty folder, which is the working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return written(tiny_recipe({"stories": stories}, tmp_path / "here" / "run"), tmp_path)


WRONG = {
    "a misspelled key": (
        ["training.optimiser.lr=3"],
        ["error: training: unknown key 'optimiser'. Did you mean 'optimizer'?", "Nothing was started."],
    ),
    "a misspelled key deep inside": (
        ["model.stages=[{block: {attention: {haeds: 2}}}]"],
        ["error: model.stages[0].block.attention: unknown key 'haeds'. Did you mean 'heads'?"],
    ),
    "a misspelled section": (["trainin.batch=3"], ["error: unknown key 'trainin'. Did you mean 'training'?"]),
    "a wrong type": (["training.batch=many"], ["training.batch: expected a whole number from 1 to", ", got 'many'"]),
    "a wrong value": (["training.clip=0"], ["training.clip: expected a number above 0 and at most 1e9, got 0"]),
    "numbers that are none, or absurd": (
        [
            "training.optimizer.lr=nan",
            "training.optimizer.eps=inf",
            "training.batch=-3",
            "seed=9223372036854775808",
            "model.vocab_size=-1",
            "model.stages=[{block: {layers: 1000000000}}]",
        ],
        [
            "training.optimizer.lr: expected a number above 0 and at most 1e9, got nan",
            "training.optimizer.eps: expected a number above 0 and at most 1, got inf",
            "training.batch: expected a whole number from 1 to 1000000, got -3",
            "seed: expected a whole number from 0 to 9223372036854775807, got 9223372036854775808",
            "model.vocab_size: expected a whole number from 1 to 10000000, got -1",
            "model.stages[0].block.layers: expected a whole number from 1 to 1000, got 1000000000",
        ],
    ),
    "a model larger than the machine": (
        ["model.width=65536", "model.stages=[{block: {layers: 100}}]"],
        ["error: weights, gradients and AdamW's two moments need ", " GB of memory, and this machine has "],
    ),
    "a wrong choice": (
        ["training.schedule=cosin"],
        ["training.schedule: unknown schedule 'cosin'. Did you mean 'cosine'?"],
    ),
    "a wrong amount": (["training.budget=soon"], ["training.budget: 'soon' is not an amount. Write for example"]),
    "wrong betas": (
        ["training.optimizer.betas=[0.9,1.5]"],
        ["training.optimizer.betas[1]: expected a number of at least 0 and below 1, got 1.5"],
    ),
    "nothing kept": (["checkpoints.keep=0"], ["checkpoints.keep: expected a whole number from 1 to", ", got 0"]),
    "several at once": (
        ["model.widht=3", "training.batch=many", "data.length=long", "sed=4", "model.vocab_size=0"],
        [
            "model: unknown key 'widht'. Did you mean 'width'?",
            "model.vocab_size: expected a whole number from 1 to 10000000, got 0",
            "unknown key 'sed'. Did you mean 'seed'?",
            "data.length: expected a whole number from 1 to 100000000, got 'long'",
            "training.batch: expected a whole number from 1 to 1000000, got 'many'",
        ],
    ),
    "an override that is none": (["training"], ["this recipe cannot be composed", "Overrides are written key=value"]),
    "a packed folder that is not there": (
        ["data.sets.stories.path=/no/where"],
        [
            "error: data.sets.stories.path (/no/where): there is no such folder",
            "Make a packed data set with `braid prepare SOURCE --out DIR`.",
        ],
    ),
    "a file that is not there": (
        ["~data.sets.stories", "data.sets.mine.source=/no/where.txt"],
        ["error: /no/where.txt: there is no such file, folder or corpus.", "Sources are files, folders, globs"],
    ),
    "an empty file": (
        ["~data.sets.stories", "data.sets.mine.source=../empty.txt"],
        ["data.sets.mine.source: there are no documents in it, only empty ones or none", "Check the source"],
    ),
    "text that is not UTF-8": (
        ["~data.sets.stories", "data.sets.mine.source=../latin.txt"],
        ["latin.txt: byte 6 (0xfc) is not UTF-8 text", "--encoding latin-1"],
    ),
    "both a path and a source": (
        ["data.sets.stories.source=stories"],
        ["data.sets.stories: give either `path` (a packed folder), `source` (text to prepare) or `folder` (a corpus"],
    ),
    "a vocabulary smaller than the tokenizer's": (
        ["model.vocab_size=10"],
        [
            "error: model.vocab_size: the model has a vocabulary of 10, the tokenizer has 300 tokens",
            "Leave out model.vocab_size (it is taken from the tokenizer)",
        ],
    ),
    "sequences longer than learned positions": (
        ["model.positions=learned", "data.length=64"],
        ["error: data.length is 64 and the model's context only 32", "Raise model.context or lower data.length."],
    ),
    "a weight for an unknown set": (
        ["data.mix.weights={storys: 1}"],
        ["mix: a weight is given for 'storys', which is no data set. Did you mean 'stories'?"],
    ),
    "too little to hold out": (
        ["data.sets.stories.holdout=0.001"],
        ["data.sets.stories.holdout: 0.001 of 120 documents is none to validate on", "Raise it"],
    ),
    "nothing to start from": (["start_from=/no/model"], ["/no/model: there is no such folder"]),
    "no such device": (["--device", "nothing"], ["there is no device 'nothing' here", "Use auto"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes(mistake: str, recipe: Path, tmp_path: Path, braid: Callable[..., Any]) -> None:
    (tmp_path / "empty.txt").write_text("\n\n \n")
    (tmp_path / "latin.txt").write_bytes("Ein gr\u00fcner Baum.\n\n".encode("latin-1") * 50)
    overrides, texts = WRONG[mistake]
    answer = braid("train", recipe, *overrides)
    assert answer.code == 2
    for text in texts:
        assert text in answer.err
    assert "Traceback" not in answer.err
    assert list((tmp_path / "here").iterdir()) == []


def test_a_recipe_that_is_not_there(braid: Callable[..., Any], recipe: Path) -> None:
    answer = braid("train", "nothing.yaml")
    assert (answer.code, answer.err) == (2, "error: nothing.yaml: this file does not exist\n")
    near = recipe.with_name(f"x{recipe.name}")
    assert f"{near}: this file does not exist. Did you mean '{recipe.name}'?" in braid("train", near).err
    answer = braid("train", "tiny/lama")
    assert (answer.code, "Did you mean 'tiny/llama'?" in answer.err) == (2, True)


def test_a_preset_is_no_run(braid: Callable[..., Any], recipe: Path) -> None:
    answer = braid("train", "models/gpt2")
    assert answer.code == 2
    assert "models/gpt2: this is a model without data and training" in answer.err
    assert "`defaults: [/models/gpt2@model, _self_]`" in answer.err


def test_an_encoding_can_be_named(braid: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Ein gr\u00fcner Baum stand da.\n\n".encode("latin-1") * 200)
    source = "data.sets.mine={source: ../latin.txt, encoding: latin-1, holdout: 0.1}"
    answer = braid("train", recipe, "~data.sets.stories", source, "data.tokenizer.vocab_size=280", "training.budget=1")
    assert answer.code == 0, answer.err


def test_a_model_of_another_shape(
    braid: Callable[..., Any], recipe: Path, stories: Path, tmp_path: Path, maths: Path
) -> None:
    first = train(tiny_recipe({"stories": stories}, tmp_path / "first", training={"budget": 1}))
    answer = braid("train", recipe, f"start_from={first.model}", "model.width=32", "model.block.attention.heads=4")
    assert answer.code == 2
    assert (
        f"error: {first.model}: the model to start from has another shape (the model's -> the recipe's):\n"
        in answer.err
    )
    assert "\n  model.width: 16 -> 32\n" in answer.err
    assert "\n  model.stages[0].block.attention.heads: 2 -> 4\n" in answer.err
    assert "Leave out `model` to use the folder's own architecture; `~model` on" in answer.err
    answer = braid("train", recipe, "~model", f"start_from={first.model}", "data.length=64")
    assert "data.length is 64 and the model's context only 32" in answer.err
    other = tmp_path / "other"
    prepare("stories", other, documents=60, vocab_size=400, workers=1)
    answer = braid("train", recipe, "~model", f"start_from={first.model}", f"data.sets.stories.path={other}")
    assert answer.code == 2
    assert "the model has a vocabulary of 300, the tokenizer has 400 tokens" in answer.err
    alike = tmp_path / "alike"  # as many tokens, but others
    prepare("maths", alike, documents=60, vocab_size=300, workers=1)
    answer = braid("train", recipe, "~model", f"start_from={first.model}", f"data.sets.stories.path={alike}")
    assert answer.code == 2
    assert "the data has another tokenizer than the model to start from: " in answer.err
    assert not (tmp_path / "here" / "run").exists()


def test_a_model_of_the_same_shape_is_gone_on_with(stories: Path, tmp_path: Path) -> None:
    """Also with other dropout; from a run folder, its newest checkpoint."""
    first = train(tiny_recipe({"stories": stories}, tmp_path / "first", training={"budget": 2}))
    still = {"budget": 1, "optimizer": {"lr": 1e-30}}
    for index, changes in enumerate([{}, {"model": {"dropout": 0.3}}]):
        begun = tiny_recipe(
            {"stories": stories}, tmp_path / str(index), start_from=str(first.folder), training=still, **changes
        )
        second = train(begun)
        assert weight_bytes(second.model) == weight_bytes(first.model)
    assert load_model(second.model).model.drop.rate == 0.3
    begun.pop("model")
    begun["out"] = str(tmp_path / "own")
    assert weight_bytes(train(begun).model) == weight_bytes(first.model)


def test_the_folder_of_another_recipe(braid: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here" / "run"
    assert braid("train", recipe, "training.budget=2").code == 0
    before = weight_bytes(folder / "checkpoints" / "step-000002")
    answer = braid("train", recipe, "training.budget=1", "seed=9", "model.block.attention.heads=4")
    assert answer.code == 2
    assert answer.err.splitlines()[0] == (
        f"error: {folder}: this run folder belongs to another recipe (the folder's -> yours):"
    )
    assert answer.err.splitlines()[1:4] == [
        "  training.budget: 2 steps -> 1 steps",
        "  seed: 3 -> 9",
        "  model.stages[0].block.attention.heads: 2 -> 4",
    ]
    assert "give it a folder of its own (name=NAME or out=DIR), or let --fresh remove the run" in answer.err
    assert weight_bytes(folder / "checkpoints" / "step-000002") == before
    bad = braid("train", recipe, "training.budget=3", "model.vocab_size=1", "--fresh")
    assert bad.code == 2
    assert weight_bytes(folder / "checkpoints" / "step-000002") == before, "a mistake throws nothing away"
    assert braid("train", recipe, "training.budget=3", "seed=9", "--fresh").code == 0
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000003"]
    assert [r["step"] for r in records(folder, "train")] == [3]


def test_what_differs_is_shown_as_a_recipe_has_it(tmp_path: Path) -> None:
    """Keys and not Python's mappings; long texts to their end, where they may differ; of many keys the first."""
    texts = [f"/{'long/' * 20}{name}.txt" for name in "ab"]
    before = {"data": {"source": texts[0], "mix": None}, "model": {"stages": [{"layers": 2}]}}
    now = {
        "data": {"source": texts[1], "mix": {"weights": {"a": 1.0, "b": True}}},
        "model": {"stages": [{"layers": 2}, {"layers": 4}], **{f"key{number}": number for number in range(30)}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    with pytest.raises(BraidError) as caught:
        check_folder(tmp_path, now, fresh=False)
    lines = caught.value.what.splitlines()
    assert lines[1:5] == [
        f"  data.source: {texts[0]} -> {texts[1]}",
        "  data.mix: null -> {weights: {a: 1.0, b: true}}",
        "  model.stages[1]: null -> {layers: 4}",
        "  model.key0: null -> 0",
    ]
    assert lines[-1] == "  and 21 more"


@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["", "fresh"])
def test_a_folder_that_is_not_a_run_is_never_touched(
    fresh: list[str], braid: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("dear")
    answer = braid("train", recipe, f"out={tmp_path / 'photos'}", *fresh)
    assert answer.code == 2
    assert "photos: this folder exists and is not a run\nChoose another with out=DIR." in answer.err
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["a.jpg"]
    answer = braid("train", recipe, f"out={tmp_path / 'photos' / 'a.jpg'}", *fresh)
    assert "a file stands where the run's folder should be" in answer.err
    assert (tmp_path / "photos" / "a.jpg").read_text() == "dear"


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../../x", "a/b", "a\\b", "x" * 300])
def test_a_name_is_one_folders_name(name: str, braid: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    answer = braid("train", recipe, f"name='{name}'", "out=null", "--fresh")
    assert answer.code == 2
    assert "name: " in answer.err
    assert sorted(tmp_path.rglob("*")) == before


def test_fresh_removes_what_a_run_writes_and_nothing_else(
    braid: Callable[..., Any], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here" / "run"
    assert braid("train", recipe, "training.budget=2").code == 0
    (folder / "notes.txt").write_text("mine")
    (folder / "another").mkdir()
    (folder / "another" / "recipe.yaml").write_text("a run inside a run")
    answer = braid("train", recipe, "training.budget=1", "--fresh")
    assert answer.code == 0
    assert "not of the run, and kept: another; notes.txt" in answer.out + answer.err
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "another" / "recipe.yaml").is_file()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000001"]


def test_a_loss_that_is_not_finite(braid: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    options = ["training.optimizer={lr: 1e9, weight_decay: 1000}", "training.warmup=0", "training.schedule=constant"]
    options.append("checkpoints.every=1")
    answer = braid("train", recipe, *options)
    assert answer.code == 2
    folder = tmp_path / "here" / "run"
    assert f"error: {folder}: the " in answer.err
    assert "became infinite or not a number at step 2" in answer.err
    kept = folder / "checkpoints" / "step-000001"
    assert f"The last good checkpoint is {kept} (a run may start_from it)." in answer.err
    assert "Try a lower training.optimizer.lr (now 1e+09), a longer training.warmup" in answer.err
    load_model(kept)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000001"]
    again = braid("train", recipe, *options)
    assert (again.code, again.err) == (2, answer.err), "the same command goes on to the same end"


def test_a_loss_that_is_not_finite_before_any_checkpoint(braid: Callable[..., Any], recipe: Path) -> None:
    answer = braid("train", recipe, "training.optimizer.lr=1e9", "training.warmup=0")
    assert (answer.code, "No checkpoint was saved yet. Try a lower" in answer.err) == (2, True)


def failing(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = {
    "the weights": (trainable, "write_model_files"),
    "the optimizer": (checkpoints, "write_state"),
    "the manifest": (checkpoints, "write_json"),
    "the rename": (checkpoints, "make_final"),
}


@pytest.mark.parametrize("moment", FULL)
def test_a_full_disk_keeps_the_checkpoint_before(
    moment: str, braid: Callable[..., Any], recipe: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here" / "run"
    owner, name = FULL[moment]
    whole = getattr(owner, name)
    saved = folder / "checkpoints" / "step-000004"

    def full_after_the_first(*args: Any, **kwargs: Any) -> Any:
        return failing() if saved.is_dir() else whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full_after_the_first)
        answer = braid("train", recipe)
    assert answer.code == 2
    assert f"error: {folder}/checkpoints/step-000008: the disk is full; nothing was written" in answer.err
    assert "Free some space and run the same command again." in answer.err
    left = {p.relative_to(folder).as_posix() for part in ("checkpoints", "states") for p in (folder / part).iterdir()}
    assert left == {"checkpoints/step-000004", "states/step-000004"}
    load_model(folder / "checkpoints" / "step-000004")
    assert braid("train", recipe).code == 0
    never_full = train(tiny_recipe({"stories": stories}, tmp_path / "never"))
    assert weight_bytes(folder / "checkpoints" / "step-000012") == weight_bytes(never_full.model)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 1,500 kB, where this may be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no disk of our own can be made here")
    yield disk
    subprocess.run(["umount", disk], check=False)


def test_a_disk_that_is_really_full(braid: Callable[..., Any], recipe: Path, small_disk: Path) -> None:
    options = [f"out={small_disk / 'run'}", "checkpoints={every: 1, keep: null}"]
    answer = braid("train", recipe, *options)
    assert answer.code == 2
    assert "the disk is full; nothing was written" in answer.err
    kept = sorted((small_disk / "run" / "checkpoints").iterdir())
    assert kept
    for model in kept:
        load_model(model)
    assert sorted(p.name for p in (small_disk / "run" / "states").iterdir()) == [p.name for p in kept][-2:]


def test_full_metrics_are_told_as_a_full_disk(
    braid: Callable[..., Any], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    import builtins

    real = open

    def odd(path: Any, *args: Any, **kwargs: Any) -> Any:
        return real("/dev/full" if str(path).endswith("metrics.jsonl") else path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", odd)
    answer = braid("train", recipe)
    assert answer.code == 2
    assert "metrics.jsonl: the disk is full; nothing was written" in answer.err


def test_a_model_that_cannot_be_made_is_found_before_its_data(braid: Callable[..., Any], recipe: Path) -> None:
    stages = "model.stages=[{parallel: {layers: 1, paths: 4, join: {kind: routed, top_k: 5}}}]"
    answer = braid("train", recipe, "data.sets={stories: {path: nowhere}}", stages)
    assert answer.code == 2
    assert "stages[0]: top_k is 5, and there are only 4 to choose from" in answer.err
    assert "nowhere" not in answer.err
