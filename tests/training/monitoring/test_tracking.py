"""Metrics: what the records say is true, and where they go."""

import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.core.models.runs import read_metrics
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.open_data import open_data
from braidlm.model.config.strict import decode
from braidlm.training.monitoring.reporter import Score, mean_bits_per_byte, write_samples
from braidlm.training.monitoring.tracking import Tracker, drop_records_after
from braidlm.training.recipe import LogConfig, SampleConfig
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import ToyTokenizer, tiny_model
from tests.training.tiny_runs import records, tiny_recipe


@pytest.fixture(scope="module")
def run(stories: Path, maths: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked") / "run"
    train(
        tiny_recipe(
            {"stories": stories, "maths": maths},
            folder,
            samples={"prompts": ["Once upon", "Tom has"], "tokens": 6},
            log={"every": 5, "track": ["tensorboard"]},
        )
    )
    return folder


def test_train_records(run: Path) -> None:
    lines = read_metrics(run, "train")
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert [line["tokens"] for line in lines] == [n * 4 * 32 for n in (5, 10, 12)]
    for line in lines:
        assert set(line) == {
            *("kind", "step", "tokens", "words", "loss", "gradient_norm"),
            *("learning_rate", "epochs", "tokens_per_second", "memory", "seconds"),
        }
        assert 0 < line["loss"] < math.log(300) + 1
        assert line["gradient_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert set(line["epochs"]) == {"stories", "maths"}
    # cosine to 0.1 after a warm-up of 2 steps; the rate of the recorded step itself
    assert lines[0]["learning_rate"] == pytest.approx(0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * 2 / 10))))
    assert lines[-1]["learning_rate"] == pytest.approx(0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * 9 / 10))))


def test_validation_equals_a_slow_count_token_by_token(run: Path, stories: Path, maths: Path) -> None:
    model = load_model(run / "checkpoints" / "step-000012")
    recipe = tiny_recipe({"stories": stories, "maths": maths}, run)
    streams = open_data(decode(DataConfig, recipe["data"])).validation
    line = read_metrics(run, "validation")[-1]
    assert line["step"] == 12
    bits, sizes = [], []
    for stream in streams:
        starts = stream.data.document_starts
        chosen = stream.subset.choose(stream.data.manifest.documents)
        tokens: list[int] = []
        size = 0
        for number in chosen:  # whole documents up to 500 tokens, at least one
            document = stream.data.tokens[starts[number] : starts[number + 1]].tolist()
            if tokens and len(tokens) + len(document) > 500:
                break
            tokens += document
            size += int(stream.data.document_bytes[number])
        before = [stream.data.manifest.eos_id, *tokens[:-1]]
        nats = 0.0
        for begin in range(0, len(tokens), 32):
            with torch.no_grad():
                logits = model(torch.tensor([before[begin : begin + 32]])).logits[0].double()
            for row, token in zip(logits.log_softmax(-1), tokens[begin : begin + 32], strict=True):
                nats -= float(row[token])
        score = line["sets"][stream.name]
        assert (score["tokens"], score["bytes"]) == (len(tokens), size)
        assert score["loss"] == pytest.approx(nats / len(tokens), rel=1e-5)
        assert score["perplexity"] == pytest.approx(math.exp(nats / len(tokens)), rel=1e-4)
        assert score["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        bits.append(nats / math.log(2))
        sizes.append(size)
    assert line["bits_per_byte"] == pytest.approx(sum(bits) / sum(sizes), rel=1e-5)


def test_bits_per_byte_of_several_texts_are_weighed_by_their_bytes() -> None:
    scores = [Score(1.0, 1.0, 2.0, 10, 100), Score(1.0, 1.0, 4.0, 10, 300)]
    assert mean_bits_per_byte(scores) == 3.5


def test_sample_records(run: Path) -> None:
    lines = read_metrics(run, "sample")
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (6, 12) for prompt in ("Once upon", "Tom has")
    ]
    assert all(isinstance(line["text"], str) and line["text"] for line in lines)


