"""GGUF out: the bits of every tensor, the metadata, logits computed from the file alone, and refusals that say why."""

import errno
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.cli import main as command
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, save_model
from braidlm.data.tokenizing.build import SpecialTokens, bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import byte_characters
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert
from tests.bridges.gguf_models import GPT2, LLAMA, MODELS, ROWS, saved_braid

gguf = pytest.importorskip("gguf")


class File:
    """What a file holds."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }

    def setting(self, name: str) -> Any:
        return self.fields[f"{self.fields['general.architecture']}.{name}"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        if bias is not None:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.setting("attention.layer_norm_epsilon"))
        return F.rms_norm(x, x.shape[-1:], weight, self.setting("attention.layer_norm_rms_epsilon"))

    def rotated(self, heads: Tensor) -> Tensor:
        """Queries or keys [time, head, dim] with each pair (2i, 2i + 1) as a complex number, turned."""
        size = self.setting("rope.dimension_count")
        frequency = self.setting("rope.freq_base") ** -(torch.arange(0, size, 2) / size)
        frequency = frequency / self.tensors.get("rope_freqs.weight", torch.ones(size // 2))
        angle = torch.arange(len(heads))[:, None] * frequency
        turn = torch.polar(torch.full_like(angle, self.fields.get("llama.rope.scaling.attn_factor", 1.0)), angle)
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    def attention(self, x: Tensor, block: str) -> Tensor:
        heads = self.setting("attention.head_count")
        if f"{block}.attn_qkv.weight" in self.tensors:
            q, k, v = (part.unflatten(-1, (heads, -1)) for part in self.linear(x, f"{block}.attn_qkv").chunk(3, -1))
        else:
            size = self.setting("attention.key_length")
            q, k, v = (self.linear(x, f"{block}.attn_{letter}").unflatten(-1, (-1, size)) for letter in "qkv")
            q, k = self.rotated(q), self.rotated(k)
            k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        out = torch.einsum("nts,snh->tnh", scores.softmax(-1), v)
        return self.linear(out.flatten(1), f"{block}.attn_output")

    def feed(self, x: Tensor, block: str) -> Tensor:
        up = self.linear(x, f"{block}.ffn_up")
        if f"{block}.ffn_gate.weight" in self.tensors:
            return self.linear(F.silu(self.linear(x, f"{block}.ffn_gate")) * up, f"{block}.ffn_down")
        return self.linear(F.gelu(up, approximate="tanh"), f"{block}.ffn_down")

    def logits(self, ids: Tensor) -> Tensor:
        """What llama.cpp computes, from what stands in the file and nothing else."""
        x = self.tensors["token_embd.weight"][ids]
        if "position_embd.weight" in self.tensors:
            x = x + self.tensors["position_embd.weight"][: len(ids)]
        for number in range(self.setting("block_count")):
            block = f"blk.{number}"
            x = x + self.attention(self.norm(x, f"{block}.attn_norm"), block)
            x = x + self.feed(self.norm(x, f"{block}.ffn_norm"), block)
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return F.linear(self.norm(x, "output_norm"), head)


@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_the_file_alone_gives_the_same_logits(tmp_path, architecture):
    ours = saved_braid(tmp_path / "braid", architecture)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    ids = torch.randint(0, ROWS, (20,), generator=torch.Generator().manual_seed(1))
    expected = ours(ids[None]).logits[0]
    assert expected.abs().max() > 0.5
    assert (File(tmp_path / "model.gguf").logits(ids) - expected).abs().max() <= 2e-5


def test_every_bit_of_a_llama(tmp_path):
    ours = saved_braid(tmp_path / "braid", {**LLAMA, "tie_embeddings": False})
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    file, state = File(tmp_path / "model.gguf"), ours.state_dict()
    assert set(file.types.values()) == {"F32"}
    layer = "model.stages.0.layers.1"
    queries, keys, values = state[f"{layer}.attention.qkv.weight"].split((32, 16, 16))
    gate, up = state[f"{layer}.feed.gate_up.weight"].chunk(2)

    def neighbours(rows: Tensor) -> Tensor:
        """A head's channels i and i + 4 side by side."""
        return rows.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)

    expected = {
        "token_embd.weight": state["model.embedding.weight"],
        "output.weight": state["head.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "blk.1.attn_norm.weight": state[f"{layer}.attention_norm.weight"],
        "blk.1.ffn_norm.weight": state[f"{layer}.feed_norm.weight"],
        "blk.1.attn_q.weight": neighbours(queries),
        "blk.1.attn_k.weight": neighbours(keys),
        "blk.1.attn_v.weight": values,
        "blk.1.attn_output.weight": state[f"{layer}.attention.out.weight"],
        "blk.1.ffn_gate.weight": gate,
        "blk.1.ffn_up.weight": up,
        "blk.1.ffn_down.weight": state[f"{layer}.feed.out.weight"],
    }
    assert {name for name in file.tensors if not name.startswith("blk.0.")} == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(file.tensors[name], tensor), name


def test_every_bit_of_a_gpt2(tmp_path):
    ours = saved_braid(tmp_path / "braid", GPT2)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    file = File(tmp_path / "model.gguf")
    ends = {
        "token_embd": "model.embedding",
        "position_embd": "model.positions",
        "output_norm": "model.norm",
    }
    parts = {
        "attn_norm": "attention_norm",
        "attn_qkv": "attention.qkv",
        "attn_output": "attention.out",
        "ffn_norm": "feed_norm",
        "ffn_up": "feed.up",
        "ffn_down": "feed.out",
    }
    blocks = {f"blk.{n}.{a}": f"model.stages.0.layers.{n}.{b}" for n in range(2) for a, b in parts.items()}
    state, names = ours.state_dict(), ends | blocks
    expected = {
        f"{theirs}.{kind}": state[f"{ours}.{kind}"]
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
        if f"{ours}.{kind}" in state
    }
    assert set(expected) == set(file.tensors)
    assert all(torch.equal(file.tensors[name], tensor) for name, tensor in expected.items())


def test_biases_that_gpt2_needs_are_zeros_and_it_is_said(tmp_path):
    saved_braid(tmp_path / "braid", MODELS["gpt2 without biases"])
    plan = convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    assert any("added as zeros" in note and "2 x blk.*.attn_qkv.bias" in note for note in plan.notes)
    biases = {name: tensor for name, tensor in File(tmp_path / "model.gguf").tensors.items() if "bias" in name}
    assert len(biases) == 13
    assert not any(tensor.any() for tensor in biases.values())


ERRORS = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127, "q5_0": 1 / 16, "q4_0": 1 / 8}
"""The largest error of a number, relative to the largest of its row."""


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_types(tmp_path, architecture, dtype):
    saved_braid(tmp_path / "braid", architecture)
    for kind in ("f32", dtype):
        convert(tmp_path / "braid", tmp_path / f"{kind}.gguf", to="gguf", dtype=kind)
    exact, file = (File(tmp_path / f"{kind}.gguf") for kind in ("f32", dtype))
    for name, tensor in exact.tensors.items():
        if tensor.ndim == 1 or name == "position_embd.weight":
            assert file.types[name] == "F32"
            assert torch.equal(file.tensors[name], tensor)
        else:
            is_end = name in ("token_embd.weight", "output.weight")
            kind = "q8_0" if is_end and dtype in ("q5_0", "q4_0") else dtype
            assert file.types[name] == kind.upper()
            error = (file.tensors[name] - tensor).abs().amax(-1) / tensor.abs().amax(-1)
            assert 0 < error.max() <= 1.001 * ERRORS[kind], name
    assert file.fields["general.file_type"] == {"f16": 1, "bf16": 32, "q8_0": 7, "q5_0": 8, "q4_0": 2}[dtype]
    assert (tmp_path / f"{dtype}.gguf").stat().st_size < (tmp_path / "f32.gguf").stat().st_size


