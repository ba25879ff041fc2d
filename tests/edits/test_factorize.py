"""Factorising: products of a given rank or energy, what they lose, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.edits.factorize import factorised
from braidlm.model.compression import FactorisedLinear
from braidlm.opening.convert import convert
from tests.edits.small_models import KINDS, model_folder, text_file
from tests.tiny_models import random_ids


@given(st.integers(0, 2**32), st.sampled_from([(), (3,)]), st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 1))
@settings(max_examples=40, deadline=None)
def test_the_energy_is_that_of_the_product(
    seed: int, members: tuple[int, ...], outputs: int, inputs: int, energy: float
) -> None:
    rows = torch.randn(*members, outputs, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    factors = factorised(rows, energy, None)
    lost = (rows - factors.up @ factors.down).square().sum((-2, -1)) / rows.square().sum((-2, -1))
    assert (1 - lost).min().item() == pytest.approx(factors.energy, abs=1e-9)
    assert factors.energy >= energy - 1e-9
    if factors.rank > 1:
        assert factorised(rows, None, factors.rank - 1).energy < energy
    torch.testing.assert_close(factors.up.norm(), factors.down.norm())


def test_a_matrix_of_zeros_has_rank_one() -> None:
    factors = factorised(torch.zeros(4, 6), 0.5, None)
    assert factors.rank == 1
    assert not (factors.up @ factors.down).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_factorised_model_computes_with_the_nearest_matrices(tmp_path: Path, kind: str) -> None:
    source = model_folder(tmp_path / "source", **KINDS[kind])
    edit("factorize", source, tmp_path / "out", rank=5, modules=("stages.*",))
    before, after = load_model(source), load_model(tmp_path / "out")
    for address, module in after.model.named_modules():
        if isinstance(module, FactorisedLinear):
            whole: Any = before.model.get_submodule(address)
            stacked = module.stack is not None
            rows = whole.weight.transpose(-1, -2) if stacked else whole.weight
            product = module.down.weight @ module.up.weight if stacked else module.up.weight @ module.down.weight
            best = factorised(rows.detach(), None, 5)
            whole.weight.data = (best.up @ best.down).transpose(-1, -2) if stacked else best.up @ best.down
            torch.testing.assert_close(product, whole.weight, atol=1e-5, rtol=1e-5)
    ids = random_ids(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, atol=1e-4, rtol=1e-4)
    assert model_cost(after).parameters < model_cost(load_model(source)).parameters


def test_the_loss_is_measured_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = model_folder(tmp_path / "source"), text_file(tmp_path)
    argv = ["edit", "factorize", str(source), "--energy", "0.5", "--text", str(text), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "become products" in printed
    assert printed.endswith(f"\n{tmp_path / 'out'}\n")
    assert printed.count(str(tmp_path / "out")) == 1
    assert "bits per byte" in printed
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    before, after = lineage["measured"]["before"], lineage["measured"]["after"]
    assert before["bits_per_byte"] != after["bits_per_byte"]
    assert before["weights_bytes"] > after["weights_bytes"]
    assert min(after["forward_tokens_per_second"], after["step_tokens_per_second"]) > 0
    assert lineage["options"]["energy"] == 0.5
    assert main(["show", str(tmp_path / "out")]) == 0


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source")
    assert main(["edit", "factorize", str(source), "--rank", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "stages.0.layers.0.feed.out: 24 x 16, rank 2" in printed
    assert "the factor that reads" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_plan_begins_with_a_summary_and_what_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source")
    command = ["edit", "factorize", str(source), "--rank", "2", "--out"]
    assert main([*command, str(tmp_path / "short")]) == 0
    short = capsys.readouterr().out
    assert "  tensors: 6 copied as they are, 16 changed\n" in short
    assert "embedding.weight" not in short
    assert main([*command, str(tmp_path / "long"), "--verbose"]) == 0
    long = capsys.readouterr().out
    assert long.startswith(short[: short.index("  tensors")])
    assert long.index("the factor that reads") < long.index("model.embedding.weight")
    lineages = [load_lineage(tmp_path / name) for name in ("short", "long")]
    assert lineages[0]
    assert lineages[1]
    assert lineages[0]["tensors"] == lineages[1]["tensors"]
    assert len(lineages[0]["tensors"]) == 22


def test_a_factorised_model_is_trained_on_and_opens_without_braid(tmp_path: Path) -> None:
    edit("factorize", model_folder(tmp_path / "source"), tmp_path / "out", rank=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids = random_ids(2, 8)
    torch.testing.assert_close(model(ids).logits, load_model(tmp_path / "out")(ids).logits)
    model.train()(ids, labels=ids).loss.backward()
    assert model.model.stages[0].layers[0].feed.out.down.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either the energy to keep or a rank"),
        ({"energy": 0.5, "rank": 3}, "either the energy to keep or a rank"),
        ({"energy": 1.5}, "energy"),
        ({"energy": 0.9, "modules": ("stages.7.*",)}, "no linear layer is called 'stages.7.\\*'"),
        ({"energy": 1.0}, "no matrix has fewer parameters"),
    ],
)
def test_what_cannot_be_done_is_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = model_folder(tmp_path / "source")
    with pytest.raises(BraidError, match=message):
        edit("factorize", source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gates", "windows"])
def test_a_factorised_model_of_other_parts_is_exported_by_no_format(kind: str, tmp_path: Path) -> None:
    model = {"positions": "rope", "block": {"attention": {"window": 8}} if kind == "windows" else {}}
    source = model_folder(tmp_path / "source", **model)
    if kind == "gates":
        source = edit("gate", source, tmp_path / "gated") or source
    edit("factorize", source, tmp_path / "small", rank=2)
    for format_ in ("gguf", "gpt2", "llama", "mistral", "moduleformer", "qwen2"):
        with pytest.raises(BraidError, match="cannot express this model"):
            convert(tmp_path / "small", tmp_path / "out.gguf", to=format_)


def test_a_factorised_model_is_not_taken_apart(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source")
    edit("factorize", source, tmp_path / "small", rank=2)
    with pytest.raises(BraidError, match="compose first"):
        compose([tmp_path / "small", source], tmp_path / "out")
    with pytest.raises(BraidError, match="matrices of this model are compressed"):
        edit("insert", tmp_path / "small", tmp_path / "out", modules=1)
    for format_ in ("llama", "gguf"):
        with pytest.raises(BraidError, match="matrices are compressed"):
            convert(tmp_path / "small", tmp_path / "out.gguf", to=format_)
