"""The graph of a lineage: what came from where, whatever a stranger wrote into it."""

from typing import Any

import pytest

from braidlm.inspection.lineage import MAX_NODES, LineageGraph, lineage_graph

PATH = {
    "model": "step-000010",
    "sha256": "aa",
    "made_by": "braid train",
    "recipe_sha256": "0123456789abcdef",
    "training": {"steps": 10, "loss": 1.5},
    "sources": [{"data": "stories", "tokens": 2000, "words": 1500}],
}
COMPOSED = {
    "made_by": "braid compose",
    "options": {"join": {"kind": "gumbel_v1"}, "layers": 3},
    "sources": [{"name": "left", **PATH}, {"name": "right", **PATH, "sha256": "bb"}],
    "weights": {"file": "model.safetensors", "sha256": "cc"},
}


def shown(graph: LineageGraph) -> tuple[dict[str, str], set[tuple[str, str, str]]]:
    """The kinds by labels, and the edges by labels."""
    labels = {node.id: node.label for node in graph.nodes}
    edges = {(labels[edge.source], labels[edge.target], edge.label) for edge in graph.edges}
    return {node.label: node.kind for node in graph.nodes}, edges


def test_a_composed_model() -> None:
    kinds, edges = shown(lineage_graph("both", COMPOSED))
    recipe = "recipe 0123456789ab"
    assert kinds == {
        "both": "model", "compose": "edit", "left": "model", "right": "model", recipe: "recipe", "stories": "data"
    }  # fmt: skip
    assert edges == {
        ("compose", "both", ""), ("left", "compose", ""), ("right", "compose", ""), (recipe, "left", ""),
        (recipe, "right", ""), ("stories", recipe, "2,000 tokens"),
    }  # fmt: skip
    graph = lineage_graph("both", COMPOSED)
    assert graph.nodes[0].label == "both"
    assert graph.nodes[1].facts == {"made by": "braid compose", "join.kind": "gumbel_v1", "layers": 3}


def test_a_source_that_is_only_a_hash_is_looked_up() -> None:
    trained = {
        "made_by": "braid train",
        "recipe": {"name": "mine", "data": {"sets": {"stories": {"source": "hub:a/b"}}}, "training": {"batch": 4}},
        "sources": [{"data": "stories", "tokens": 5}, {"model": "both", "sha256": "cc", "role": "teacher"}],
    }
    kinds, edges = shown(lineage_graph("mine", trained, {"cc": COMPOSED}.get))
    assert ("compose", "both", "") in edges
    assert ("both", "mine", "teacher") in edges
    assert kinds["left"] == "model"
    checkpoint = {"sources": [{"model": "step-000010", "sha256": "dd"}, {"name": "model", "sha256": "ee"}]}
    kinds, _ = shown(lineage_graph("new", checkpoint, {"dd": trained}.get))
    assert (kinds["mine"], kinds["model"]) == ("recipe", "model")
    assert "step-000010" not in kinds
    data = next(node for node in lineage_graph("m", trained).nodes if node.kind == "data")
    assert data.facts == {"tokens": 5, "source": "hub:a/b"}


def test_what_two_models_have_in_common_is_one_node() -> None:
    graph = lineage_graph("m", {**COMPOSED, "sources": [{"name": "a", **PATH}, {"name": "b", **PATH}]})
    assert sum(node.kind == "model" for node in graph.nodes) == 2


def test_a_base_and_a_lineage_in_another_format() -> None:
    lineage = {"made_by": "braid edit gate", "sources": [{"model": "gates", "sha256": "1", "base": {"model": "llama"}}]}
    assert ("llama", "gates", "base") in shown(lineage_graph("m", lineage))[1]
    nested = {"made_by": "braid convert", "sources": [{"model": "qwen", "sha256": "2", "lineage": COMPOSED}]}
    assert ("compose", "qwen", "") in shown(lineage_graph("m", nested))[1]


@pytest.mark.parametrize(
    "lineage",
    [
        None,
        {},
        {"made_by": 3, "sources": "x"},
        {"made_by": "braid train", "recipe": [], "sources": [{"data": None}, 5, {"data": {"x": 1}, "tokens": "many"}]},
        {"made_by": "braid train", "recipe": {"data": {"sets": []}, "training": 3}, "sources": [{"data": "a"}]},
        {"training": {"loss": float("nan"), "steps": {}}, "weights": "x", "options": {"a": float("inf")}},
        {"made_by": "<script>" * 1000, "sources": [{}]},
    ],
)
def test_odd_lineages(lineage: Any) -> None:
    graph = lineage_graph("m", lineage)
    assert graph.nodes[0].label == "m"
    assert all(len(node.label) <= 300 for node in graph.nodes)


def test_a_graph_is_bounded() -> None:
    sources = [{"name": str(n), "sha256": str(n)} for n in range(2 * MAX_NODES)]
    assert len(lineage_graph("m", {"made_by": "x", "sources": sources}).nodes) == MAX_NODES
    endless = {"made_by": "x", "sources": [{"name": "again", "sha256": "s"}]}
    assert len(lineage_graph("m", endless, lambda sha256: endless).nodes) == 4