def test_rows_that_q8_0_cannot_divide_are_f16_and_it_is_said(tmp_path):
    saved_braid(tmp_path / "braid", {**LLAMA, "block": {**LLAMA["block"], "feed": {"hidden": 44}}})
    plan = convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf", dtype="q8_0")
    types = File(tmp_path / "model.gguf").types
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    assert "q8_0 needs rows of a multiple of 32; matrices with rows of 44 are f16" in plan.notes


def test_mixtures_need_llama_cpps_quantiser(tmp_path, monkeypatch):
    saved_braid(tmp_path / "braid", LLAMA)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    for dry_run in (True, False):
        with pytest.raises(BraidError, match=r"made by llama\.cpp's own quantiser[^$]*`llama-quantize` on the file"):
            convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf", dtype="q4_k_m", dry_run=dry_run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid"]


def test_a_mixture_is_made_of_the_whole_file(tmp_path, monkeypatch):
    """With a quantiser of our own in place of llama.cpp's: what it is given, and what becomes of its result."""
    saved_braid(tmp_path / "braid", LLAMA)
    asked = []

    def quantise(source, target, options):
        asked.append((File(source.decode()).types, options.ftype))
        Path(target.decode()).write_bytes(b"quantised" if len(asked) == 1 else b"")
        return len(asked) - 1

    stub = SimpleNamespace(llama_model_quantize_default_params=SimpleNamespace, llama_model_quantize=quantise)
    monkeypatch.setitem(sys.modules, "llama_cpp", stub)
    plan = convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf", dtype="q5_k_m")
    assert (tmp_path / "model.gguf").read_bytes() == b"quantised"
    ((types, ftype),) = asked
    assert (set(types.values()), ftype) == ({"F32"}, 17)
    assert any("256" in note for note in plan.notes)
    with pytest.raises(BraidError, match="could not write q6_k"):
        convert(tmp_path / "braid", tmp_path / "second.gguf", to="gguf", dtype="q6_k")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid", "model.gguf"]


