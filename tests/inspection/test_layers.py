"""Which path each token took: from routings where there are any, else by cosine; and nothing stays on the model."""

from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.inspection.layers import NO_CHOICE, closest_path, collect_choices, find_layers, record_calls
from braidlm.inspection.texts import Text
from braidlm.model.paths.switches import use_paths
from tests.inspection.path_models import PATHS, TOKENIZER, always, by_character, joins, passing, path_model
from tests.tiny_models import tiny_model


def texts(*given: str) -> list[Text]:
    return [Text(text, None, TOKENIZER.encode(text)) for text in given]


def chosen(model: Any, *given: str, batch: int = 16) -> list[list[list[str | None]]]:
    """For each text and layer the names of the choices."""
    layers = find_layers(model)
    choices = collect_choices(model, layers, texts(*given), batch)
    return [
        [
            [None if n == NO_CHOICE else layer.choices[n] for n in row]
            for layer, row in zip(layers, one.main_LT, strict=True)
        ]
        for one in choices
    ]


@pytest.mark.parametrize("join", ["gumbel_v1", "gumbel_v2", {"kind": "gumbel_v2", "sample": "softmax"}])
def test_a_router_that_always_chooses_one(join: Any) -> None:
    model = always(path_model(join), "maths", "combined")
    assert chosen(model, "abc", "1") == [[["maths"] * 3, ["combined"] * 3], [["maths"], ["combined"]]]
    assert [layer.read_by for layer in find_layers(model)] == ["router", "router"]
    assert [layer.name for layer in find_layers(model)] == ["stages.1.layers.0.join", "stages.1.layers.1.join"]


def test_a_router_that_looks_at_the_token() -> None:
    expected = ["stories", "stories", "combined", "maths", "maths"]
    assert chosen(by_character(path_model("gumbel_v2")), "ab 12") == [[expected, expected]]


def test_without_a_router_the_closest_path_counts() -> None:
    model = passing(path_model("shared_linear", layers=3), "maths", "stories", "maths")
    assert chosen(model, "abc") == [[["maths"] * 3, ["stories"] * 3, ["maths"] * 3]]
    assert {layer.read_by for layer in find_layers(model)} == {"cosine"}


def test_a_layer_that_grows_cannot_be_read() -> None:
    model = path_model("shared_linear", layers=2, to=24)
    first, last = find_layers(model)
    assert (first.read_by, last.read_by) == ("cosine", "")
    assert last.note == "it has no router, and its paths (16 wide) cannot be compared with its output (24)"
    assert chosen(model, "ab")[0][1] == [None, None]


def test_joins_that_cannot_be_read_at_all() -> None:
    with pytest.raises(BraidError) as caught:
        find_layers(path_model("concat"))
    assert "cannot be read in any layer: stages.1.layers.0.join: it has no router, and" in str(caught.value)
    assert "It is seen where a join has a router (`braid compose --join gumbel_v1`)" in str(caught.value)


