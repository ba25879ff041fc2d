"""Weight sharing: state belongs to each use, gradients add up, and a shared tensor is saved once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from braidlm.core.models.accounting import cost_of, model_cost, skeleton, stage_table
from braidlm.core.models.folders import WEIGHTS, load_model, save_model
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import TopKRouter
from braidlm.model.stages import LowRank
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model

EXPERTS = {"names": 3, "router": {"balance_rate": 0.1, "losses": {"switch": 0.1}}}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"attention": {"heads": 2}, "feed": {"hidden": 12}},
    "biased": {
        "norm": "layer",
        "attention": {"heads": 2, "kv_heads": 1, "bias": True},
        "feed": {"kind": "mlp", "hidden": 12, "bias": True},
    },
    "banks": {
        "attention": {"heads": 2, "experts": EXPERTS},
        "feed": {"hidden": 8, "learned_beta": True, "experts": {**EXPERTS, "shared": 4}},
    },
    "mixture of heads": {
        "attention": {"heads": 2, "kind": "stick_breaking", "experts": {"names": 3, "keys": "shared"}},
        "feed": {"hidden": 8},
    },
}
STAGES: dict[str, dict[str, Any]] = {
    "blocks": {"block": {"layers": 4}},
    "stacked paths": {"parallel": {"layers": 4, "paths": 2}},
    "paths one by one": {"parallel": {"layers": 4, "paths": {"a": {"depth": 5}, "b": {"feed": {"hidden": 8}}}}},
    "routed paths": {"parallel": {"layers": 4, "paths": 3, "join": {"kind": "routed", "compute": "sparse"}}},
    "routed sublayers": {"parallel": {"layers": 4, "paths": 3, "join": {"kind": "routed", "per": "sublayer"}}},
}
SHARES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["feeds", "attentions", "blocks"]),
        "layers": st.sampled_from(["all", "interior"]),
        "lora": st.sampled_from([None, 2]),
    }
)


def architecture(stage: str, block: str, share: dict[str, Any] | None, tied: bool) -> dict[str, Any]:
    ((kind, options),) = STAGES[stage].items()
    options = options if share is None else {**options, "share": share}
    return {"block": BLOCKS[block], "stages": [{kind: options}], "tie_embeddings": tied}


def fits(stage: str, block: str) -> bool:
    """Paths that are chosen per sublayer are experts already."""
    return stage != "routed sublayers" or block in ("plain", "biased")


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def gradients(model: BraidForCausalLM) -> dict[str, Tensor]:
    ids = random_ids(2, 9)
    model.train().zero_grad()
    torch.manual_seed(0)
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def unshared_twin(model: BraidForCausalLM, stage: str, block: str, share: dict[str, Any], tied: bool) -> Any:
    """A model without sharing whose layers have copies of the same weights; a low-rank addition is in the weight."""
    twin = BraidForCausalLM(tiny_config(**architecture(stage, block, None, tied))).double()
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            down, up = (state.pop(f"{name}.{factor}.weight") for factor in ("down", "up"))
            weight = f"{name.removesuffix('.lora')}.weight"
            state[weight] = state[weight] + (down @ up if down.ndim == 3 else up @ down)
    twin.load_state_dict(state)
    return twin.eval()


@settings(max_examples=25)
@given(st.sampled_from(list(STAGES)), st.sampled_from(list(BLOCKS)), SHARES, st.booleans())
def test_any_combination_computes_what_copies_do(stage: str, block: str, share: dict[str, Any], tied: bool) -> None:
    """And its cache equals the full forward, and the gradient of what is shared is the sum over the copies."""
    if not fits(stage, block):
        return
    model = tiny_model(torch.float64, **architecture(stage, block, share, tied))
    twin = unshared_twin(model, stage, block, share, tied)
    ids = random_ids(2, 9)
    torch.testing.assert_close(logits(model, ids), logits(twin, ids), rtol=0, atol=1e-9)
    cache = DynamicCache()
    pieces = [logits(model, piece, past_key_values=cache) for piece in ids.split([4, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, ids), rtol=0, atol=1e-9)
    ours, copies = gradients(model), gradients(twin)
    sums: dict[str, Tensor] = {}
    for name, gradient in copies.items():
        saved = model.tied.get(name, name)
        if name not in model.tied or name.startswith("model."):  # the head of both is the embedding
            sums[saved] = sums[saved] + gradient if saved in sums else gradient
    for name, expected in sums.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@settings(max_examples=10)
@given(st.sampled_from(list(STAGES)), st.sampled_from(list(BLOCKS)), SHARES, st.booleans())
def test_any_combination_is_counted_by_its_parameters_and_uses(
    stage: str, block: str, share: dict[str, Any], tied: bool
) -> None:
    if not fits(stage, block):
        return
    model = skeleton(tiny_config(**architecture(stage, block, share, tied)))
    apart = skeleton(tiny_config(**architecture(stage, block, None, tied)))
    cost, whole = model_cost(model, 16), model_cost(apart, 16)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.active_parameters <= cost.parameters
    assert sum(row["parameters"] for row in stage_table(model, 16)) == cost.parameters
    if share["lora"] is None:
        assert cost.parameters < whole.parameters
        assert cost.flops_per_token == whole.flops_per_token
    else:
        added = sum(cost_of(module, 16).flops_per_token for module in model.modules() if isinstance(module, LowRank))
        assert cost.flops_per_token == whole.flops_per_token + added


@pytest.mark.parametrize(("stage", "tied"), [("blocks", True), ("stacked paths", False), ("paths one by one", True)])
def test_a_shared_tensor_is_saved_once_and_shared_again(
    stage: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By all three Auto classes, in half precision too, and without a word about missing tensors."""
    share = {"kind": "blocks", "layers": "interior", "lora": 2}
    model = tiny_model(**architecture(stage, "biased", share, tied))
    folder = save_model(model, tmp_path / "m", None, {"made_by": "a test"})
    with safe_open(folder / WEIGHTS, "pt") as file:
        names = set(file.keys())
    assert names == set(model.state_dict()) - set(model.tied)
    parameters, ids = sum(p.numel() for p in model.parameters()), random_ids(2, 9)
    opened = [
        load_model(folder),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, low_cpu_mem_usage=True, device_map="cpu"),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16),
    ]
    for loaded in opened:
        assert sum(p.numel() for p in loaded.parameters()) == parameters
        error = (logits(loaded, ids).float() - logits(model, ids)).abs().mean()
        assert error < (0.1 if loaded.dtype == torch.bfloat16 else 1e-6)
    body = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert sum(p.numel() for p in body.parameters()) == sum(p.numel() for p in model.model.parameters())
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=2)
    classifier.save_pretrained(tmp_path / "classes")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classes", trust_remote_code=True)
    assert torch.equal(logits(again, ids), logits(classifier, ids))
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "stages." in text], "a new score and a head that is not needed are all"


