"""ONNX out: onnxruntime computes what the model does, with a cache, padding and any sizes; refusals that say why."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from braidlm.bridges.formats import onnx as bridge
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.opening.convert import convert
from tests.bridges.gguf_models import LLAMA, saved_braid

for package in bridge.PACKAGES:
    pytest.importorskip(package)

MIXED = {
    **LLAMA,
    "block": {"attention": {"heads": 4, "kv_heads": 2, "window": 6}},
    "stages": [{"block": {"layers": 2, "feed": {"experts": 3}}}],
}
"""Rotary positions, shared keys, windows, experts; the head is tied."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of ours, and the folder of its graph."""
    root = tmp_path_factory.mktemp("onnx")
    model = saved_braid(root / "braid", MIXED)
    plan = convert(root / "braid", root / "graph", to="onnx")
    return model.eval(), root / "graph", plan


@torch.no_grad()
def test_any_number_of_texts_of_any_length_padded_or_in_parts(exported):
    model, folder, _ = exported
    graph = bridge.Graph(folder, threads=1)
    ids = torch.randint(0, 258, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, :1] = 0, 0
    expected = model(ids, attention_mask=mask).logits.numpy()
    first, past = graph(ids[:, :13].numpy(), mask=mask[:, :13].numpy())
    second, past = graph(ids[:, 13:19].numpy(), past, mask[:, :19].numpy())
    third, _ = graph(ids[:, 19:].numpy(), past, mask.numpy())
    found = np.concatenate((first, second, third), axis=1)
    real = mask.bool().numpy()
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(graph(ids[:1, :1].numpy())[0], model(ids[:1, :1]).logits, atol=1e-5, rtol=1e-5)


def test_greedy_texts_are_braids(exported):
    model, folder, _ = exported
    graph, prompt = bridge.Graph(folder, threads=1), [72, 101, 108]
    logits, past = graph(np.array([prompt]))
    text = [int(logits[0, -1].argmax())]
    while len(text) < 12:
        logits, past = graph(np.array([text[-1:]]), past)
        text.append(int(logits[0, -1].argmax()))
    steps = decode_tokens(Decoder(model, 1, 24), [prompt], 12, Sampling(temperature=0), None, 0)
    assert text == [tokens[0] for tokens, _ in steps]


def test_the_folder(exported):
    _, folder, plan = exported
    files = ["README.md", "lineage.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    own = bytes_tokenizer()
    assert AutoTokenizer.from_pretrained(folder)("naïve cat")["input_ids"] == own.encode("naïve cat")
    assert load_lineage(folder)["made_by"] == "convert to onnx"
    assert any("computes all experts and paths" in note for note in plan.notes)
    session = bridge.Graph(folder, threads=1).session
    inputs = {given.name: given.shape for given in session.get_inputs()}
    assert inputs["input_ids"] == ["batch_size", "sequence_length"]
    assert inputs["past_key_values.0.key"] == ["batch_size", 2, "past_sequence_length", 8]
    outputs = [given.name for given in session.get_outputs()]
    assert outputs[:3] == ["logits", "present.0.key", "present.0.value"]
    assert b".py" not in (folder / "model.onnx").read_bytes()  # no line of the machine's code


def test_a_graph_that_computes_something_else_is_not_written(tmp_path, exported, monkeypatch):
    saved_braid(tmp_path / "braid", LLAMA)
    monkeypatch.setattr(bridge.OnnxTarget, "save", lambda *_: None)
    graph = bridge.Graph(exported[1], threads=1)
    monkeypatch.setattr(bridge, "Graph", lambda _: graph)
    with pytest.raises(BraidError, match=r"no logit of the graph differs by more than .*, and here one differs by"):
        convert(tmp_path / "braid", tmp_path / "graph", to="onnx")
    assert not (tmp_path / "graph").exists()


def test_what_torch_cannot_record_is_one_sentence(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise torch.onnx.OnnxExporterError("Failed to decompose the graph. \x1b[96mStep 2\x1b[0m\n- Create an issue")

    saved_braid(tmp_path / "braid", LLAMA)
    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(BraidError) as caught:
        convert(tmp_path / "braid", tmp_path / "graph", to="onnx")
    assert caught.value.what == "torch cannot record this model as ONNX: Failed to decompose the graph. "
    assert not (tmp_path / "graph").exists()


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    saved_braid(tmp_path / "braid", LLAMA)
    monkeypatch.setattr(bridge, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(BraidError, match="writing ONNX needs onnxscript") as error:
        convert(tmp_path / "braid", to="onnx", dry_run=True)
    assert error.value.todo == "pip install 'braidlm[device]'"


def test_rounded_inputs_are_refused_and_reading_is(tmp_path):
    saved_braid(tmp_path / "braid", LLAMA)
    edit("quantize", tmp_path / "braid", tmp_path / "small", scheme="int8_dynamic")
    with pytest.raises(BraidError, match=r"ONNX cannot express this model:\s+- matrices are rounded with their inputs"):
        convert(tmp_path / "small", to="onnx", dry_run=True)
    with pytest.raises(BraidError, match="Braid writes ONNX and does not read it"):
        convert(tmp_path / "braid", from_="onnx", dry_run=True)
