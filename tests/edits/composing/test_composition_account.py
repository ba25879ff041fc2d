"""Every tensor is accounted for, in memory and in lineage.json; and the model folder that comes out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.edits.account import Account, Derived, Fresh, Part
from braidlm.edits.compose import compose
from tests.edits.composed_paths import GPT2, TOKENIZER, blocks, ids, saved_path


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def pair(tmp_path):
    return [saved_path(tmp_path / name, i) for i, name in enumerate(("stories", "maths"))]


def test_the_lineage_says_where_every_tensor_came_from(tmp_path, pair):
    out = compose(
        pair, tmp_path / "both", join={"kind": "gumbel_v1", "losses": {"load_balance": 0.01}}, freeze=["joins"]
    )
    lineage = load_lineage(out)
    assert lineage["made_by"] == "braid compose"
    assert lineage["options"]["join"]["losses"] == {"load_balance": 0.01}
    assert {k: v for k, v in lineage["options"].items() if k != "join"} == {
        "layers": 2,
        "blocks": 1,
        "freeze": ["joins"],
        "start": "mean",
        "seed": 1,
    }
    for index, (source, folder) in enumerate(zip(lineage["sources"], pair, strict=True)):
        assert source == {
            "name": folder.name,
            "model": folder.name,
            "format": "braid",
            "sha256": sha256_of(folder / "model.safetensors"),
            "made_by": "braid train",
            "recipe_sha256": f"hash-{index}",
            "training": {"steps": index + 1},
            "sources": [{"data": folder.name}],
        }
    assert lineage["tokenizer"] == TOKENIZER.fingerprint
    assert set(lineage["tensors"]) == set(weights(out))
    made = lineage["tensors"]
    assert made["model.norm.weight"] == "fresh"
    assert made["model.stages.2.layers.0.join.router.bias"] == "fresh"
    qkv = {
        "stories": "model.stages.1.layers.0.attention.qkv.weight",
        "maths": "model.stages.1.layers.0.attention.qkv.weight",
    }
    assert made["model.stages.2.layers.1.stack.0.attention.qkv.weight"] == {"from": qkv, "how": "stacked, transposed"}
    used = {(path, name) for origin in made.values() if origin != "fresh" for path, name in origin["from"].items()}
    unused = {(path, name) for path, names in lineage["left_out"].items() for name in names}
    assert used | unused == {(folder.name, name) for folder in pair for name in weights(folder)}
    assert unused == {("stories", "model.norm.weight"), ("maths", "model.norm.weight")}
    assert "the path's norm before its own head" in lineage["left_out"]["maths"]["model.norm.weight"]


def test_the_lineage_is_true(tmp_path):
    """What it says about each tensor, done by hand, gives the tensor."""
    folders = [saved_path(tmp_path / name, i, **GPT2) for i, name in enumerate(("a", "b", "c"))]
    out = compose(folders, tmp_path / "made")
    stored = {folder.name: weights(folder) for folder in folders}
    by_hand = {
        "": lambda parts: parts[0],
        "side by side": lambda parts: torch.cat(parts, dim=1),
        "stacked": torch.stack,
        "stacked, transposed": lambda parts: torch.stack([part.mT for part in parts]),
    }
    made = weights(out)
    seen = set()
    for name, origin in load_lineage(out)["tensors"].items():
        if origin != "fresh":
            how = origin.get("how", "")
            seen.add(how)
            assert torch.equal(made[name], by_hand[how]([stored[path][own] for path, own in origin["from"].items()]))
    assert seen == {"side by side", "stacked", "stacked, transposed"}


def test_a_seed_fixes_what_is_fresh_and_nothing_else(tmp_path, pair):
    first = compose(pair, tmp_path / "first", start="random")
    again = compose(pair, tmp_path / "again", seed=1, start="random")
    other = compose(pair, tmp_path / "other", seed=2, start="random")
    assert sha256_of(first / "model.safetensors") == sha256_of(again / "model.safetensors")
    a, b = weights(first), weights(other)
    differing = {name for name in a if not torch.equal(a[name], b[name])}
    fresh = {name for name, origin in load_lineage(first)["tensors"].items() if origin == "fresh"}
    assert differing == {name for name in fresh if "norm" not in name}  # norms begin as ones


def test_the_random_state_outside_is_left_alone(tmp_path, pair):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compose(pair, tmp_path / "both")
    assert torch.equal(torch.get_rng_state(), before)


def test_fresh_blocks_begin_as_the_initialisation_says(tmp_path):
    options = {"initialisation": {"kind": "normal", "std": 0.5}}
    folders = [saved_path(tmp_path / name, i, **options) for i, name in enumerate("ab")]
    out = compose(folders, tmp_path / "both", blocks=4)
    fresh = [tensor for name, tensor in weights(out).items() if name.startswith("model.stages.0")]
    matrices = torch.cat([tensor.flatten() for tensor in fresh if tensor.ndim == 2])
    assert 0.45 < matrices.std() < 0.55
    assert abs(matrices.mean()) < 0.05


def test_the_folder_opens_anywhere_and_generates(tmp_path, pair):
    out = compose([*pair, saved_path(tmp_path / "code", 5, width=24, **blocks(3))], tmp_path / "made", join="gumbel_v2")
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules")
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer("Once", return_tensors="pt")
    made = model.generate(**text, max_new_tokens=5, do_sample=False)
    assert made.shape[1] == text["input_ids"].shape[1] + 5
    cached = model(ids()).logits
    assert torch.allclose(cached, load_model(out)(ids()).logits, atol=1e-6)
    alone = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, paths=["maths"]).eval()
    assert not torch.allclose(alone(ids()).logits, cached)
    assert {routing.choices[i] for routing in alone(ids()).routings for i in routing.main_BT.unique()} <= {
        "maths",
        "combined",
    }
    with pytest.raises(ValueError, match="no path 'poems'"):
        AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, paths=["poems"])


def test_weights_of_another_kind_of_number(tmp_path, pair, capsys, monkeypatch):
    monkeypatch.setenv("BRAID_ALLOW_CHANGED_WEIGHTS", "1")
    narrow = {name: tensor.bfloat16() for name, tensor in weights(pair[0]).items()}
    save_file(narrow, pair[0] / "model.safetensors", metadata={"format": "pt"})
    out = compose(pair, tmp_path / "both")
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.float32}
    assert torch.equal(weights(out)["model.embedding.weight"][:, :16], narrow["model.embedding.weight"].float())
    assert "'stories': weights are bfloat16; they are written as float32" in capsys.readouterr().out


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    for name, steps in (("step-9", 9), ("step-10", 10)):
        saved_path(tmp_path / "runs" / "my stories" / "checkpoints" / name, steps)
    (tmp_path / "runs" / "my stories" / "recipe.yaml").write_text("name: x")
    maths = saved_path(tmp_path / "1+1", 3)
    lineage = load_lineage(compose([tmp_path / "runs" / "my stories", maths], tmp_path / "both"))
    assert [(source["name"], source["model"]) for source in lineage["sources"]] == [
        ("my_stories", "step-10"),
        ("path_1_1", "1+1"),
    ]
    assert lineage["sources"][0]["training"] == {"steps": 11}


def test_names_can_be_given(tmp_path, pair):
    out = compose(pair, tmp_path / "both", names=["tales", "sums-2"])
    assert [
        path["name"]
        for path in json.loads((out / "config.json").read_text())["architecture"]["stages"][2]["parallel"]["paths"]
    ] == ["tales", "sums-2"]


def test_an_account_must_be_complete() -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device="meta")

    targets = {"a": zeros(2, 4), "b": zeros(3)}
    sources = {"p": {"x": zeros(2, 2), "y": zeros(1)}, "q": {"x": zeros(2, 2)}}
    both = (Part("p", "x"), Part("q", "x"))
    good = Account({"a": Derived(both, "side by side"), "b": Fresh("joins", "b")}, {Part("p", "y"): "not needed"})
    good.check(targets, sources)
    for made, left_out, text in (
        ({"a": good.origins["a"]}, good.left_out, "b: it has no origin"),
        ({**good.origins, "c": Fresh("joins", "c")}, good.left_out, "c: the new model has no such tensor"),
        (good.origins, {}, "y of 'p': neither used nor left out"),
        (good.origins, {**good.left_out, Part("q", "z"): "so"}, "z of 'q': there is no such tensor"),
        ({**good.origins, "a": Derived(both, "stacked")}, good.left_out, r"a is to be \[2, 4\] and cannot be made of"),
        (
            {**good.origins, "a": Derived((Part("p", "y"), *both), "stacked")},
            {},
            r"a is to be \[2, 4\] and cannot be made",
        ),
    ):
        with pytest.raises(BraidError, match=text):
            Account(made, left_out).check(targets, sources)
