"""IBM's ModuleFormer checkpoints: the numbers of their code, in from files and folders, and back bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.model.routing.losses import mutual_information
from braidlm.opening.convert import convert
from tests.reference import REFERENCE

VARIANTS = ["identity-kv", "projected-kv"]


def reference(name: str, what: str) -> Path:
    return REFERENCE / f"moduleformer-{name}.{what}"


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a checkpoint of IBM's, and the model folder made of it."""
    out = tmp_path_factory.mktemp("moduleformer") / request.param
    config = reference(request.param, "config.json")
    convert(reference(request.param, "weights.safetensors"), out, from_="moduleformer", config=config)
    return request.param, out


def test_logits_agree_when_the_auto_classes_open_the_folder(variant: tuple[str, Path]) -> None:
    name, folder = variant
    expected = load_file(reference(name, "io.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0.0)


def test_attention_and_mutual_information_agree(variant: tuple[str, Path]) -> None:
    name, folder = variant
    expected = load_file(reference(name, "io.safetensors"))
    model, ids = load_model(folder), expected["input_ids"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shown = model(ids, output_attentions=True).attentions[0]  # of every module: [batch, head x module, query, key]
        body = model.model
        routings = body.stream(body.embedding(ids), body.span(body.embedding(ids)))[1]
    real = torch.ones(ids.shape)
    for layer, loss in enumerate(expected["aux_mi_per_layer"]):
        own = [routing for routing in routings if f"layers.{layer}." in routing.name]
        assert len(own) == 2
        total = sum(mutual_information(routing, real) for routing in own)
        torch.testing.assert_close(total, loss, atol=1e-5, rtol=1e-4)
    chosen_BTK = routings[0].chosen_BTK
    heads = expected["attention_layer0"].shape[2]
    by_module = shown.unflatten(1, (heads, -1)).permute(0, 2, 1, 3, 4)  # [batch, module, head, query, key]
    index = chosen_BTK.transpose(1, 2)[:, :, None, :, None].expand(-1, -1, heads, -1, ids.shape[1])
    torch.testing.assert_close(by_module.gather(1, index), expected["attention_layer0"], atol=1e-5, rtol=1e-4)


def test_the_way_back_is_exact(variant: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = variant
    convert(folder, tmp_path / "back", to="moduleformer")
    source, back = load_file(reference(name, "weights.safetensors")), load_file(tmp_path / "back" / "model.safetensors")
    assert source.keys() == back.keys()
    assert all(torch.equal(source[key], back[key]) for key in source)
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    given = json.loads(reference(name, "config.json").read_text())
    assert {key: settings[key] for key in given} == given
    convert(tmp_path / "back", tmp_path / "again")  # a folder of theirs, found by its config.json
    ids = torch.randint(0, given["vocab_size"], (1, 12))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "again")(ids).logits, load_model(folder)(ids).logits)


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **changed: Any) -> dict[str, Any]:
    """A copy of a fixture with other tensors or options, as the arguments of `convert`."""
    config = json.loads(reference("projected-kv", "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "weights.safetensors")
    return {"source": folder / "weights.safetensors", "config": folder / "config.json", "from_": "moduleformer"}


def test_a_linear_router_is_read(tmp_path: Path) -> None:
    tensors = load_file(reference("projected-kv", "weights.safetensors"))
    linear = {name: x for name, x in tensors.items() if "w_gate" not in name}
    for name, x in tensors.items():
        if name.endswith("w_gate.3.weight"):
            linear[name.replace("w_gate.3", "w_gate.0")] = torch.randn(len(x), 32)
    convert(**checkpoint(tmp_path, linear, gate_type="linear"), out=tmp_path / "out")
    assert load_model(tmp_path / "out").model.stages[0].layers[0].feed.router.inner is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_mlp_experts": 6}, "mlpf.experts.weight is \\[5, 32, 40\\], expected \\[6, 32, 40\\]"),
        ({"gate_type": "gmm"}, "gate_type: 'gmm' is not one of mlp, linear"),
        ({"n_head": 5}, "att_hidden \\(24\\) is not a multiple of n_head \\(5\\)"),
        ({"k_mlp": 9}, "top_k is 9, and there are only 5 experts"),
        ({"n_embd": -1}, "n_embd"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    tensors = load_file(reference("projected-kv", "weights.safetensors"))
    with pytest.raises(BraidError, match=message):
        convert(**checkpoint(tmp_path, tensors, **changed), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_tensors_and_a_missing_configuration(tmp_path: Path) -> None:
    tensors = load_file(reference("projected-kv", "weights.safetensors"))
    del tensors["transformer.h.1.attn.k_proj.bias"]
    arguments = checkpoint(tmp_path, tensors)
    with pytest.raises(BraidError, match=r"missing transformer\.h\.1\.attn\.k_proj\.bias \[24\]"):
        convert(**arguments, out=tmp_path / "out")
    with pytest.raises(BraidError, match="how many modules a token uses"):
        convert(arguments["source"], tmp_path / "out", from_="moduleformer")
    assert not (tmp_path / "out").exists()


def test_models_that_the_format_cannot_express(variant: tuple[str, Path], tmp_path: Path) -> None:
    shutil.copytree(variant[1], tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    config = json.loads(path.read_text())
    for stage in config["architecture"]["stages"]:
        stage["block"]["attention"]["current"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(BraidError, match=r"block\.attention\.current is false; ModuleFormer has true"):
        convert(tmp_path / "changed", tmp_path / "out", to="moduleformer")
