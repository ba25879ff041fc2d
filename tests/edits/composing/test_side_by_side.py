"""Modules of several owners on one base: side by side, each owner's switched off or withdrawn, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_lineage, load_model, save_model
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import freeze, module_routers
from tests.edits.test_insert import KINDS, TOKENIZER, VOCABULARY, folder_of
from tests.tiny_models import random_ids

APART = {"router": "rows", "embedding": "frozen"}


@torch.no_grad()
def trained(folder: Path, out: Path, seed: int) -> Path:
    """As after training: the inserted modules are open and have other weights, and all else is what it was."""
    model, generator = load_model(folder), torch.Generator().manual_seed(seed)
    freeze(model, model.config.frozen)
    for module in model.modules():
        rows = getattr(module, "trained_rows", None)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and rows is not None:
                parameter[rows] += 0.5 * torch.randn(parameter[rows].shape, generator=generator)
    for router in module_routers(model):
        router.open(1.0)
    return save_model(model, out, TOKENIZER, {"made_by": "test"})


def owner(base: Path, name: str, modules: int, seed: int, **options: Any) -> Path:
    grown = base.parent / f"{name}-untrained-{seed}-{base.name}"
    edit("insert", base, grown, modules=modules, name=name, seed=seed, **APART | options)
    return trained(grown, base.parent / f"{name}-{seed}-{base.name}", seed)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(KINDS["mixture of heads"], tmp_path_factory.mktemp("owners") / "base")


@pytest.fixture(scope="module")
def owners(base: Path) -> dict[str, Path]:
    """Three owners; the second inserted into the feed-forward alone."""
    parts = {"german": "both", "maths": "feed", "law": "both"}
    return {name: owner(base, name, 1 + i % 2, i, parts=part) for i, (name, part) in enumerate(parts.items())}


@pytest.fixture(scope="module")
def whole(owners: dict[str, Path]) -> Path:
    return compose(list(owners.values()), owners["law"].parent / "whole", join="modules")


@torch.no_grad()
def logits(model: BraidForCausalLM) -> Tensor:
    """Of a plain pass and of one with a mask, in which only what is chosen is computed."""
    for part in (part for part in model.modules() if hasattr(part, "compute")):
        part.compute = "sparse"
    ids = random_ids(2, 12, vocab_size=VOCABULARY)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return torch.cat((model(ids).logits, model(ids, attention_mask=mask).logits))


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_folder(one: Path, other: Path) -> None:
    """The same architecture, and the same tensors bit for bit."""
    assert load_config(one).architecture == load_config(other).architecture
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


KEPT = [["german"], ["maths"], ["law"], ["german", "law"], ["maths", "law"]]


@pytest.mark.parametrize("kept", KEPT, ids="+".join)
def test_withdrawn_is_as_never_there(
    kept: list[str], base: Path, owners: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    gone = [f"{name}*" for name in owners if name not in kept]
    out = edit("withdraw", whole, tmp_path / "out", modules=gone)
    folders = [owners[name] for name in kept]
    wanted = folders[0] if len(folders) == 1 else compose(folders, tmp_path / "wanted", join="modules")
    assert_same_folder(out, wanted)
    assert torch.equal(logits(load_model(whole, without=gone)), logits(load_model(wanted)))


def test_all_withdrawn_leaves_the_base(base: Path, whole: Path, tmp_path: Path) -> None:
    out = edit("withdraw", whole, tmp_path / "out", modules=["german*", "maths_?", "law_1"])
    assert_same_folder(out, base)
    assert load_config(out).frozen == ["embedding", "head"]


@settings(
    max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(data=st.data())
def test_any_routing_and_any_owner(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the base chooses by and the owners trained: what is left is what it would be without those who left."""
    home = tmp_path_factory.mktemp("any")
    base = folder_of(KINDS[data.draw(st.sampled_from(sorted(KINDS)))], home / "base", layers=1)
    seeds = data.draw(st.permutations(range(3)))
    top_k = data.draw(st.sampled_from([None, 1, 3]))
    made = {f"o{seed}": owner(base, f"o{seed}", data.draw(st.integers(1, 2)), seed, top_k=top_k) for seed in seeds}
    whole = compose(list(made.values()), home / "whole", join="modules")
    kept = data.draw(st.lists(st.sampled_from(sorted(made)), min_size=1, max_size=2, unique=True))
    gone = [f"{name}_*" for name in made if name not in kept]
    out = edit("withdraw", whole, home / "out", modules=gone)
    assert_same_folder(edit("withdraw", whole, home / "none", modules=["o*"]), base)
    assert torch.equal(logits(load_model(whole, without=["o*"])), logits(load_model(base)))
    folders = [folder for name, folder in made.items() if name in kept]
    wanted = folders[0] if len(folders) == 1 else compose(folders, home / "wanted", join="modules")
    assert_same_folder(out, wanted)
    assert torch.equal(logits(load_model(whole, without=gone)), logits(load_model(wanted)))


