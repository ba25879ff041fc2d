"""Matrices in a smaller form: what is replaced, what it computes, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from braidlm.core.devices import weights_bytes
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.model.compression import FactorisedLinear, QuantisedMatrix
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM, BraidModel
from braidlm.model.routing.dispatch import Groups
from braidlm.model.routing.stacked import StackedLinear
from tests.tiny_models import random_ids, tiny_config, tiny_model

ALL = ["stages.*", "embedding", "head"]
EXPERTS = {"feed": {"kind": "mlp", "hidden": 24, "experts": 4}, "attention": {"heads": 4, "experts": 3}}


def quantised(**options: Any) -> list[dict[str, Any]]:
    return [{"int8": {"modules": ALL, **options}}]


def test_only_the_layers_that_are_named_are_replaced_and_never_routers() -> None:
    model = tiny_model(block=EXPERTS, compression=[{"int8": {"modules": ["stages.0.*", "head", "embedding"]}}])
    small = {name for name, module in model.named_modules() if isinstance(module, QuantisedMatrix)}
    parts = ("attention.bank.qkv", "attention.bank.out", "feed.bank.up", "feed.bank.out")
    assert small == {"head", "model.embedding", *(f"model.stages.0.layers.0.{part}" for part in parts)}


def test_a_name_for_no_layer_is_an_error() -> None:
    with pytest.raises(BraidError, match=r"no layer is called 'stages.7.\*'"):
        tiny_model(compression=[{"low_rank": {"ranks": {"stages.7.*": 2}}}])
    with pytest.raises(BraidError, match="no layer is called 'head'"):
        tiny_model(compression=[{"low_rank": {"ranks": {"head": 2}}}])
    with pytest.raises(BraidError, match="rank 99 is more than a matrix of"):
        tiny_model(compression=[{"low_rank": {"ranks": {"stages.*": 99}}}])
    with pytest.raises(BraidError, match="groups of 6 do not divide 16 inputs"):
        tiny_model(compression=[{"int4": {"modules": ["stages.*.qkv"], "group": 6}}])


def test_other_classes_of_the_same_folder_have_no_head() -> None:
    BraidModel(tiny_config(compression=quantised()))


def test_tied_ends_share_codes_and_factors() -> None:
    model = BraidForCausalLM(tiny_config(compression=quantised()))
    assert model.tied == {"head.weight": "model.embedding.weight", "head.scale": "model.embedding.scale"}
    assert model.head.weight is model.model.embedding.weight
    assert model.head.scale is model.model.embedding.scale


def test_costs_are_those_of_the_weights_that_are_represented() -> None:
    def config(compression: list[dict[str, Any]]) -> BraidConfig:
        return tiny_config(block=EXPERTS, tie_embeddings=False, compression=compression)

    plain = skeleton(config([]))
    four = [{"int4": {"modules": ["stages.*"], "group": 8}}, {"int8": {"modules": ["embedding", "head"]}}]
    for compression in (quantised(), four):
        assert model_cost(skeleton(config(compression))) == model_cost(plain)
        assert weights_bytes(skeleton(config(compression))) < 0.5 * weights_bytes(plain)
    narrow = skeleton(config([{"low_rank": {"ranks": {"stages.*": 2}}}]))
    assert model_cost(narrow).parameters < model_cost(plain).parameters
    assert model_cost(narrow).flops_per_token < model_cost(plain).flops_per_token


@pytest.mark.parametrize("shape", [(1, 16), (4, 16), (1, 3, 16), (2, 1, 16), (5, 16), (0, 16)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_few_rows_is_the_product_with_the_weights(shape: tuple[int, ...], bias: bool) -> None:
    layer = QuantisedMatrix((24, 16), nn.Parameter(torch.randn(24)) if bias else None).eval()
    layer.scale.data.uniform_(0.001, 0.01)
    x = torch.randn(shape)
    with torch.no_grad():
        few = layer(x)
    plain = nn.functional.linear(x, layer.dense(), layer.bias)
    torch.testing.assert_close(few, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.double()(x.double()), plain.double(), atol=1e-5, rtol=1e-5)


def test_dynamic_inputs_are_rounded_token_by_token() -> None:
    matrix = QuantisedMatrix((3, 4), dynamic=True).eval()
    x = torch.tensor([[1.0, 0.5, -0.25, 0.001], [1000.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[127, 64, -32, 0], [127, 0, 0, 0], [0, 0, 0, 0]])
    scale = torch.tensor([[1 / 127], [1000 / 127], [0.0]])
    torch.testing.assert_close(matrix.rounded(x), expected * scale)


@pytest.mark.parametrize("compression", [quantised(), [{"int4": {"modules": ["stages.*"], "group": 8}}]])
def test_training_is_refused_and_predicting_is_not(compression: list[dict[str, Any]]) -> None:
    model = tiny_model(compression=compression).train()
    with pytest.raises(BraidError, match="a quantised model cannot be trained") as caught:
        model(random_ids(2, 8), labels=random_ids(2, 8))
    assert "quantise the result" in str(caught.value)
    with torch.no_grad():
        model(random_ids(2, 8))
    model.eval()(random_ids(2, 8))


@pytest.mark.parametrize("stack", [None, 3])
def test_a_factorised_layer_is_the_layer_with_the_product_as_its_matrix(stack: int | None) -> None:
    torch.manual_seed(0)
    whole: Any = nn.Linear(6, 5).double() if stack is None else StackedLinear(3, 6, 5, bias=True).double()
    layer: Any = FactorisedLinear(whole, 2).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    whole.bias = layer.up.bias
    if stack is None:
        whole.weight = nn.Parameter(layer.up.weight @ layer.down.weight)
        x = torch.randn(4, 6, dtype=torch.float64)
        torch.testing.assert_close(layer(x), whole(x))
        return
    whole.weight = nn.Parameter(layer.down.weight @ layer.up.weight)
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), whole(x))
    torch.testing.assert_close(layer(x, columns=slice(1, 3)), whole(x, columns=slice(1, 3)))
    rows, groups = torch.randn(7, 6, dtype=torch.float64), Groups(torch.tensor([2, 0, 5]))
    torch.testing.assert_close(layer(rows, groups, slice(0, 2)), whole(rows, groups, slice(0, 2)))


def test_layers_that_share_a_matrix_share_its_factors() -> None:
    stages = [{"block": {"layers": 3, "share": "feeds"}}]
    for compression in ([{"low_rank": {"ranks": {"stages.*": 2}}}], quantised()):
        model = BraidForCausalLM(tiny_config(stages=stages, compression=compression))
        first, *others = (layer.feed for layer in model.model.stages[0].layers)
        for other in others:
            assert dict(other.named_parameters()) == dict(first.named_parameters())
        assert first.out is not others[0].out
        names = {name for name in model.tied if ".feed." in name}
        assert len(names) == 2 * len(dict(first.named_parameters()))


def test_low_rank_then_int8_quantises_the_factors() -> None:
    compression = [{"low_rank": {"ranks": {"stages.*.feed.*": 4}}}, *quantised()]
    model = tiny_model(compression=compression)
    feed = model.model.stages[0].layers[0].feed
    assert isinstance(feed.out, FactorisedLinear)
    assert isinstance(feed.out.down, QuantisedMatrix)
    assert isinstance(model.model.stages[0].layers[0].attention.qkv, QuantisedMatrix)
