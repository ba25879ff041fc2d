"""Checkpoints of the MoEP authors' model, whatever a version calls its tensors: equal logits, or a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_lineage
from braidlm.opening.convert import convert
from tests.bridges.moep_models import CONFIG, PlainMoep, Tensors, other_version

IDS = torch.randint(0, 41, (2, 17), generator=torch.Generator().manual_seed(2))
VERSIONS: dict[str, Callable[[Tensors], Tensors]] = {"one": lambda tensors: tensors, "another": other_version}


def saved(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, pickled: bool = False) -> Path:
    """A folder as the authors' code saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def imported(folder: Path) -> Any:
    convert(folder, folder / "out")
    return AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)


def refusal(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(BraidError) as caught:
        convert(saved(folder, tensors, config), folder / "out")
    assert not (folder / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("gated", [False, True], ids=["MoEP", "MoEP-SwiGLU"])
@pytest.mark.parametrize("version", VERSIONS)
@torch.no_grad()
def test_the_logits_are_those_of_the_plain_model(tmp_path: Path, version: str, gated: bool) -> None:
    plain = PlainMoep(gated)
    model = imported(saved(tmp_path, VERSIONS[version](plain.tensors())))
    expected = plain(IDS)
    assert expected.abs().max() > 1, "logits near zero would prove nothing"
    routed = model.model(IDS).routings
    assert len(routed) == 5
    assert all(len(routing.chosen_BTK.unique()) > 2 for routing in routed), "routers that never choose prove little"
    assert (model(IDS).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_written(tmp_path: Path, version: str) -> None:
    folder = saved(tmp_path, VERSIONS[version](PlainMoep().tensors()))
    plan = convert(folder, tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert (config.vocab_size, config.max_position_embeddings) == (41, 24)
    stages = config.architecture["stages"]
    assert [next(iter(stage)) for stage in stages] == ["block", "project", "parallel", "project", "block"]
    shrink, parallel = stages[1]["project"], stages[2]["parallel"]
    assert (shrink["to"], len(shrink["experts"]["names"]), shrink["experts"]["router"]["top_k"]) == (12, 4, 2)
    assert shrink["experts"]["router"]["losses"] == {"switch": 0.2}
    assert (parallel["layers"], len(parallel["paths"]), parallel["join"]["kind"]) == (3, 4, "routed")
    assert parallel["join"]["renormalise"] is True
    assert load_lineage(tmp_path / "out")["made_by"] == "convert from moep_lm"  # type: ignore[index]
    assert plan.tensors == len(VERSIONS[version](PlainMoep().tensors()))


@torch.no_grad()
def test_a_torch_file_a_stored_head_and_masks(tmp_path: Path) -> None:
    plain = PlainMoep()
    tensors = plain.tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors["transformer.first_block.attn.bias"] = torch.ones(1, 1, 24, 24)
    folder = saved(tmp_path, {f"module.{name}": tensor for name, tensor in tensors.items()}, pickled=True)
    assert (imported(folder)(IDS).logits - plain(IDS)).abs().max() < 1e-5
    assert set(load_lineage(tmp_path / "out")["ignored"]) == {  # type: ignore[index]
        "module.lm_head.weight",
        "module.transformer.first_block.attn.bias",
    }


@torch.no_grad()
def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    plain = PlainMoep()
    tensors = plain.tensors() | {"lm_head.weight": 2 * plain.wte.weight.detach()}
    folder = saved(tmp_path, tensors)
    assert any("it is kept, untied" in note for note in convert(folder, dry_run=True).notes)
    assert (imported(folder)(IDS).logits - 2 * plain(IDS)).abs().max() < 1e-5


@torch.no_grad()
def test_other_sizes_and_top_k(tmp_path: Path) -> None:
    plain = PlainMoep(gated=True, top_k=1, layers=1, paths=2, experts=3)
    config = CONFIG | {"parallel_layers": 1, "n_experts": 3, "top_k": 1}
    model = imported(saved(tmp_path, other_version(plain.tensors()), config))
    assert (model(IDS).logits - plain(IDS)).abs().max() < 1e-5


@torch.no_grad()
def test_routers_and_experts_in_lists_beside_the_layers(tmp_path: Path) -> None:
    plain, renamed = PlainMoep(), {}
    for name, tensor in plain.tensors().items():
        name = name.replace("shrink.experts", "experts_down").replace("grow.experts", "experts_up")
        name = name.replace("shrink.router", "router_down").replace("grow.router", "router_up")
        name = name.replace("first_block", "wide_blocks.0").replace("last_block", "wide_blocks.1")
        if ".parallel_layers." in name:
            name = name.replace(".blocks.", ".")
            number = name.split(".")[2]
            name = name.replace(f"parallel_layers.{number}.router", f"routers.{number}")
        renamed[name] = tensor
    assert (imported(saved(tmp_path, renamed))(IDS).logits - plain(IDS)).abs().max() < 1e-5


def test_settings_that_no_tensor_shows(tmp_path: Path) -> None:
    dropout = {"embd_pdrop": 0.3, "attn_pdrop": 0.2, "resid_pdrop": 0.4}
    top_k = {"blocks_top_k": 1, "experts_top_k": 3, "norm_topk_prob": False, "router_aux_loss_coef": 0.5}
    settings = {"layer_norm_epsilon": 0.1, "activation_function": "relu", "initializer_range": 0.05, **dropout, **top_k}
    convert(saved(tmp_path, PlainMoep().tensors(), CONFIG | settings), tmp_path / "out")
    ours = load_config(tmp_path / "out").architecture
    assert [ours["dropout"][kind] for kind in ("embedding", "attention", "residual")] == [0.3, 0.2, 0.4]
    assert (ours["norm"]["eps"], ours["initialisation"]["std"]) == (0.1, 0.05)
    block, shrink, parallel, grow, _ = (next(iter(stage.values())) for stage in ours["stages"])
    assert (block["norm"]["eps"], block["feed"]["activation"]) == (0.1, "relu")
    routers = parallel["join"], shrink["experts"]["router"], grow["experts"]["router"]
    assert [router["top_k"] for router in routers] == [1, 3, 3]
    for router in routers:
        assert (router["renormalise"], router["losses"]) == (False, {"switch": 0.5})


def test_the_paper_s_constants_where_the_configuration_says_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path, PlainMoep().tensors(), {"model_type": "moep_lm", "num_attention_heads": 4})
    notes = convert(folder, tmp_path / "out").notes
    assert "config.json does not give the heads of parallel blocks; 2 of 6 channels" in notes[0]
    assert any("does not give top_k of experts; 2, the paper's" in note for note in notes)
    config = load_config(tmp_path / "out").architecture
    assert (config["dropout"]["residual"], config["norm"]["eps"]) == (0.1, 1e-5)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = PlainMoep().tensors()
    del tensors["transformer.parallel_layers.1.blocks.2.attn.c_proj.bias"]
    del tensors["transformer.ln_f.weight"]
    message = refusal(tmp_path, tensors)
    assert "the weights are not those of a MoEP of 3 layers of 4 blocks, 24 and 12 wide" in message
    assert "missing bias of attention out in parallel_layers.1.blocks.2" in message
    assert "missing weight of last norm" in message


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("parallel_layers.1.blocks.3.", "parallel_layers.1.blocks has the blocks [0, 1, 2], expected 0 to 3"),
        ("parallel_layers.1.", "the parallel layers have the numbers [0, 2]"),
        ("parallel_layers.2.router.", "missing the router of parallel_layers.2.blocks"),
        ("shrink.experts.1.", "shrink.experts has the experts [0, 2, 3], expected 0 to 2"),
        ("shrink.experts.3.", "transformer.shrink.router.weight is [4, 24]"),
        ("grow.", "MoEP has two banks of projection experts, to shrink and to grow; found shrink.experts (4)"),
        ("parallel_layers.", "there are no parallel blocks"),
        ("wpe.", "there is no matrix that could be the positions of tokens"),
    ],
)
def test_missing_parts_are_named(tmp_path: Path, removed: str, message: str) -> None:
    tensors = {name: tensor for name, tensor in PlainMoep().tensors().items() if f"transformer.{removed}" not in name}
    assert message in refusal(tmp_path, tensors)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, PlainMoep().tensors() | {"transformer.extra.scale": torch.ones(3)})
    assert "transformer.extra.scale [3] has a name that no part of MoEP has" in message
    message = refusal(tmp_path / "b", PlainMoep().tensors() | {"lm_head.bias": torch.ones(41)})
    assert "left over lm_head.bias [41]" in message