def test_owners_whose_tokens_choose_more(base: Path, owners: dict[str, Path], tmp_path: Path) -> None:
    """Routers into which only some inserted choose as many as these; two numbers for one router are refused."""
    more = {name: owner(base, name, 1, 5, top_k=3, parts=parts) for name, parts in {"x": "both", "y": "feed"}.items()}
    for number, order in enumerate((["x", "y"], ["y", "x"])):
        folder = compose([more[name] for name in order], tmp_path / str(number), join="modules")
        routers = module_routers(load_model(folder))
        assert {router.config.top_k for router in routers} == {3}
        left = module_routers(load_model(edit("withdraw", folder, tmp_path / f"left-{number}", modules=["x_1"])))
        assert [(r.config.top_k, r.config.base_top_k) for r in left] == [(2, None), (3, 2)] * 2
    with pytest.raises(BraidError, match=r"unequal numbers of modules for a token \(top_k\): 'german-.*' 2, 'x-.*' 3"):
        compose([owners["german"], more["x"]], tmp_path / "out", join="modules")


def test_what_training_leaves(whole: Path, owners: dict[str, Path]) -> None:
    """From the composed folder the routers train, and nothing else; an owner's rows are among them."""
    model = load_model(whole)
    assert model.config.frozen == ["blocks", "modules", "embedding", "head"]
    freeze(model, model.config.frozen)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".router." in name for name in trained)
    both = load_model(whole)
    freeze(both, [*model.config.frozen, "routers"])
    assert not any(parameter.requires_grad for parameter in both.parameters())
    alone = load_model(whole)
    freeze(alone, ["modules"])
    banks = [m for m in alone.modules() if getattr(m, "trained_rows", None) is not None]
    assert banks
    assert all(bank.trained_rows == slice(0, 3) for bank in banks)
    sources = load_lineage(whole)["sources"]
    assert [source["name"] for source in sources] == [folder.name for folder in owners.values()]


def test_owners_are_named(base: Path, tmp_path: Path) -> None:
    twins = [owner(base, "new", 2, seed) for seed in (7, 8)]
    with pytest.raises(BraidError, match="both have a module called 'new_1'") as error:
        compose(twins, tmp_path / "out", join="modules")
    assert "--names" in str(error.value)
    compose(twins, tmp_path / "out", join="modules", names=["anna", "bert"])
    model = load_model(tmp_path / "out", without=["bert*"])
    assert module_routers(model)[0].choices[3:] == ("anna_1", "anna_2", "bert_1", "bert_2")
    assert torch.equal(logits(model), logits(load_model(twins[0])))
    again = owner(base, "third", 1, 9)
    compose([tmp_path / "out", again], tmp_path / "three", join="modules")
    without = load_model(tmp_path / "three", without=["third*"])
    assert torch.equal(logits(without), logits(load_model(tmp_path / "out")))


def test_another_base_is_refused(base: Path, owners: dict[str, Path], tmp_path: Path) -> None:
    other = folder_of(KINDS["mixture of heads"], tmp_path / "other", layers=2)
    moved = trained(other, tmp_path / "moved", 1)
    model = load_model(moved)
    with torch.no_grad():
        model.model.embedding.weight[0, 0] += 1e-3
    save_model(model, tmp_path / "changed", TOKENIZER, {"made_by": "test"})
    stranger = owner(tmp_path / "changed", "stranger", 1, 4)
    with pytest.raises(BraidError, match="does not stand on the base") as error:
        compose([owners["german"], stranger], tmp_path / "out", join="modules")
    assert "model.embedding.weight" in str(error.value)
    deeper = owner(folder_of(KINDS["mixture of heads"], tmp_path / "deeper", layers=3), "deep", 1, 4)
    with pytest.raises(BraidError, match="do not stand on one base"):
        compose([owners["german"], deeper], tmp_path / "out", join="modules")
    assert not (tmp_path / "out").exists()


def test_what_else_is_refused(base: Path, owners: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    german, maths = owners["german"], owners["maths"]
    edit("insert", base, tmp_path / "closed", modules=1, name="closed", **APART)
    pressed = owner(base, "pressed", 1, 5)
    config = (pressed / "config.json").read_text()
    (pressed / "config.json").write_text(re.sub(r'"switch": [^,\s]+', '"switch": 0.5', config))
    refused: list[tuple[str, Any]] = [
        ("no inserted modules", lambda: compose([base, german], tmp_path / "out", join="modules")),
        ("not open yet", lambda: compose([tmp_path / "closed", german], tmp_path / "out", join="modules")),
        ("models stay as they are: layers", lambda: compose([german, maths], tmp_path / "o", join="modules", layers=1)),
        (
            "two paths are called 'a'",
            lambda: compose([german, maths], tmp_path / "o", join="modules", names=["a", "a"]),
        ),
        ("no inserted module 'mats", lambda: edit("withdraw", whole, tmp_path / "o", modules=["mats*"])),
        ("no inserted module 'expert_1'", lambda: edit("withdraw", whole, tmp_path / "o", modules=["expert_1"])),
        ("name the models", lambda: edit("withdraw", whole, tmp_path / "o", modules=["law*"], paths=["a"])),
        ("(?s)no average.*`--modules`: german_1", lambda: edit("withdraw", whole, tmp_path / "o", paths=["german"])),
        (
            "(?s)routing losses.*switch: .*pressed.* 0.5",
            lambda: compose([german, pressed], tmp_path / "o", join="modules"),
        ),
    ]
    for words, attempt in refused:
        with pytest.raises(BraidError, match=words):
            attempt()
    assert not (tmp_path / "out").exists()
