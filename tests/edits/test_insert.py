"""Inserting modules: nothing changes at first, the old ones never do, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from braidlm.bridges.model_info import ModelInfo
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.core.models.runs import trained_length
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.edits.modules import layers_of, modules_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import TopKRouter
from tests.tiny_models import random_ids, randomised, tiny_model

TOKENIZER = bytes_tokenizer()
VOCABULARY = TOKENIZER.vocab_size
KINDS: dict[str, dict[str, Any]] = {
    "feed": {"attention": {"heads": 2}, "feed": {"experts": 3}},
    "moep": {"attention": {"heads": 2, "bias": True, "experts": 3}, "feed": {"learned_beta": True, "experts": 2}},
    "routed keys": {"attention": {"heads": 2, "experts": {"names": 3, "scope": "routed"}}},
    "mixture of heads": {
        "attention": {"kind": "stick_breaking", "heads": 2, "experts": {"names": 3, "keys": "shared"}},
        "feed": {"kind": "mlp", "bias": True, "experts": {"names": 3, "shared": 4}},
    },
    "moduleformer": {
        "attention": {"heads": 2, "experts": {"names": 3, "keys": "stream"}},
        "feed": {
            "experts": {
                "names": 4,
                "router": {"hidden": 8, "renormalise": False, "silent": 2, "bias": False, "balance_rate": 0.1},
            }
        },
    },
}


def folder_of(block: dict[str, Any], out: Path, layers: int = 2, **architecture: Any) -> Path:
    """A model folder; feeds are small unless the block says otherwise."""
    feed = {"hidden": 12, **block.get("feed", {})}
    architecture = {
        "width": 16,
        "context": 64,
        "positions": "none",
        "stages": [{"block": {"layers": layers}}],
        "block": {**block, "feed": feed},
        **architecture,
    }
    model = randomised(BraidForCausalLM(BraidConfig(architecture, vocab_size=VOCABULARY, pad_token_id=0)))
    save_model(model, out, TOKENIZER, {"made_by": "test"})
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(KINDS["mixture of heads"], tmp_path_factory.mktemp("insert") / "source")


def routers(model: BraidForCausalLM) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


@torch.no_grad()
def opened(folder: Path, out: Path, share: float = 1.0) -> Path:
    """The same model as after a training that opened its new modules."""
    model = load_model(folder)
    for router in routers(model):
        router.open(share)
    save_model(model, out, TOKENIZER, {"made_by": "test"})
    return out


@torch.no_grad()
def all_logits(model: Any) -> list[Tensor]:
    """The logits of a plain pass, of a padded batch on either side, and of tokens one by one from a cache."""
    ids = random_ids(2, 12, vocab_size=VOCABULARY)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    results = [model(ids).logits, model(ids, attention_mask=mask).logits[0, 5:]]
    results.append(model(ids.flip(1), attention_mask=mask.flip(1)).logits[0, :-5])
    cache, steps = None, []
    for position in range(6):
        step = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    return [*results, torch.cat(steps, dim=1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_logits_are_unchanged(kind: str, compute: str, tmp_path: Path) -> None:
    source = folder_of(KINDS[kind], tmp_path / "source")
    edit("insert", source, tmp_path / "out", modules=2, name="german")
    before, after = load_model(source), load_model(tmp_path / "out")
    if compute == "dense":  # sums over more modules are rounded in another way
        before, after = before.double(), after.double()
    for part in (part for model in (before, after) for part in model.modules() if hasattr(part, "compute")):
        part.compute = compute
    for ours, theirs in zip(all_logits(after), all_logits(before), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    assert {router.choices[router.old :] for router in routers(after)} == {("german_1", "german_2")}


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_more_choices_for_each_token(top_k: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three modules two were chosen: with others the logits change, and that is said."""
    source = folder_of(KINDS["feed"], tmp_path / "source")
    folder = edit("insert", source, tmp_path / "out", modules=2, top_k=top_k)
    before, after = load_model(source), load_model(folder)
    assert {(r.config.top_k, r.config.base_top_k) for r in routers(after)} == {(top_k, None if top_k == 2 else 2)}
    ids = random_ids(2, 12, vocab_size=VOCABULARY)
    with torch.no_grad():
        assert torch.allclose(after(ids).logits, before(ids).logits, atol=1e-5) == (top_k == 2)
    said = f"a token chooses {top_k} modules in place of 2, also while the new ones are closed: the logits change at"
    assert (said in capsys.readouterr().out) == (top_k != 2)
    off = load_model(folder, without=["new_*"])
    with torch.no_grad():
        assert torch.equal(off(ids).logits, before(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("renormalise", [True, False])
def test_more_choices_than_the_base_has(renormalise: bool, tmp_path: Path) -> None:
    """Where the base's modules were all chosen before, more choices are new ones, which are closed: FlexOlmo's case."""
    router = {"top_k": 1, "renormalise": renormalise, "losses": {}}
    block = {"attention": {"heads": 2}, "feed": {"experts": {"names": 1, "router": router}}}
    source = folder_of(block, tmp_path / "source")
    folder = edit("insert", source, tmp_path / "closed", modules=1, top_k=2)
    model, ids = load_model(opened(folder, tmp_path / "out")), random_ids(2, 12, vocab_size=VOCABULARY)
    usage = [routing.weights_BTN.mean((0, 1)) for routing in model.model(ids).routings]
    assert all(share > 0.02 for shares in usage for share in shares.tolist())


def test_an_insertion_keeps_the_choices_of_the_one_before(source: Path, tmp_path: Path) -> None:
    first = opened(edit("insert", source, tmp_path / "first", modules=1, name="one", top_k=3), tmp_path / "opened")
    for top_k, wanted in ((None, (3, None)), (4, (4, 3))):
        again = edit("insert", first, tmp_path / f"again-{top_k}", modules=1, name="two", top_k=top_k)
        assert {(r.config.top_k, r.config.base_top_k) for r in routers(load_model(again))} == {wanted}


def test_new_modules_are_as_the_models_initialisation_makes_them(source: Path, tmp_path: Path) -> None:
    edit("insert", source, tmp_path / "out", modules=2, seed=3)
    edit("insert", source, tmp_path / "again", modules=2, seed=3)
    edit("insert", source, tmp_path / "other", modules=2, seed=4)
    edit("insert", source, tmp_path / "zero", modules=2, seed=3, scale=0.0)
    out, again, other, zero = (load_model(tmp_path / name) for name in ("out", "again", "other", "zero"))
    feed, first = (model.model.stages[0].layers[1].feed for model in (out, load_model(source)))
    assert torch.equal(feed.bank.up.weight[:3], first.bank.up.weight)
    assert 0.015 < feed.bank.up.weight[3:].std() < 0.025
    assert not torch.equal(feed.bank.up.weight[3], feed.bank.up.weight[4])
    assert feed.bank.up.bias[3:].eq(0).all()
    assert 0 < feed.router.scores.weight[3:].std() < 0.04
    for name, tensor in out.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(feed.bank.up.weight, other.model.stages[0].layers[1].feed.bank.up.weight)
    for layer in zero.model.stages[0].layers:
        assert layer.feed.bank.out.weight[3:].eq(0).all()
        assert layer.attention.out.weight[3:].eq(0).all()
        assert layer.feed.bank.up.weight[3:].ne(0).any()


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, ["blocks"]),
        ({"router": "rows"}, ["blocks", "routers"]),
        ({"router": "rows", "embedding": "frozen"}, ["blocks", "routers", "embedding", "head"]),
    ],
)
def test_the_folder_says_what_training_leaves(
    source: Path, tmp_path: Path, options: dict[str, Any], frozen: list[str]
) -> None:
    edit("insert", source, tmp_path / "out", modules=1, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert model.config.frozen == frozen
    layer = model.model.stages[0].layers[0]
    assert layer.feed.bank.up.trained_rows == slice(3, 4)
    assert layer.feed.router.scores.trained_rows == (slice(3, 4) if options else None)
    assert layer.feed.router.scores.weight.requires_grad
    assert not layer.feed.shared.up.weight.requires_grad
    assert model.model.embedding.weight.requires_grad == ("embedding" not in frozen)


def test_an_untied_head_follows_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(KINDS["feed"], tmp_path / "source", tie_embeddings=False)
    edit("insert", source, tmp_path / "out", modules=1, embedding="frozen")
    assert not load_model(tmp_path / "out").head.weight.requires_grad
    edit("insert", source, modules=1, embedding="frozen", dry_run=True)
    assert "the head has weights of its own; they stay as they are" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["moep", "routed keys", "mixture of heads"])
