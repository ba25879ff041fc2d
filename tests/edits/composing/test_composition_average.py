"""Composing by averaging: the folder gives the averaged probabilities of the models run apart, exactly."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.core.models.folders import load_config, load_lineage, load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import SpecialTokens
from braidlm.edits.compose import compose
from braidlm.edits.composing.path_models import posterior_shares
from braidlm.edits.edit import edit
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import AverageHead, PosteriorHead
from tests.edits.composed_paths import (
    ATTENTION_EXPERTS,
    EXPERTS,
    GPT2,
    MODULES,
    PAPAFORMER,
    TOKENIZER,
    VOCABULARY,
    blocks,
    double,
    ids,
    parallel_stage,
    saved_path,
)
from tests.tiny_models import tiny_model

LAYER_NORM = {"norm": {"kind": "layer", "bias": False}}
BIASED = {"tie_embeddings": False, "head": {"kind": "linear", "bias": True}}
SHARED = {"stages": [{"block": {"layers": 3, "share": "blocks"}}]}
ROUTED = {"block": {"layers": 2, **EXPERTS["block"]}}
HALF_ROUTED = {"stages": [{"block": {"layers": 1}}, ROUTED]}
CASES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "two": ([{}, {}], True),
    "three": ([{}, {}, {}], True),
    "two widths": ([{}, {"width": 24}], False),
    "three depths": ([blocks(5), blocks(2), blocks(3)], False),
    "last norms": ([{}, LAYER_NORM], True),
    "GPT-2, learned positions": ([GPT2, GPT2], True),
    "GPT-2, two widths and contexts": ([GPT2, {**GPT2, "width": 8, "context": 20}], False),
    "PaPaformer, untied": ([PAPAFORMER, PAPAFORMER], True),
    "one tied, one not": ([{}, {"tie_embeddings": False}], True),
    "biases": ([BIASED, BIASED], True),
    "dense and experts": ([{}, EXPERTS], False),
    "experts": ([EXPERTS, EXPERTS, EXPERTS], True),
    "experts and shared layers": ([{**EXPERTS, **blocks(3)}, {**EXPERTS, **SHARED}], True),
    "experts of attention": ([ATTENTION_EXPERTS, ATTENTION_EXPERTS], True),
    "a mixture of heads": ([MODULES, MODULES], True),
    "dense, then experts": ([HALF_ROUTED, HALF_ROUTED], True),
    "dense, and dense, then experts": ([blocks(3), HALF_ROUTED], True),  # what is dense in both
    "dense, then experts, of two depths": ([HALF_ROUTED, {"stages": [{"block": {"layers": 2}}, ROUTED]}], False),
    "windows": ([{"block": {"attention": {"heads": 2, "window": 3}}}, {}], False),
    "shared layers": ([SHARED, blocks(3)], True),
}
Case = tuple[list[Path], Path, bool]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The folders of the models, of their average, and whether it is computed as a stack."""
    home = tmp_path_factory.mktemp("models")
    options, stacked = CASES[request.param]
    folders = [saved_path(home / f"model-{9 - i}", i, **own) for i, own in enumerate(options)]
    return folders, compose(folders, home / "made", join="average"), stacked


@functools.cache
def opened(folder: Path, dtype: torch.dtype) -> BraidForCausalLM:
    """One of the models, which nothing changes."""
    return load_model(folder).to(dtype)


def average(folders: Sequence[Path], dtype: torch.dtype = torch.float64, **inputs: Any) -> Tensor:
    """The logarithms of the averaged probabilities of models run apart."""
    with torch.no_grad():
        logits = [opened(folder, dtype)(**inputs, use_cache=False).logits for folder in folders]
    return functools.reduce(torch.logaddexp, [x.log_softmax(-1) for x in logits]) - math.log(len(folders))


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    assert (found - wanted).abs().max().item() < tolerance


