"""Quantising: how far weights move, what a folder has, who opens it, and what is refused."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import WEIGHTS, load_lineage, load_model, read_tokenizer, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.edits.quantize import Codes, codes_of_4_bits, codes_of_8_bits
from braidlm.model.compression import FourBitMatrix, QuantisedMatrix, fixed
from braidlm.model.routing.stacked import StackedLinear
from braidlm.opening.convert import convert
from braidlm.training.train import train
from tests.edits.small_models import KINDS, model_folder, text_file
from tests.tiny_models import random_ids, tiny_model
from tests.without_braid import run_without_braid

OPEN = """
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.arange(24).view(2, 12)
with torch.no_grad():
    logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
model.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(ids).logits, logits)
try:
    model.train()(ids, labels=ids)
except ValueError as error:
    print(error)
save_file({"logits": logits.contiguous(), "generated": generated}, f"{out}/seen.safetensors")
"""
"""A process without braidlm opens a folder, predicts, saves it again and tries to train it."""


def dense(codes: Codes, shape: torch.Size) -> Tensor:
    """The weights that a layer of the model makes of codes."""
    matrix = QuantisedMatrix(shape) if codes.zero is None else FourBitMatrix(shape, shape[-1] // codes.scale.shape[-1])
    matrix.weight, matrix.scale = fixed(codes.weight), fixed(codes.scale)
    if isinstance(matrix, FourBitMatrix):
        assert codes.zero is not None
        matrix.zero = fixed(codes.zero)
    return matrix.dense()


@given(st.integers(0, 2**32), st.sampled_from([1, 3]), st.integers(1, 5), st.sampled_from([8, 16, 24]), st.floats(0, 9))
@settings(max_examples=30, deadline=None)
def test_weights_are_off_by_half_a_step_at_most(
    seed: int, members: int, outputs: int, inputs: int, size: float
) -> None:
    rows = torch.randn(members, outputs, inputs, generator=torch.Generator().manual_seed(seed)) * size
    for codes in (codes_of_8_bits(rows), codes_of_4_bits(rows, 8)):
        step = codes.scale.repeat_interleave(inputs // codes.scale.shape[-1], -1)
        # With 4 bits the code for zero is rounded too, so that the ends of a group may be off by a whole step.
        bound = (0.5 if codes.zero is None else 1.0) * step
        assert ((dense(codes, rows.shape) - rows).abs() <= bound + 1e-6 * size).all()


def test_codes_use_their_whole_range() -> None:
    """The largest weight of a row has the largest code: a scale that is too large would waste codes and lose bits."""
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(3))
    eight, four = codes_of_8_bits(rows), codes_of_4_bits(rows, 32)
    assert (eight.weight.int().abs().amax(-1) >= 127).all()
    codes = torch.stack((four.weight & 15, four.weight >> 4), -1).flatten(-2).unflatten(-1, (-1, 32)).int()
    assert (codes.amax(-1) - codes.amin(-1) >= 14).all()  # of 15: the code for zero is rounded too
    assert (dense(eight, rows.shape) - rows).abs().max() <= rows.abs().max() / 255 + 1e-6


def test_codes_are_those_of_torchao() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives", reason="torchao is not installed")
    rows = torch.randn(12, 64)
    for codes, block, mapping, dtype, limits in (
        (codes_of_8_bits(rows), 64, primitives.MappingType.SYMMETRIC, torch.int8, (-128, 127)),
        (codes_of_4_bits(rows, 32), 32, primitives.MappingType.ASYMMETRIC, torch.uint8, (0, 15)),
    ):
        options = {"eps": torch.finfo(torch.float32).eps, "scale_dtype": torch.float32, "zero_point_dtype": torch.int32}
        scale, zero = primitives.choose_qparams_affine(rows, mapping, (1, block), dtype, *limits, **options)
        theirs = primitives.quantize_affine(rows, (1, block), scale, zero, dtype, *limits)
        theirs = primitives.dequantize_affine(theirs, (1, block), scale, zero, dtype, *limits)
        torch.testing.assert_close(codes.scale.flatten(), scale.flatten())
        torch.testing.assert_close(dense(codes, rows.shape), theirs)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("dense", "int8"), ("dense", "int8_dynamic"), ("banks", "int4"), ("paths", "int8"), ("shared", "int4")],
)
def test_a_quantised_model_computes_with_rounded_weights(tmp_path: Path, kind: str, scheme: str) -> None:
    source = model_folder(tmp_path / "source", **KINDS[kind])
    edit("quantize", source, tmp_path / "out", scheme=scheme, group=8)
    before, after = load_model(source), load_model(tmp_path / "out")
    assert model_cost(after) == model_cost(before)
    replaced = [(name, module) for name, module in after.named_modules() if isinstance(module, QuantisedMatrix)]
    assert {"head", "model.embedding"} <= {name for name, _ in replaced}
    assert not [name for name, _ in replaced if ".router" in name]
    for name, module in replaced:
        whole: Any = before.get_submodule(name)
        weights = module.dense()
        whole.weight.data = weights.transpose(-1, -2) if isinstance(module, StackedLinear) else weights
    ids = random_ids(2, 12)
    with torch.no_grad():
        change = (after(ids).logits - before(ids).logits).abs().max()
    assert change < (1e-4 if scheme != "int8_dynamic" else 0.5)
    assert change > 0 or scheme != "int8_dynamic"


def test_a_folder_is_small_and_its_text_costs_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wide enough for a norm to be little beside a matrix."""
    text = text_file(tmp_path)
    source = model_folder(tmp_path / "source", width=64, block={"feed": {"kind": "swiglu", "hidden": 128}})
    argv = ["edit", "quantize", str(source), "--text", str(text), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "bits per byte" in capsys.readouterr().out
    sizes = [(folder / WEIGHTS).stat().st_size for folder in (source, tmp_path / "out")]
    assert sizes[1] <= 0.3 * sizes[0]
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    before, after = lineage["measured"]["before"], lineage["measured"]["after"]
    assert after["bits_per_byte"] == pytest.approx(before["bits_per_byte"], rel=0.01)
    assert after["weights_bytes"] == pytest.approx(sizes[1], rel=0.05)
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "out" / WEIGHTS).values()}
    assert kinds == {torch.int8, torch.float32}
    assert main(["show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert f"weights, compressed         {after['weights_bytes'] / 1000:.3g} kB" in shown
    assert f"weights, on disk            {sizes[1] / 1000:.3g} kB" in shown
    assert "float32" not in shown.replace("cache of one text, float32", "")
    assert "training state" not in shown
    assert main(["generate", str(tmp_path / "out"), "The cat", "--max-tokens", "3"]) == 0


def test_a_folder_opens_without_braid_and_refuses_training(tmp_path: Path) -> None:
    edit("quantize", model_folder(tmp_path / "source", **KINDS["banks"]), tmp_path / "out", scheme="int4", group=8)
    printed = run_without_braid(OPEN, tmp_path / "out", tmp_path / "again")
    assert "a quantised model cannot be trained" in printed
    seen = load_file(tmp_path / "again" / "seen.safetensors")
    with torch.no_grad():
        logits = load_model(tmp_path / "out")(torch.arange(24).view(2, 12)).logits
    torch.testing.assert_close(logits, seen["logits"])  # another process may sum in another order
    assert seen["generated"].shape == (2, 16)


def test_a_quantised_folder_is_not_trained_or_edited(tmp_path: Path) -> None:
    edit("quantize", model_folder(tmp_path / "source"), tmp_path / "small")
    recipe = {"name": "again", "start_from": str(tmp_path / "small"), "out": str(tmp_path / "run")}
    data = {"length": 16, "sets": {"stories": {"source": "stories", "documents": 3}}}
    with pytest.raises(BraidError, match=r"this model is quantised \(int8\), and whole numbers cannot be trained"):
        train({**recipe, "data": data, "training": {"budget": "1 steps"}})
    assert not (tmp_path / "run").exists()
    with pytest.raises(BraidError, match=r"this model is quantised \(int8\), and an edit needs weights"):
        edit("quantize", tmp_path / "small", tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{"scheme": "int8"}, {"scheme": "int4", "group": 8}])
def test_a_quantised_folder_is_converted_as_the_weights_it_stands_for(
    tmp_path: Path, options: dict[str, Any], tied: bool
) -> None:
    source = model_folder(tmp_path / "source", tie_embeddings=tied)
    edit("quantize", source, tmp_path / "small", **options)
    plan = convert(tmp_path / "small", tmp_path / "llama", to="llama")
    assert any("quantised matrices become the weights that they stand for" in note for note in plan.notes)
    theirs, ids = LlamaForCausalLM.from_pretrained(tmp_path / "llama"), random_ids(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, load_model(tmp_path / "small")(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_model_that_rounds_inputs_has_no_such_weights(tmp_path: Path) -> None:
    edit("quantize", model_folder(tmp_path / "source"), tmp_path / "small", scheme="int8_dynamic")
    with pytest.raises(BraidError, match=r"matrices are compressed \(int8\); Llama stores each as it is"):
        convert(tmp_path / "small", tmp_path / "out", to="llama")


def test_a_factorised_model_is_quantised_and_not_factorised_again(tmp_path: Path) -> None:
    edit("factorize", model_folder(tmp_path / "source"), tmp_path / "narrow", rank=4)
    edit("quantize", tmp_path / "narrow", tmp_path / "small")
    feed = load_model(tmp_path / "small").model.stages[0].layers[0].feed
    assert isinstance(feed.out.up, QuantisedMatrix)
    with pytest.raises(BraidError, match="no matrix has fewer parameters"):
        edit("factorize", tmp_path / "narrow", tmp_path / "out", rank=1)


def test_layers_of_other_kinds_stay_and_the_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"block": {"layers": 2, "share": {"kind": "feeds", "lora": 2}}}]
    source = model_folder(tmp_path / "source", stages=stages)
    edit("quantize", source, modules=("*.attention.*",), dry_run=True)
    assert "4 layers stay as they are: LowRankLinear" in capsys.readouterr().out


@pytest.mark.parametrize("embedding", ["tokens", "bytes"])
@pytest.mark.parametrize("head", ["linear", "average", "bytes_parallel"])
def test_the_plan_says_which_ends_cannot_be_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], embedding: str, head: str
) -> None:
    options = {"paths": [{"name": "a", "width": 16}]} if head == "average" else {}
    ends = {"embedding": embedding, "head": {"kind": head, **options}, "tie_embeddings": False}
    tokenizer = bytes_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, **ends)
    read_tokenizer(model, tokenizer)
    edit("quantize", save_model(model, tmp_path / "source", tokenizer, {}), dry_run=True)
    note = f"note: `embedding` quantises nothing here: the embedding is `{embedding}` and the head `{head}`"
    assert (note in capsys.readouterr().out) == ((embedding, head) != ("tokens", "linear"))