def test_numbers_too_large_for_a_type(tmp_path):
    model = BraidForCausalLM(BraidConfig(LLAMA, vocab_size=ROWS))
    with torch.no_grad():
        model.model.stages[0].layers[1].feed.out.weight[3, 4] = 1e5
    save_model(model, tmp_path / "braid", bytes_tokenizer(), {"made_by": "a test"})
    with pytest.raises(BraidError, match=r"blk\.1\.ffn_down\.weight has numbers that are too large for f16"):
        convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf", dtype="f16")
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf", dtype="bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid", "model.gguf"]


def test_metadata(tmp_path):
    saved_braid(tmp_path / "braid", LLAMA, licence="mit")
    convert(tmp_path / "braid", tmp_path / "mine.gguf", to="gguf")
    fields = File(tmp_path / "mine.gguf").fields
    assert fields["general.name"] == "mine"
    assert fields["general.license"] == "mit"
    lineage = json.loads(fields["braid.lineage"])
    assert lineage["made_by"] == "convert to gguf"
    assert lineage["sources"][0]["lineage"] == load_lineage(tmp_path / "braid")
    sizes = {
        "vocab_size": ROWS,
        "context_length": 24,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
    }
    assert {name: fields[f"llama.{name}"] for name in sizes} == sizes
    assert fields["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)


def test_the_tokenizer_of_the_file(tmp_path):
    tokenizer = bytes_tokenizer(SpecialTokens.parse(["eos=<end>", "pad=<pad>", "<pause>"]))
    tokenizer.settings["chat_template"] = "{{ messages }}"
    saved_braid(tmp_path / "braid", LLAMA, tokenizer)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    fields = File(tmp_path / "model.gguf").fields
    expected = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.eos_token_id": 256,
        "ggml.bos_token_id": 256,
        "ggml.padding_token_id": 257,
        "ggml.suppress_tokens": [258],
        "ggml.add_bos_token": False,
        "ggml.add_eos_token": False,
        "chat_template": "{{ messages }}",
    }
    assert {name: fields[f"tokenizer.{name}"] for name in expected} == expected
    assert fields["tokenizer.ggml.tokens"] == [*byte_characters(), "<end>", "<pad>", "<pause>", "[PAD259]"]
    assert fields["tokenizer.ggml.token_type"] == [1] * 256 + [3, 3, 3, 5]