@torch.no_grad()
def test_probabilities_are_the_average(case: Case) -> None:
    folders, made, stacked = case
    model, inputs = double(made), ids()
    assert all((layer.stack is not None) == stacked for layer in parallel_stage(model).layers)
    wanted = average(folders, input_ids=inputs)
    close(model(inputs).logits, wanted)
    close(model(inputs).logits.softmax(-1), wanted.exp())
    close(load_model(made)(inputs).logits, average(folders, torch.float32, input_ids=inputs), 1e-5)
    close(model(inputs[:1]).logits, wanted[:1])
    apart = max((average([folder], input_ids=inputs) - wanted).abs().max().item() for folder in folders)
    assert apart > 0.1, "models that say the same would prove nothing"


@torch.no_grad()
def test_with_a_cache_and_left_padding(case: Case) -> None:
    folders, made, _ = case
    model, inputs = double(made), ids()
    mask = torch.ones_like(inputs)
    mask[0, :4] = 0
    wanted = average(folders, input_ids=inputs, attention_mask=mask)
    cache, found = DynamicCache(), []
    for end, piece in zip((6, 7, 11), inputs.split([6, 1, 4], dim=1), strict=True):
        found.append(model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits)
    close(torch.cat(found, dim=1)[mask.bool()], wanted[mask.bool()])


@torch.no_grad()
def test_a_model_that_is_switched_off_has_no_share(case: Case) -> None:
    folders, made, _ = case
    for gone in folders:
        rest = [folder for folder in folders if folder != gone]
        model = load_model(made, paths=[folder.name for folder in rest]).double()
        close(model(ids()).logits, average(rest, input_ids=ids()))
        alone = load_model(made, paths=[gone.name]).double()
        close(alone(ids()).logits, double(gone)(ids()).logits.log_softmax(-1))


def test_it_costs_what_the_models_cost(case: Case) -> None:
    folders, made, _ = case
    whole, each = (model_cost(load_model(one), 20) for one in (made, folders[0]))
    apart = [model_cost(load_model(folder), 20) for folder in folders]
    assert whole.flops_per_token == sum(cost.flops_per_token for cost in apart)
    assert whole.flops_per_token > each.flops_per_token


def test_every_tensor_has_its_origin_and_nothing_is_fresh(case: Case) -> None:
    _, made, _ = case
    lineage = load_lineage(made)
    assert set(lineage["tensors"]) == set(load_file(made / "model.safetensors"))
    assert "fresh" not in lineage["tensors"].values()
    assert not lineage["left_out"]
    options = lineage["options"]
    assert (options["join"], options["blocks"]) == ({"kind": "average"}, 0)


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [saved_path(tmp_path / name, i) for i, name in enumerate("ab")]


def test_a_tied_embedding_is_saved_once(pair: list[Path], tmp_path: Path) -> None:
    made = compose(pair, tmp_path / "made", join="average")
    tensors = load_file(made / "model.safetensors")
    assert not [name for name in tensors if name.startswith("head.")]
    assert sum(t.numel() for t in tensors.values()) == sum(
        t.numel() for folder in pair for t in load_file(folder / "model.safetensors").values()
    )


def test_a_plan_writes_nothing(pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert compose(pair, tmp_path / "made", join="average", dry_run=True) is None
    said = capsys.readouterr().out
    assert not (tmp_path / "made").exists()
    assert said.splitlines()[0] == "Compose a + b: width 32, join average"
    assert "a, b: model.embedding.weight" in said
    assert "the models stay as they are, and the probabilities that they give are averaged" in said
    assert "computed as one stacked product" in said
    assert "begin" not in said, "nothing is initialised"


def test_what_it_promises_is_checked(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AverageHead, "log_weights", lambda self, hidden, evidence=None: torch.tensor([0.4, 0.6]).log())
    with pytest.raises(BraidError, match=r"should be the average of the models' to 0\.0001, and one differs by"):
        compose(pair, tmp_path / "made", join="average")
    assert not (tmp_path / "made").exists()


def test_plain_transformers_opens_it(pair: list[Path], tmp_path: Path) -> None:
    made = compose(pair, tmp_path / "made", join="average")
    opened = AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True)
    assert type(opened).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        close(opened(ids()).logits, load_model(made)(ids()).logits, 1e-5)
        one = AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True, paths=["b"])
        close(one(ids()).logits, average(pair[1:], torch.float32, input_ids=ids()), 1e-5)
    text = opened.generate(ids(), max_new_tokens=4, do_sample=False)
    assert text.shape[1] <= ids().shape[1] + 4
    AutoModelForSequenceClassification.from_pretrained(made, trust_remote_code=True, num_labels=2)


