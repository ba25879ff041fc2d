"""The layout: which block stands in which layer, what full-width blocks are, and what leads from width to width."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import load_config, load_model
from braidlm.edits.account import Derived
from braidlm.edits.compose import compose, composed_architecture, full_width_block, lay_out
from braidlm.edits.composing.composition import account_for
from braidlm.edits.composing.path_models import PathModel
from braidlm.model.config.braid_config import BraidConfig, read_architecture
from braidlm.model.config.registry import Choice
from braidlm.model.paths.joins import JoinConfig
from braidlm.model.paths.parallel import blocks_in_layer
from tests.edits.composed_paths import ATTENTION_EXPERTS, EXPERTS, GPT2, PAPAFORMER, blocks, saved_path
from tests.tiny_models import tiny_config


@given(depth=st.integers(1, 40), layers=st.integers(1, 40))
def test_every_block_stands_in_one_layer_and_in_order(depth, layers):
    placed = [block for layer in range(layers) for block in blocks_in_layer(depth, layers, layer)]
    assert placed == list(range(depth))
    sizes = [len(blocks_in_layer(depth, layers, layer)) for layer in range(layers)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=25)
@given(depths=st.lists(st.integers(1, 5), min_size=2, max_size=3), layers=st.one_of(st.none(), st.integers(1, 7)))
def test_the_account_uses_every_block_of_every_path_once_and_in_order(depths, layers):
    paths = [shape(f"path-{i}", **blocks(depth)) for i, depth in enumerate(depths)]
    architecture, _ = lay_out(paths, Choice("concat", JoinConfig()), layers, blocks=0)
    (stage,) = architecture["stages"]
    assert stage["parallel"]["layers"] == (min(depths) if layers is None else layers)
    account = account_for(skeleton(BraidConfig(architecture, vocab_size=37)), paths)
    for path in paths:
        used = [
            part.tensor
            for origin in account.origins.values()
            if isinstance(origin, Derived)
            for part in origin.parts
            if part.source == path.name and part.tensor.endswith("attention.qkv.weight")
        ]
        assert used == [f"{block}.attention.qkv.weight" for block in path.plain.layers]


def shape(name, **architecture):
    return PathModel(name, ModelInfo(tiny_config(**architecture)))


@pytest.mark.parametrize(
    ("options", "stacked"),
    [
        ([{}, {}], True),
        ([{"dropout": {"experts": 0.1}}, {}], True),
        ([{}, EXPERTS], "with_experts"),
        ([ATTENTION_EXPERTS, ATTENTION_EXPERTS], "with_experts"),
    ],
)
@pytest.mark.parametrize("join", ["average", "shared_linear"])
def test_only_paths_with_experts_ask_for_stacks_of_experts(options, stacked, join):
    members = [tiny_config(**own).decoded for own in options]
    stages = composed_architecture(members, ["a", "b"], join).stages
    assert [stage.options.stacked for stage in stages if stage.kind == "parallel"] == [stacked]


def test_the_papers_layout(tmp_path):
    folders = [saved_path(tmp_path / name, i, **PAPAFORMER, **blocks(3)) for i, name in enumerate(("stories", "maths"))]
    config = load_config(compose(folders, tmp_path / "both"))
    before, project, parallel, after = config.decoded.stages
    assert [before.kind, project.kind, parallel.kind, after.kind] == ["block", "project", "parallel", "block"]
    assert before == after
    assert (before.options.layers, before.options.attention.options.heads) == (1, 8)
    assert (before.options.attention.options.head_dim, before.options.feed.options.hidden) == (4, 80)
    assert before.options.feed.options.learned_beta
    assert not before.options.attention.options.out_projection
    assert project.options.to == 16
    assert (parallel.options.layers, parallel.options.to, parallel.options.join.kind) == (3, 32, "shared_linear")
    assert [(path.name, path.width, path.depth) for path in parallel.options.paths] == [
        ("stories", 16, 3),
        ("maths", 16, 3),
    ]
    assert config.decoded.positions.options.pairs == "interleaved"
    assert (config.hidden_size, config.tie_word_embeddings) == (32, False)
    joins = [layer.join.linear.weight.shape for layer in load_model(tmp_path / "both").model.stages[2].layers]
    assert joins == [(16, 32), (16, 32), (32, 32)]


@pytest.mark.parametrize(
    ("options", "join", "blocks_around", "stages"),
    [
        ([{}, {}], "shared_linear", 2, ["block x 2", "project to 16", "parallel to 32", "block x 2"]),
        ([{}, {}], "shared_linear", 0, ["project to 16", "parallel to 32"]),
        ([{}, {}], "concat", 1, ["block x 1", "parallel", "block x 1"]),
        ([{}, {"width": 24}], "gumbel_v1", 1, ["block x 1", "parallel", "block x 1"]),
        ([{}, {}], {"kind": "gumbel_v2", "residual": True}, 0, ["project to 16", "parallel", "project to 32"]),
        ([{}, {"width": 24}], {"kind": "shared_linear", "residual": True}, 0, ["parallel"]),
        ([{}, {}], {"kind": "concat", "residual": True}, 0, ["parallel"]),
        ([{}, {}], {"kind": "add", "norm": "rms"}, 0, ["project to 16", "parallel to 32"]),
    ],
    ids=str,
)
def test_what_leads_from_width_to_width(tmp_path, options, join, blocks_around, stages):
    folders = [saved_path(tmp_path / f"p{i}", i, **own) for i, own in enumerate(options)]
    out = compose(folders, tmp_path / "made", join=join, blocks=blocks_around)
    found = []
    for stage in load_config(out).decoded.stages:
        to = getattr(stage.options, "to", None)
        found.append(
            stage.kind + (f" to {to}" if to else f" x {stage.options.layers}" if stage.kind == "block" else "")
        )
    assert found == stages
    assert load_model(out)(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("attention", "own_width", "width", "heads"),
    [
        ({"heads": 4}, 16, 32, (8, 8, 4)),
        ({"heads": 4, "kv_heads": 2}, 16, 32, (8, 4, 4)),
        ({"heads": 4, "kv_heads": 1}, 16, 48, (12, 3, 4)),
        ({"heads": 4, "head_dim": 8}, 16, 32, (8, 8, 8)),  # heads wider than the stream stay so
        ({"heads": 4}, 24, 56, (9, 9, 6)),  # 9.3 heads of 6
        ({"heads": 4, "kv_heads": 2}, 24, 56, (9, 3, 6)),  # 4.67 is nearer to 3 than to 9
        (
            {"heads": 4, "out_projection": False},
            24,
            40,
            (5, 5, 8),
        ),  # 6 does not divide 40; 8 is nearer than 4 or as near
        ({"heads": 1, "out_projection": False}, 6, 14, (7, 7, 2)),  # rotary positions turn pairs, so not 7
    ],
    ids=str,
)
def test_full_width_heads_keep_their_size_where_that_is_possible(attention, own_width, width, heads):
    path = shape("p", width=own_width, block={"attention": attention})
    options, _ = full_width_block(path, width)
    made = options["attention"]
    assert (made["heads"], made["kv_heads"], made["head_dim"]) == heads
    assert options["feed"]["hidden"] == round(24 * width / own_width)
    architecture = {"width": width, "stages": [{"block": options}]}
    skeleton(BraidConfig(architecture, vocab_size=5))  # it can be built


def test_the_plan_says_what_was_not_clear_from_the_models(tmp_path, capsys):
    folders = [
        saved_path(tmp_path / "a", 1, context=32),
        saved_path(tmp_path / "b", 2, width=24, context=20, tie_embeddings=False, **blocks(3)),
    ]
    assert compose(folders, None, dry_run=True) is None
    said = capsys.readouterr().out
    for text in (
        "Compose a + b: width 40, join shared_linear",
        "stages: block x 1, parallel x 2, block x 1",
        "full-width blocks are like those of 'b': 7 heads of 6, which is nearest to 6.7, inner size 40",
        "each reads the stream of 40 through a projection of its own",
        "the shorter context counts, 20 tokens: 'a' has 32, 'b' has 20",
        "the head is not tied, since not every path's is; of a it takes the embedding",
        "the paths are computed one by one, which is slower: they differ in width, depth, attention",
    ):
        assert text in said, text
    assert [line.split() for line in said.splitlines() if line.startswith("  layer ")] == [
        ["layer", "0", "0", "0"],
        ["layer", "1", "1", "1,", "2"],
    ]


def test_learned_positions_of_different_lengths(tmp_path):
    folders = [saved_path(tmp_path / name, i, **GPT2, context=n) for i, (name, n) in enumerate((("a", 20), ("b", 12)))]
    model = load_model(compose(folders, tmp_path / "made", join="concat", blocks=0))
    parts = [load_model(folder).model.positions.weight[:12] for folder in folders]
    assert torch.equal(model.model.positions.weight, torch.cat(parts, dim=1))
    assert (model.config.max_position_embeddings, model.config.tie_word_embeddings) == (12, True)
    lineage = json.loads((tmp_path / "made/lineage.json").read_text())
    assert lineage["tensors"]["model.positions.weight"]["how"] == "side by side, the first 12 rows"


def test_the_architecture_can_be_had_before_there_are_weights(tmp_path):
    folders = [saved_path(tmp_path / name, i) for i, name in enumerate("ab")]
    made = compose(folders, tmp_path / "made", join="gumbel_v1", layers=3, blocks=2)
    path = read_architecture(load_config(folders[0]).architecture)
    assert composed_architecture([path, path], ["a", "b"], "gumbel_v1", 3, 2) == load_config(made).decoded