def test_the_largest_change_is_closest_to_a_sum() -> None:
    model = path_model("add", {"loud": None, "quiet": None}, stacked=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".paths.quiet." in name:
                parameter.mul_(0.01)
    assert {name for layer in chosen(model, "some text")[0] for name in layer} == {"loud"}


def test_many_unequal_paths_and_several_stages() -> None:
    paths = {"a": {"width": 8, "attention": {"heads": 2}}, "b": {}, "c": {"depth": 2}}
    parallel = {"parallel": {"layers": 1, "paths": paths, "join": "gumbel_v1"}}
    model = tiny_model(vocab_size=258, stages=[parallel, "block", {"parallel": {"paths": 4, "layers": 2}}])
    layers = find_layers(model)
    assert [layer.choices for layer in layers] == [("a", "b", "c", "combined")] + [
        ("path_1", "path_2", "path_3", "path_4")
    ] * 2
    assert [layer.label for layer in layers] == ["layer 1", "layer 3", "layer 4"]
    assert [layer.read_by for layer in layers] == ["router", "cosine", "cosine"]
    found = chosen(always_first(model, "b"), "xyz")[0]
    assert found[0] == ["b"] * 3
    assert set(found[1]) <= {"path_1", "path_2", "path_3", "path_4"}


def always_first(model: Any, choice: str) -> Any:
    join = joins(model)[0]
    with torch.no_grad():
        join.router.weight.zero_()
        join.router.bias.zero_()
        join.router.bias[join.choices.index(choice)] = 5.0
    return model


@pytest.mark.parametrize("join", ["gumbel_v1", "shared_linear"])
def test_an_inactive_path_is_never_taken(join: str) -> None:
    model = path_model(join, ("a", "b", "c"))
    use_paths(model, ["a", "c"])
    names = {name for layer in chosen(model, "a longer text with 12 numbers")[0] for name in layer}
    assert names
    assert "b" not in names


@pytest.mark.parametrize("join", ["gumbel_v1", "gumbel_v2", "shared_linear", "add"])
def test_batch_size_and_neighbours_change_nothing(join: str) -> None:
    model = path_model(join, ("a", "b", "c"))
    given = ["a", "some longer text", "12 + 3", "x" * 90, "the end of it"]
    alone = [chosen(model, text)[0] for text in given]
    assert len({name for text in alone for layer in text for name in layer}) > 1
    for batch in (1, 2, 16):
        assert chosen(model, *given, batch=batch) == alone


def test_long_texts_are_read_in_windows_of_the_context() -> None:
    model = path_model("gumbel_v2")
    whole = "abc 123 " * 20
    assert model.config.max_position_embeddings == 64
    parts = [chosen(model, whole[at : at + 64])[0] for at in (0, 64, 128)]
    found = chosen(model, whole)[0]
    assert found == [[name for part in parts for name in part[layer]] for layer in range(2)]


def test_nothing_stays_on_the_model_even_after_an_error() -> None:
    model = path_model("shared_linear")
    with pytest.raises(IndexError), record_calls({join.address: join for join in joins(model)}):
        model(torch.tensor([[0, 9999]]))  # not in the vocabulary
    assert not any(join._forward_hooks for join in joins(model))
    with record_calls({join.address: join for join in joins(model)}) as records:
        model(torch.tensor([[0, 1]]))
    assert set(records) == {"stages.1.layers.0.join", "stages.1.layers.1.join"}
    assert not any(join._forward_hooks for join in joins(model))
    collect_choices(model, find_layers(model), texts("a"))
    assert not any(join._forward_hooks for join in joins(model))


def test_no_gradients_are_kept() -> None:
    model = path_model("shared_linear").train()
    with record_calls({join.address: join for join in joins(model)}) as records, torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    assert not any(joined.requires_grad for _, (joined, *_) in records.values())


def test_cosine_by_hand() -> None:
    one, other = torch.tensor([[[1.0, 0.0], [3.0, 3.0]]]), torch.tensor([[[0.0, 9.0], [0.0, 1.0]]])
    joined = torch.tensor([[[2.0, 1.0], [0.1, 2.0]]])
    assert closest_path([one, other], joined, [0, 1]).tolist() == [[0, 1]]
    assert closest_path([one, other], joined, [1]).tolist() == [[1, 1]]


def test_a_model_without_paths_is_refused() -> None:
    with pytest.raises(
        BraidError, match="this model has no parallel stage and no experts; there is nothing to choose between"
    ):
        find_layers(tiny_model())


def test_evaluation_is_deterministic() -> None:
    model = path_model("gumbel_v1", PATHS)
    layers = find_layers(model)
    given = texts("a text", "12")
    first, second = (collect_choices(model, layers, given) for _ in range(2))
    assert all(np.array_equal(a.chosen_LKT, b.chosen_LKT) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "head", [{"kind": "posterior"}, {"kind": "mixture", "per_token": True}], ids=["posterior", "mixture"]
)
@torch.no_grad()
def test_whole_models_are_read_by_their_shares(head: dict[str, Any]) -> None:
    """Their layers have nothing that is joined; the head names the one that counts most after each token."""
    parts = [{"name": name, "width": 8} for name in PATHS]
    model = tiny_model(
        vocab_size=TOKENIZER.vocab_size,
        stages=[{"parallel": {"layers": 2, "paths": parts, "join": "concat"}}],
        norm={"kind": "per_path", "paths": parts},
        head={**head, "paths": parts},
        tie_embeddings=False,
    )
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(3))
    layers = find_layers(model)
    assert [(layer.name, layer.read_by, layer.choices) for layer in layers] == [("head", "shares", PATHS)]
    (found,) = collect_choices(model, layers, [Text("text", None, ids[0].tolist())])
    done = model.run(ids)
    wanted = model.head.log_weights(done.hidden, **done.read).argmax(-1)
    assert found.main_LT[0].tolist() == wanted[0].tolist()
    assert len(set(wanted[0].tolist())) == 2, "both are taken"
    use_paths(model, ["maths"])
    assert find_layers(model)[0].active == ["maths"]
    (alone,) = collect_choices(model, find_layers(model), [Text("text", None, ids[0].tolist())])
    assert set(alone.main_LT[0].tolist()) == {1}