@torch.no_grad()
def test_experts_are_switched_off_by_model_and_name(tmp_path: Path) -> None:
    folders = [saved_path(tmp_path / name, i, **EXPERTS) for i, name in enumerate("ab")]
    made, off = compose(folders, tmp_path / "made", join="average"), "stages.0.layers.0"
    alone = load_model(folders[1], without=[f"{off}:expert_2"]).double()
    averaged = load_model(made, without=[f"{off}.paths.b.0.feed:expert_2"]).double()
    wanted = [double(folders[0])(ids()).logits, alone(ids()).logits]
    close(averaged(ids()).logits, torch.logaddexp(*(x.log_softmax(-1) for x in wanted)) - math.log(2))
    assert (averaged(ids()).logits - average(folders, input_ids=ids())).abs().max() > 1e-3
    with pytest.raises(BraidError, match="Experts of paths and projections cannot be pruned; `--without`"):
        edit("prune", made, tmp_path / "pruned", text="unread", threshold=0.1)


def test_evaluation_scores_the_average(pair: list[Path], tmp_path: Path) -> None:
    made = compose(pair, tmp_path / "made", join="average")
    rows = ids()
    scores = Scorer(load_model(made)).score([Request(row) for row in rows.tolist()])
    wanted = average(pair, input_ids=rows)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
    assert scores.tokens == pytest.approx(wanted.flatten().numpy(), abs=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_mixture_begins_as_the_average_and_learns_alone(pair: list[Path], tmp_path: Path, per_token: bool) -> None:
    join = {"kind": "mixture", "per_token": per_token}
    made = compose(pair, tmp_path / "made", join=join, freeze=["paths"])
    model = double(made)
    with torch.no_grad():
        close(model(ids()).logits, average(pair, input_ids=ids()))
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert free == {"head.mixture.bias", *(["head.mixture.router.weight"] if per_token else [])}
    tensors = load_lineage(made)["tensors"]
    assert {name for name, origin in tensors.items() if origin == "fresh"} == free
    model.train()
    model(ids(), labels=ids()).loss.backward()
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in free)


@pytest.mark.parametrize(("join", "is_done"), [("average", True), ("posterior", True), ("mixture", False)])
def test_the_plan_says_when_nothing_is_left_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture, join: str, is_done: bool
) -> None:
    """The balance of a router is a tensor, but no parameter."""
    router = {"top_k": 1, "balance_rate": 0.01}
    sparse = {"block": {"feed": {"kind": "swiglu", "hidden": 8, "experts": {"names": 2, "router": router}}}}
    folders = [saved_path(tmp_path / name, i, **sparse) for i, name in enumerate("ab")]
    compose(folders, None, join=join, freeze=["paths"], dry_run=True)
    said = capsys.readouterr().out
    assert "note: training will leave as they are: paths, embedding, head" in said
    assert ("; nothing is left to train" in said) == is_done


@pytest.mark.parametrize("window", [None, 4])
def test_shares_that_follow_the_text(pair: list[Path], tmp_path: Path, window: int | None) -> None:
    """Checked against the models run apart, opened by plain transformers, and what is withdrawn leaves the other."""
    made = compose(pair, tmp_path / "made", join={"kind": "posterior", "window": window})
    assert "fresh" not in load_lineage(made)["tensors"].values()
    with torch.no_grad():
        each = torch.stack([double(folder)(ids()).logits.log_softmax(-1) for folder in pair])
        wanted = (each + posterior_shares(each, ids(), window)[..., None]).logsumexp(0)
        close(double(made)(ids()).logits, wanted)
        assert (wanted - average(pair, input_ids=ids())).abs().max() > 1e-3, "models that do not agree"
        opened = AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True)
        close(opened(ids()).logits.double(), wanted, 1e-4)
    rest = edit("withdraw", made, tmp_path / "rest", paths=["a"])
    with torch.no_grad():
        close(double(rest)(ids()).logits.log_softmax(-1), each[1])