def test_a_shape_that_fits_nothing_is_named(tmp_path: Path) -> None:
    name = "transformer.parallel_layers.0.blocks.1.attn.c_attn.weight"
    message = refusal(tmp_path, PlainMoep().tensors() | {name: torch.ones(12, 35)})
    assert f"{name} is [12, 35], expected [36, 12] or [12, 36]" in message
    name = "transformer.first_block.ln_1.weight"
    assert f"{name} is [23], expected [24]" in refusal(tmp_path / "b", PlainMoep().tensors() | {name: torch.ones(23)})
    name = "transformer.first_block.mlp.c_proj.weight"  # transposed, unlike the rest
    message = refusal(tmp_path / "c", PlainMoep().tensors() | {name: torch.ones(24, 96)})
    assert (
        f"of feed-forward parts, {name} is [out, in] and transformer.first_block.mlp.c_fc.weight is [in, out]"
        in message
    )


def test_what_could_be_two_things_is_refused(tmp_path: Path) -> None:
    tensors = PlainMoep().tensors()
    twice = tensors | {"transformer.first_block.attn.out_proj.weight": torch.ones(24, 24)}
    message = refusal(tmp_path / "a", twice)
    assert "attn.out_proj.weight both look like the same attention out weight" in message
    square = other_version(tensors)
    square |= {name: tensor.T for name, tensor in square.items() if ".ffn.fc" in name and tensor.ndim == 2}
    message = refusal(tmp_path / "b", square)
    assert "nothing tells whether it is [in, out] or [out, in]" in message
    assert "layers.0.attention.q_proj.weight is [24, 24]" in message
    unclear = {name.replace("first_block", "alpha").replace("last_block", "beta"): t for name, t in tensors.items()}
    assert "stand before the parallel ones is not clear: alpha, beta" in refusal(tmp_path / "c", unclear)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 32}, "n_embd is 32, the tensors say 24 (width)"),
        ({"vocab_size": 40}, "vocab_size is 40, the tensors say 41 (vocabulary)"),
        ({"n_layer": 7}, "n_layer is 7, the tensors say 3 or 5 (layers)"),
        ({"top_k": 5}, "top_k is 5, and there are 4"),
        ({"top_k": "two"}, "top_k must be of type int, got 'two'"),
        ({"n_head": 5}, "5 heads of blocks do not divide their width, 24"),
        ({"n_head": None}, "neither the tensors nor config.json say how many heads attention has"),
        ({"activation_function": "mish"}, "the activation is 'mish'; Braid has gelu, gelu_new, relu"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    text = refusal(tmp_path, PlainMoep().tensors(), CONFIG | changes)
    assert message in text
    assert "config.json" in text


def test_more_than_one_file_of_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path, PlainMoep().tensors(), pickled=True)
    (folder / "other.pt").write_bytes(b"")
    with pytest.raises(BraidError, match=r"which file holds the weights is not clear: other.pt, pytorch_model.bin"):
        convert(folder, tmp_path / "out")