def test_new_modules_begin_as_copies(kind: str, tmp_path: Path) -> None:
    source = folder_of(KINDS[kind], tmp_path / "source")
    edit("insert", source, tmp_path / "out", modules=4, start="copies")
    before, after = load_model(source), load_model(tmp_path / "out")
    for ours, theirs in zip(all_logits(after.double()), all_logits(before.double()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    changed = {name for name, tensor in before.state_dict().items() if tensor.shape != after.state_dict()[name].shape}
    for name in changed:
        old, new = before.state_dict()[name], after.state_dict()[name]
        copies = new[len(old) :]
        assert len(copies) == 4
        if ".router." not in name:
            assert torch.equal(copies, torch.cat((old, old, old))[:4].to(copies.dtype))
    assert any(".router." not in name for name in changed)


def test_only_the_parts_that_were_asked_for(source: Path, tmp_path: Path) -> None:
    edit("insert", source, tmp_path / "out", modules=2, parts="feed")
    layer = load_model(tmp_path / "out").model.stages[0].layers[0]
    assert len(layer.feed.router.choices) == 5
    assert len(layer.attention.router.choices) == 3
    assert layer.attention.router.opening is None


def test_inserting_again_makes_the_former_ones_old(source: Path, tmp_path: Path) -> None:
    edit("insert", source, tmp_path / "one", modules=1, name="german", router="rows")
    with pytest.raises(BraidError, match="not open yet: german_1"):
        edit("insert", tmp_path / "one", tmp_path / "two", modules=1, name="dutch")
    assert not (tmp_path / "two").exists()
    half = opened(tmp_path / "one", tmp_path / "half", 0.5)
    with pytest.raises(BraidError, match="not open yet: german_1"):
        edit("insert", half, tmp_path / "two", modules=1, name="dutch")
    trained = opened(tmp_path / "one", tmp_path / "trained")
    edit("insert", trained, tmp_path / "two", modules=2, name="dutch", parts="feed")
    before, after = load_model(trained), load_model(tmp_path / "two")
    assert after.config.frozen == ["blocks"]
    feed, attention = (getattr(after.model.stages[0].layers[0], part) for part in ("feed", "attention"))
    assert feed.router.choices[3:] == ("german_1", "dutch_1", "dutch_2")
    assert feed.bank.up.trained_rows == slice(4, 6)
    assert attention.router.config.new == []
    assert not attention.queries.weight.requires_grad
    for ours, theirs in zip(all_logits(after), all_logits(before), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("kind", "beside"), [("feed", None), ("feed", "other.txt"), ("moduleformer", "other.txt")])
@torch.no_grad()
def test_rows_of_routers_begin_as_the_embedding_of_a_text(
    kind: str, beside: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"own.txt": "zzzz yyyy zzzz", "other.txt": "0123456789"}
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    source = folder_of(KINDS[kind], tmp_path / "source")
    with monkeypatch.context() as plain:  # without the noise that tells modules of one owner apart
        plain.setattr(BraidForCausalLM, "_init_weights", lambda self, module: [p.zero_() for p in module.parameters()])
        edit("insert", source, tmp_path / "out", modules=2, text="own.txt", beside=beside)
    before, after = load_model(source), load_model(tmp_path / "out")
    for old, new in zip(routers(before), routers(after), strict=True):
        read, scores = {}, {}
        for name, text in texts.items():
            hidden: list[Tensor] = []
            hook = old.register_forward_hook(lambda router, given, _, hidden=hidden: hidden.append(given[0]))
            before(torch.tensor([TOKENIZER.encode(text)]))
            hook.remove()
            read[name] = old.read(hidden[0])[0].mean(0)
            scores[name] = new.scores(old.read(hidden[0]))[0]
        weight = new.scores.weight[new.old : len(new.choices)]
        direction = read["own.txt"] - (0 if beside is None else read["other.txt"])
        assert torch.equal(weight[0], weight[1])
        torch.testing.assert_close(F.cosine_similarity(weight[0], direction, dim=0), torch.tensor(1.0))
        among = scores["own.txt"][:, : new.old]
        best, worst = among.amax(-1).mean(), among.amin(-1).mean()
        if beside is not None:  # from the other text to its own the score rises as far as the model's own lie apart
            rise = scores["own.txt"][:, new.old].mean() - scores["other.txt"][:, new.old].mean()
            torch.testing.assert_close(rise, best - worst)
        if new.scores.bias is not None:
            torch.testing.assert_close(scores["own.txt"][:, new.old].mean(), best)


def test_blocks_without_experts_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["block", {"block": {"feed": {"experts": 3}}}]
    source = folder_of({"attention": {"heads": 2}}, tmp_path / "source", stages=stages)
    edit("insert", source, tmp_path / "out", modules=1, dry_run=True)
    assert "1 layer has no experts and stays as it is" in capsys.readouterr().out
    edit("insert", source, tmp_path / "out", modules=1)
    for ours, theirs in zip(all_logits(load_model(tmp_path / "out")), all_logits(load_model(source)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def test_the_lineage_records_it(source: Path, tmp_path: Path) -> None:
    edit("insert", source, tmp_path / "out", modules=2, name="german")
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    assert lineage["made_by"] == "braid edit insert"
    assert lineage["options"]["name"] == "german"
    assert lineage["tensors"]["model.stages.0.layers.0.feed.bank.up.weight"]["how"] == "2 new rows after row 2"
    assert lineage["sources"][0]["sha256"]


def test_an_edited_model_knows_the_length_that_it_was_trained_at(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, block={"feed": {"experts": 3}})
    source = save_model(model, tmp_path / "source", TOKENIZER, {"recipe": {"data": {"length": 7}}})
    edit("insert", source, tmp_path / "once", modules=1, name="first")
    assert trained_length(load_lineage(tmp_path / "once")) == 7
    (tmp_path / "text.txt").write_text("One day a cat sat. The end.")
    edit("prune", tmp_path / "once", tmp_path / "twice", text=str(tmp_path / "text.txt"), threshold=0.0)
    assert trained_length(load_lineage(tmp_path / "twice")) == 7
    assert trained_length(None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "modules: missing"),
        ({"modules": 0}, "modules: expected a whole number from 1"),
        ({"modules": 2, "name": "expert"}, "there is a module of that name already: expert_1, expert_2"),
        ({"modules": 2, "name": ""}, "'' is no name for modules"),
        ({"modules": 2, "name": "a*"}, r"'a\*' is no name for modules"),
        ({"modules": 2, "router": "none"}, "router: 'none' is not one of"),
        ({"modules": 2, "scale": -1.0}, "scale: expected a number from 0"),
        ({"modules": 2, "scale": float("nan")}, "scale: expected a number"),
        ({"modules": 2, "start": "copies", "scale": 0.0}, "scale: copies of modules are as these are"),
        ({"modules": 2, "text": "a", "beside": "a"}, "beside: this is the text that the modules are for"),
        ({"modules": 2, "beside": "there.txt"}, "beside: there is no text for which the modules are"),
        ({"modules": 2, "top_k": 0}, "top_k: expected a whole number from 1"),
        ({"modules": 2, "top_k": 6}, "top_k: there are not 6, but 3 modules and 2 new ones"),
    ],
)
def test_options_that_are_refused(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match=message):
        edit("insert", source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_models_that_are_refused(tmp_path: Path) -> None:
    dense = folder_of({"attention": {"heads": 2}}, tmp_path / "dense")
    with pytest.raises(BraidError, match="no experts in its blocks"):
        edit("insert", dense, tmp_path / "out", modules=1)
    feed = folder_of(KINDS["feed"], tmp_path / "feed")
    with pytest.raises(BraidError, match="no attention experts") as caught:
        edit("insert", feed, tmp_path / "out", modules=1, parts="attention")
    assert "--parts feed" in str(caught.value.todo)
    paths = folder_of(KINDS["feed"], tmp_path / "paths", stages=[{"parallel": {"paths": 2}}])
    with pytest.raises(BraidError, match="no experts in its blocks"):
        edit("insert", paths, tmp_path / "out", modules=1)
    assert not (tmp_path / "out").exists()


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "edit",
        "insert",
        source,
        "--modules",
        2,
        "--name",
        "german",
        "--router",
        "rows",
        "--out",
        tmp_path / "out",
    ]
    assert main([*map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path / "out")
    assert main([*map(str, words)]) == 2  # the folder is there already
    with pytest.raises(SystemExit, match="2"):
        main(["edit", "insert", str(source), "--out", str(tmp_path / "second")])
    assert "required: --modules" in capsys.readouterr().err


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(list(KINDS)),
    modules=st.integers(1, 3),
    parts=st.sampled_from(["both", "feed"]),
    number=st.uuids(),
)
def test_pruning_what_is_never_used_gives_the_model_back(
    kind: str, modules: int, parts: Any, number: Any, tmp_path: Path
) -> None:
    """Closed modules leave nothing behind, also where the scores of pruned modules still count."""
    folder = tmp_path / str(number)
    if "feed" in KINDS[kind] or parts == "both":
        source = folder_of(KINDS[kind], folder / "source", layers=1)
        edit("insert", source, folder / "grown", modules=modules, parts=parts)
        text = folder / "text.txt"
        text.write_text("".join(map(chr, range(32, 127))) * 20)
        edit("prune", folder / "grown", folder / "out", text=str(text), threshold=0.0)
        before, after = load_model(source), load_model(folder / "out")
        assert after.config.frozen == before.config.frozen == []
        names = {
            name for layer in layers_of(ModelInfo(after.config)) for one in modules_of(layer) for name in one.names
        }
        assert not any(name.startswith("new") for name in names)
        ids = torch.tensor([TOKENIZER.encode("The cat sat on the mat.")])
        with torch.no_grad():
            torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=1e-5)


def test_pruning_old_modules_keeps_the_new_ones_new(source: Path, tmp_path: Path) -> None:
    edit("insert", source, tmp_path / "one", modules=3, name="german", router="rows")
    trained = opened(tmp_path / "one", tmp_path / "trained")
    text = tmp_path / "text.txt"
    text.write_text("Der Hund lief dem Ball nach. " * 20)
    edit("prune", trained, tmp_path / "out", text=str(text), keep=0.75)
    assert load_model(tmp_path / "out").config.frozen == ["blocks", "routers"]
    for router in routers(load_model(tmp_path / "out")):
        german = [name for name in router.choices if name.startswith("german")]
        assert router.config.new == german
        assert (router.opening is None) == (not german)
    half = opened(tmp_path / "one", tmp_path / "half", 0.5)
    model = load_model(half)
    for router in routers(model):
        router.config.renormalise = False
    save_model(model, tmp_path / "shares", TOKENIZER, {"made_by": "test"})
    with pytest.raises(BraidError, match="not open yet"):
        edit("prune", tmp_path / "shares", tmp_path / "pruned", text=str(text), keep=0.6)