def test_shares_are_checked(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unheard = lambda self, before, is_there, tokens: before.new_zeros(*tokens.shape, 2)  # noqa: E731
    monkeypatch.setattr(PosteriorHead, "judge", unheard)
    with pytest.raises(BraidError, match=r"average of the models', weighed by the text so far, to 0\.0001"):
        compose(pair, tmp_path / "made", join="posterior")


def refused(sources: Sequence[Path], tmp_path: Path, **options: Any) -> str:
    with pytest.raises(BraidError) as caught:
        compose(sources, tmp_path / "made", **{"join": "average", **options})
    assert not (tmp_path / "made").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers": 2}, "with this join models stay as they are: layers cannot be chosen"),
        ({"blocks": 1, "start": "random"}, "blocks, start cannot be chosen"),
        ({"join": "averge"}, "unknown join 'averge'. Did you mean 'average'?"),
        ({"join": {"kind": "average", "per_token": True}}, "join: unknown key 'per_token'"),
        ({"join": {"kind": "mixture", "residual": True}}, "join: unknown key 'residual'"),
        ({"join": {"kind": "posterior", "window": 1}}, "join.window: expected a whole number of at least 2, got 1"),
        ({"join": ["average", "concat"]}, "join: expected a join name or a mapping"),
        ({"names": ["a"]}, "1 names were given for 2 paths\nGive each path a name with `--names`, or none."),
        ({"names": ["a", "x.y"]}, "a path's name is made of letters, digits"),
        ({"names": ["a", "2b"]}, "and does not begin with a digit, got '2b'"),
    ],
)
def test_wrong_options(pair: list[Path], tmp_path: Path, options: dict[str, Any], text: str) -> None:
    assert text in refused(pair, tmp_path, **options)


def test_wrong_sources(pair: list[Path], tmp_path: Path) -> None:
    assert "composing takes at least two models" in refused(pair[:1], tmp_path)
    other = bytes_tokenizer(SpecialTokens(pad="<pad>", order=("<|endoftext|>", "<pad>")))
    alien = save_model(tiny_model(vocab_size=other.vocab_size), tmp_path / "alien", other, {})
    assert "'a' and 'alien' have different tokenizers" in refused([pair[0], alien], tmp_path)
    learned = saved_path(tmp_path / "learned", 5, positions="learned")
    assert "positions differ: 'a' has rope" in refused([pair[0], learned], tmp_path)
    biased = saved_path(tmp_path / "biased", 6, **BIASED)
    assert "the heads of some models have a bias (biased), and others have none" in refused([pair[0], biased], tmp_path)
    averaged = compose(pair, tmp_path / "averaged", join="average")
    assert "a path is made of `block` stages only" in refused([averaged, biased], tmp_path)
    assert VOCABULARY == TOKENIZER.vocab_size == load_config(averaged).vocab_size


def test_models_that_change_their_blocks_unequally_often(tmp_path: Path) -> None:
    folders = [saved_path(tmp_path / "a", **blocks(2)), saved_path(tmp_path / "b", 1, **HALF_ROUTED)]
    with pytest.raises(BraidError, match="of different depths, and kinds of blocks: 'a' has 1, 'b' has 2"):
        compose(folders, tmp_path / "out", join="average")


@pytest.mark.parametrize("join", ["average", "shared_linear"])
def test_gated_models_are_refused(join: str, tmp_path: Path) -> None:
    folders = [saved_path(tmp_path / name, seed) for seed, name in enumerate("ab")]
    gated = edit("gate", folders[0], tmp_path / "gated")
    with pytest.raises(BraidError, match="it has gates, each of which belongs to a layer: compose first"):
        compose([gated, folders[1]], tmp_path / "out", join=join)