def test_models_of_half_precision_are_measured_in_float32(tmp_path: Path) -> None:
    """What is shown before and after would otherwise differ by the precision too."""
    text = text_file(tmp_path)
    half = load_model(model_folder(tmp_path / "source")).bfloat16()
    measured = []
    for name, model in (("half", half), ("whole", deepcopy(half).float())):
        source = save_model(model, tmp_path / name, bytes_tokenizer(), {})
        lineage = load_lineage(edit("quantize", source, tmp_path / f"{name}-out", text=str(text)))
        measured.append({key: lineage["measured"]["before"][key] for key in ("bits_per_byte", "weights_bytes")})
    assert measured[0] == measured[1]


def test_embedding_and_head_may_stay(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source")
    edit("quantize", source, tmp_path / "out", embedding=False, modules=("stages.*.feed.*",))
    small = [name for name, m in load_model(tmp_path / "out").named_modules() if isinstance(m, QuantisedMatrix)]
    assert {name.rsplit(".", 2)[1] for name in small} == {"feed"}


def test_a_matrix_that_groups_do_not_divide_gets_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("quantize", model_folder(tmp_path / "source"), scheme="int4", group=16, dry_run=True)
    assert "2 matrices have 8 bits: 16 does not divide their inputs" in capsys.readouterr().out
    with pytest.raises(BraidError, match="group must be even"):
        edit("quantize", tmp_path / "source", tmp_path / "other", scheme="int4", group=3)
