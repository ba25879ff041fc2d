"""Decoders of transformers with gates and adapters are evaluated as they are: a plain loop gives the same scores."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from braidlm.cli.main import main
from braidlm.core.reading import read_json
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluate import evaluate, open_to_score
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.completions import complete
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gated_folders import write_decoder
from braidlm.opening.gating import attach
from tests.tiny_decoders import CONFIGS, save_decoder, save_gates

TEXTS = ["One day a cat sat on a mat.", "It was a fine day, and nobody said a word.", "The end."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    bytes_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n\n".join(TEXTS))
    return folder


def plain_bits_per_byte(model: Any) -> float:
    """Window by window, straight from the definition."""
    tokenizer, nats = bytes_tokenizer(), 0.0
    eos, context = tokenizer.eos_id, model.config.max_position_embeddings
    stream = torch.tensor([eos, *(token for text in TEXTS for token in [*tokenizer.encode(text), eos])])
    for at in range(0, len(stream) - 1, context):
        ids = stream[at : at + context + 1]
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1]).logits
        nats += F.cross_entropy(logits[0].double(), ids[1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_per_byte_of_a_decoder_with_gates_are_those_of_a_plain_loop(
    name: str, tokenizer: Path, text: Path, tmp_path: Path
) -> None:
    base = save_decoder(name, tokenizer, tmp_path / name)
    gated = save_gates(base, tmp_path / "gated", "matrix", moved=0.3)
    zero = save_gates(base, tmp_path / "zero")
    found = evaluate([base, gated, zero], "bits_per_byte", data_of={"bits_per_byte": text})
    plain, with_gates, without = (model.tasks["bits_per_byte"].score for model in found.models)
    assert plain == pytest.approx(plain_bits_per_byte(decoder_by_name(base).load()), abs=1e-5)
    assert with_gates == pytest.approx(plain_bits_per_byte(decoder_by_name(gated).load()), abs=1e-5)
    assert without == pytest.approx(plain, abs=1e-6)
    assert abs(with_gates - plain) > 1e-4
    assert len({model.sha256 for model in found.models}) == 3


def test_another_base_is_another_model(tokenizer: Path, tmp_path: Path) -> None:
    """What gates were scored with is part of the key under which a result is cached."""
    one = save_decoder("llama", tokenizer, tmp_path / "one")
    gates = save_gates(one, tmp_path / "gates")
    (folder,) = open_to_score([gates])
    save_decoder("llama", tokenizer, one, rms_norm_eps=1e-3)
    (again,) = open_to_score([gates])
    assert folder.sha256 != again.sha256


def test_completions_are_those_of_generate(tokenizer: Path, tmp_path: Path) -> None:
    gated = save_gates(save_decoder("phi3", tokenizer, tmp_path / "phi3"), tmp_path / "gated", moved=0.3)
    (folder,) = open_to_score([gated])
    model = folder.load("cpu")
    prompts = [[5, 6, 7], [70, 71, 72, 73, 74], [9]]
    never = [lambda _: False] * len(prompts)
    evaluated = EvaluatedModel(Scorer(model), folder.tokenizer)
    for prompt, completion in zip(prompts, complete(evaluated, prompts, 6, never), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=256, pad_token_id=257)
        tokens = [token for token in expected[0, len(prompt) :].tolist() if token != 256]
        assert completion.text == folder.tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_verbs_open_gates_and_show_them(
    tokenizer: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = save_gates(save_decoder("gpt_neox", tokenizer, tmp_path / "neox"), tmp_path / "gated")
    out = tmp_path / "out"
    arguments = ["eval", str(gated), "bits_per_byte", "--data", f"bits_per_byte={text}", "--out", str(out)]
    assert main(arguments) == 0
    assert read_json(out / "results.json")["models"][0]["name"] == "gated"
    assert main(["generate", str(gated), "Once", "--max-tokens", "4", "--greedy"]) == 0
    capsys.readouterr()
    assert main(["show", str(gated)]) == 0
    shown = capsys.readouterr().out
    assert "gates" in shown
    assert "note: Gates (vector) on layers 2, 3." in shown
    assert f"note: The base is {tmp_path / 'neox'}." in shown


def test_a_whole_folder_keeps_its_gates_in_float32(tokenizer: Path, tmp_path: Path) -> None:
    base = save_decoder("qwen2", tokenizer, tmp_path / "qwen2")
    model = decoder_by_name(base).load("cpu", torch.bfloat16)
    attach(model, decode(GatesConfig, {}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.fill_(1 / 3)
    write_decoder(model, tmp_path / "whole")
    loaded = decoder_by_name(tmp_path / "whole").load("cpu", torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for name, tensor in loaded.items() if ".gate." in name} == {torch.float32}


def test_packed_data_is_scored_too(tokenizer: Path, tmp_path: Path) -> None:
    data = prepare("stories", tmp_path / "packed", documents=4, tokenizer=tokenizer, workers=1)
    gated = save_gates(save_decoder("llama", tokenizer, tmp_path / "llama"), tmp_path / "gated", moved=0.1)
    found = evaluate([gated], "bits_per_byte", data_of={"bits_per_byte": data.folder})
    assert found.models[0].tasks["bits_per_byte"].count == 4


def test_a_model_on_the_hub_is_named_as_there(
    tokenizer: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_decoder("qwen2", tokenizer, tmp_path / "0a1b2c")
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = evaluate(["org/small", folder], "bits_per_byte", data_of={"bits_per_byte": text})
    assert asked == ["org/small"]
    assert [model.name for model in found.models] == ["org/small", str(folder)]
    assert len({model.tasks["bits_per_byte"].score for model in found.models}) == 1