def test_norms_routers_and_balances_stay_apart() -> None:
    banks = tiny_model(block=BLOCKS["banks"], stages=[{"block": {"layers": 2, "share": "feeds"}}])
    first, second = banks.model.stages[0].layers
    assert first.feed.bank.out.weight is second.feed.bank.out.weight
    assert first.feed.shared.out.weight is second.feed.shared.out.weight
    assert first.feed.bank.beta is second.feed.bank.beta
    assert first.feed_norm.weight is not second.feed_norm.weight
    assert first.feed.router.scores.weight is not second.feed.router.scores.weight
    assert first.attention.bank.qkv.weight is not second.attention.bank.qkv.weight
    whole = tiny_model(block=BLOCKS["banks"], stages=[{"block": {"layers": 2, "share": "blocks"}}])
    first, second = whole.model.stages[0].layers
    assert first.feed_norm.weight is second.feed_norm.weight
    assert first.feed.router.scores.weight is second.feed.router.scores.weight
    assert first.feed.router.balance is not second.feed.router.balance
    addresses = [module.address for module in whole.modules() if isinstance(module, TopKRouter)]
    assert len(set(addresses)) == len(addresses) == 4
    assert [routing.name for routing in whole(random_ids(1, 4)).routings] == addresses


def test_interior_leaves_the_first_and_the_last_layer() -> None:
    share = {"kind": "feeds", "layers": "interior"}
    layers = tiny_model(stages=[{"block": {"layers": 5, "share": share}}]).model.stages[0].layers
    weights = [layer.feed.out.weight for layer in layers]
    assert weights[1] is weights[2] is weights[3]
    assert len({id(weight) for weight in weights}) == 3


def test_a_low_rank_addition_begins_at_zero() -> None:
    share = {"kind": "feeds", "lora": 2}
    for stage in ({"block": {"layers": 2, "share": share}}, {"parallel": {"layers": 2, "paths": 2, "share": share}}):
        model = BraidForCausalLM(tiny_config(stages=[stage]))
        additions = [module for module in model.modules() if isinstance(module, LowRank)]
        assert len(additions) == 4
        assert all(not one.up.weight.any() and one.down.weight.std() > 0.05 for one in additions)
        assert not torch.equal(additions[0].down.weight, additions[2].down.weight)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"block": {"share": "feeds"}}, "share: at least 2 layers are needed, and there are 1"),
        ({"block": {"layers": 3, "share": {"kind": "feeds", "layers": "interior"}}}, "2 interior layers are needed"),
        ({"parallel": {"layers": 2, "paths": {"a": {"depth": 1}, "b": {}}, "share": "blocks"}}, "at least 2 layers"),
    ],
)
def test_too_few_layers_are_refused(stage: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError, match=text) as error:
        tiny_model(stages=["block", stage])
    assert error.value.where == "stages[1]"


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(BraidError, match=r"stages\[0\].block.share: unknown sharing 'feed'. Did you mean 'feeds'"):
        tiny_config(stages=[{"block": {"layers": 2, "share": "feed"}}])


def test_random_states_and_copies_keep_what_is_shared(tmp_path: Path) -> None:
    """A folder that was saved by plain transformers is the same again."""
    model = randomised(BraidForCausalLM(tiny_config(stages=[{"block": {"layers": 3, "share": "blocks"}}])))
    model.save_pretrained(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=True)
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architecture"] == model.config.architecture
