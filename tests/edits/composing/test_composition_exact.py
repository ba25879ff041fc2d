"""Composing is exact: a path inside the composed model computes what it computed alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.edits.compose import compose
from braidlm.model.paths.parallel import blocks_in_layer
from braidlm.model.paths.switches import use_paths
from tests.edits.composed_paths import (
    GPT2,
    JOINS,
    PAPAFORMER,
    block_outputs,
    blocks,
    double,
    embedded,
    own_part,
    parallel_stage,
    pass_through,
    saved_path,
    seen,
)

FINER = {"block": {"norm": {"kind": "rms", "eps": 1e-3}}}
"""Blocks of the same sizes that all the same are not equal, and so are not stacked."""
CASES: dict[str, tuple[list[dict[str, Any]], int | None, bool]] = {
    "two": ([{}, {}], None, True),
    "three": ([{}, {}, {}], None, True),
    "two, not stacked": ([{}, FINER], None, False),
    "three, not stacked": ([{}, FINER, {}], None, False),
    "two widths": ([{"width": 24}, {}], None, False),
    "three widths": ([{}, {"width": 24}, {"width": 8}], None, False),
    "two depths": ([blocks(5), blocks(2)], None, False),
    "two depths, three layers": ([blocks(5), blocks(2)], 3, False),
    "deep and stacked": ([blocks(5), blocks(5)], 2, True),
    "more layers than blocks": ([blocks(2), blocks(2)], 5, True),
    "other widths and depths": ([{**blocks(3), "width": 8}, {**blocks(1), "width": 24}, blocks(4)], 2, False),
    "GPT-2": ([GPT2, GPT2], None, True),
    "GPT-2, two widths": ([GPT2, {**GPT2, "width": 8}], None, False),
    "PaPaformer": ([PAPAFORMER] * 3, None, True),
    "PaPaformer, two widths": ([PAPAFORMER, {**PAPAFORMER, "width": 24}], None, False),
    "other parts": ([{}, {"block": {"attention": {"heads": 2, "window": 3}, "feed": "geglu"}}], None, False),
}
WITH_ALL_JOINS = ("three", "two, not stacked", "three widths", "two depths, three layers")
PAIRS = [
    (case, join)
    for index, case in enumerate(CASES)
    for join in (JOINS if case in WITH_ALL_JOINS else (JOINS[index % 5],))
]
"""Every case, and every join with four of them."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """The folders of a case, made once."""
    made: dict[str, list[Path]] = {}

    def of(case: str) -> list[Path]:
        if case not in made:
            home = tmp_path_factory.mktemp("paths")
            made[case] = [saved_path(home / f"path-{i}", i, **options) for i, options in enumerate(CASES[case][0])]
        return made[case]

    return of


@pytest.mark.parametrize(("case", "join"), PAIRS)
def test_a_path_that_is_passed_through_makes_what_it_made_alone(case, join, sources, tmp_path):
    _, layers, stacked = CASES[case]
    folders = sources(case)
    out = compose(folders, tmp_path / "made", join=join, layers=layers)
    for folder in folders:
        model, alone = double(out), block_outputs(double(folder))
        stage = parallel_stage(model)
        assert all((layer.stack is not None) == stacked for layer in stage.layers)
        if join == "add":
            use_paths(model, [folder.name])
        first = stage.layers[0]
        hidden = stream_for(first, folder.name, alone[0])
        span = model.model.span(hidden)
        done = 0
        for index, layer in enumerate(stage.layers):
            pass_through(layer, folder.name)
            with torch.no_grad():
                joined, _ = layer(hidden, span)
            # Add takes what a path of another width than the stream makes for a change: it comes on top of the stream.
            hidden = joined - hidden if join == "add" and layer.join.leave else joined
            done += len(blocks_in_layer(len(alone) - 1, len(stage.layers), index))
            difference = (seen(hidden, layer, folder.name) - alone[done]).abs().max().item()
            assert difference < 1e-12, f"{folder.name}, layer {index}"
        assert done == len(alone) - 1
        assert (alone[-1] - alone[0]).abs().max() > 0.1, "blocks that change nothing would prove nothing"


def stream_for(layer, name, embedded_path):
    """The stream with a path's own embedding in its part, and noise in the parts of the others."""
    whole = layer.reads_own_slice or bool(layer.enter)
    width = sum(layer.widths) if whole else layer.widths[0]
    hidden = torch.randn(*embedded_path.shape[:2], width, dtype=torch.float64)
    seen(hidden, layer, name).copy_(embedded_path)
    return hidden


@pytest.mark.parametrize("case", ["three", "two, not stacked", "three widths", "two depths", "GPT-2", "PaPaformer"])
def test_paths_that_keep_apart_make_a_model_of_their_own_hidden_states(case, sources, tmp_path):
    folders = sources(case)
    model = double(compose(folders, tmp_path / "made", join="concat", blocks=0))
    hidden = embedded(model)
    span = model.model.span(hidden)
    with torch.no_grad():
        for stage in model.model.stages:
            hidden, _ = stage(hidden, span)
    layer = parallel_stage(model).layers[0]
    assert hidden.shape[-1] == sum(layer.widths)
    for folder in folders:
        alone = block_outputs(double(folder))
        assert (hidden[..., own_part(layer, folder.name)] - alone[-1]).abs().max() < 1e-12


def test_scores_are_the_sum_of_what_each_paths_head_gives(sources, tmp_path):
    """Also with biases of the head, and where one path's head is its embedding."""
    folders = [
        saved_path(tmp_path / "a", 1, tie_embeddings=False, head={"kind": "linear", "bias": True}),
        saved_path(tmp_path / "b", 2, tie_embeddings=False, head={"kind": "linear", "bias": True}),
        saved_path(tmp_path / "c", 3, tie_embeddings=True),
    ]
    model = double(compose(folders, tmp_path / "made", join="concat", blocks=0))
    hidden = torch.randn(2, 3, 48, dtype=torch.float64)
    parts = zip(hidden.split(16, dim=-1), folders, strict=True)
    with torch.no_grad():
        wanted = sum(double(folder).head(part) for part, folder in parts)
        assert (model.head(hidden) - wanted).abs().max() < 1e-7  # biases are added up in float32