@pytest.mark.parametrize("without_eos", [False, True])
def test_samples_disturb_nothing(without_eos: bool) -> None:
    tokenizer: Any = ToyTokenizer()
    tokenizer.encode = lambda text: [int(word[1:]) for word in text.split()]
    tokenizer.decode = lambda ids, skip_special_tokens=False: " ".join(f"w{i}" for i in ids)
    if without_eos:
        tokenizer.eos_id = None
    model = tiny_model(dropout=0.5).train()
    before = torch.get_rng_state()
    config = SampleConfig(prompts=["w1 w2", "w3"], tokens=5)
    first = write_samples(TrainableBraid(model), tokenizer, config, seed=1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert write_samples(TrainableBraid(model), tokenizer, config, seed=1) == first
    assert [prompt for prompt, _ in first] == ["w1 w2", "w3"]
    if without_eos:
        assert all(len(text.split()) == 5 for _, text in first)


def test_samples_change_nothing_in_the_training(run: Path, stories: Path, maths: Path, tmp_path: Path) -> None:
    bare = train(tiny_recipe({"stories": stories, "maths": maths}, tmp_path / "run", validation={"every": "100 steps"}))
    sampled = run / "checkpoints" / "step-000012" / "model.safetensors"
    assert (bare.model / "model.safetensors").read_bytes() == sampled.read_bytes()


def test_a_prompt_that_cannot_be_is_told_before_the_run(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", samples={"prompts": ["\ud800"]})
    with pytest.raises(BraidError, match="is not valid UTF-8"):
        train(recipe)
    assert not (tmp_path / "run").exists()


def test_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in records(run, "train")]
    assert "validation/sets/stories/perplexity" in events.Tags()["scalars"]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (0, 1):  # the second goes on with the same id
        tracker = Tracker(tmp_path, LogConfig(track=["wandb"], project="p"), "name", step)
        tracker.record("train", step + 1, loss=1.0, text="x")
        tracker.close()
    identity = (tmp_path / "wandb-id").read_text()
    assert len([p for p in (tmp_path / "wandb").iterdir() if p.name.endswith(identity)]) >= 1
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_tracker_that_cannot_log_in_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def init(**_: Any) -> None:
        raise Refused("no API key")

    fake: Any = types.ModuleType("wandb")
    fake.init, fake.errors = init, types.SimpleNamespace(Error=Refused)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(BraidError) as caught:
        Tracker(tmp_path, LogConfig(track=["wandb"]), "name", 0)
    assert str(caught.value) == (
        "Weights & Biases cannot be used: no API key\nLog in with `wandb login`, or set WANDB_MODE=offline."
    )


@pytest.mark.parametrize(("kind", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed(
    kind: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BraidError, match=r"is not installed\npip install 'braidlm\[track\]'"):
        Tracker(tmp_path, LogConfig(track=[kind]), "name", 0)


def test_records_of_undone_work_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step, "text": "Zo\u00eb"}) for step in (1, 2, 3)]
    path.write_text("\n".join([*lines[:2], "[]", "{}", lines[2], '{"kind": "train", "st']))
    assert [r["step"] for r in read_metrics(tmp_path) if isinstance(r, dict) and "step" in r] == [1, 2, 3]
    drop_records_after(path, 2)
    assert path.read_text() == "\n".join(lines[:2]) + "\n"
    drop_records_after(path, 0)
    assert path.read_text() == ""
    drop_records_after(tmp_path / "none.jsonl", 3)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert read_metrics(tmp_path / "nowhere") == []


def test_numbers_are_plain_json(run: Path) -> None:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert np.isfinite([line["loss"] for line in records(run, "train")]).all()


def test_a_run_that_goes_on_estimates_by_what_it_does_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """90 of 100 were done before; 1 more took 20 seconds, so 9 more take 180."""
    times = iter([0.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    with console.progress("run", 100.0, "steps", start=90.0) as advance:
        advance(91.0, "loss 2")
    assert capsys.readouterr().out == "run: 91 of 100 steps  loss 2  3m00s left\n"