def test_texts_begin_in_llama_cpp_as_the_tokenizer_begins_them(tmp_path):
    tokenizer = bytes_tokenizer(SpecialTokens.parse(["bos=<s>", "eos=</s>", "pad=<pad>"]))
    tokenizer.begin_texts()
    saved_braid(tmp_path / "braid", LLAMA, tokenizer)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    fields = File(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.bos_token_id"] == tokenizer.eos_id == 257


REFUSED = [
    ({"positions": "none"}, "positions.kind is none; llama.cpp's Llama has rope"),
    ({"block": {"attention": {"heads": 4, "window": 8}}}, "block.attention.window is 8; llama.cpp's Llama has none"),
    ({"block": {"attention": {"heads": 4}, "feed": "geglu"}}, "block.feed.kind is geglu; llama.cpp's Llama has"),
    ({"head": {"bias": True}}, "head.bias is true; llama.cpp's Llama has false"),
    (
        {**GPT2, "block": {**GPT2["block"], "feed": "mlp"}},
        "block.feed.activation is gelu; llama.cpp's GPT-2 has gelu_new",
    ),
    ({**GPT2, "block": {"attention": {"heads": 4}}}, "block.norm.kind is rms; llama.cpp's GPT-2 has layer"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_llama_cpp_cannot_express_is_refused(tmp_path, options, reason):
    saved_braid(tmp_path / "braid", {**LLAMA, **options})
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    assert "GGUF cannot express this model" in str(error.value)
    assert f"  - {reason}" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid"]


def test_paths_are_refused(tmp_path):
    stages = ["block", {"parallel": {"paths": ["a", "b"], "join": "add"}}]
    saved_braid(tmp_path / "braid", {**LLAMA, "stages": stages})
    with pytest.raises(BraidError, match=r"stage 1 is 'parallel'; llama\.cpp's Llama is a plain stack of blocks"):
        convert(tmp_path / "braid", to="gguf", dry_run=True)


def test_wrong_commands(tmp_path, monkeypatch):
    saved_braid(tmp_path / "braid", LLAMA)
    (tmp_path / "there.gguf").touch()
    for options, text in (
        ({"to": "gguf"}, "give the file to write"),
        ({"to": "gguf", "out": tmp_path / "folder"}, "GGUF is one file whose name ends with .gguf"),
        ({"to": "gguf", "out": tmp_path / "there.gguf"}, "this file exists already"),
        ({"to": "gguf", "dtype": "q8"}, "unknown dtype 'q8'. Did you mean 'q8_0'?"),
        ({"to": "llama", "dtype": "f16"}, "`--dtype` does not go with `--to llama`"),
        ({"dtype": "f16"}, "`--dtype` goes with `--to` only"),
        ({"from_": "gguf"}, "Braid writes GGUF and does not read it"),
    ):
        with pytest.raises(BraidError) as error:
            convert(tmp_path / "braid", **options)
        assert text in str(error.value)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BraidError, match=r"braidlm\[device\]"):
        convert(tmp_path / "braid", to="gguf", dry_run=True)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "VERBS", ("convert",))
    saved_braid(tmp_path / "braid", LLAMA)
    words = [
        "convert",
        str(tmp_path / "braid"),
        "--to",
        "gguf",
        "--dtype",
        "f16",
        "--out",
        str(tmp_path / "model.gguf"),
    ]

    def fill_the_disk(self, **options):
        self.fout[0].write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fill_the_disk)
        assert command.main(words) == 2
    assert "model.gguf: the disk is full; nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid"]
    assert command.main([*words, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "2 x model.stages.*.layers.*.feed.out.weight -> blk.*.ffn_down.weight" in out
    assert "note: matrices are written as f16; vectors and learned positions stay f32" in out
    assert File(tmp_path / "model.gguf").types["blk.1.ffn_down.weight"] == "F16"
