"""How a composed model is initialised: to pass on its paths' outputs, or at random."""

import pytest
import torch

from braidlm.core.models.folders import load_model
from braidlm.edits.compose import compose
from braidlm.model.paths.joins import GumbelJoin
from tests.edits.composed_paths import (
    GPT2,
    block_outputs,
    blocks,
    double,
    embedded,
    own_part,
    parallel_stage,
    saved_path,
)


@torch.no_grad()
def stage_outputs(model):
    """What each stage reads, and what the last one makes."""
    found = [embedded(model)]
    span = model.model.span(found[0])
    for stage in model.model.stages:
        found.append(stage(found[-1], span)[0])
    return found


@pytest.mark.parametrize("more", [{}, GPT2], ids=["Llama", "GPT-2"])
def test_paths_of_different_widths_begin_as_they_were(tmp_path, more):
    """Each has a part of the stream to itself, so that nothing of it is lost."""
    options = ({**more, "width": 16}, {**more, "width": 24, **blocks(3)})
    folders = [saved_path(tmp_path / f"p{i}", i, **own) for i, own in enumerate(options)]
    model = double(compose(folders, tmp_path / "made", blocks=0))
    made = stage_outputs(model)[-1]
    for folder in folders:
        own = own_part(parallel_stage(model).layers[0], folder.name)
        assert (made[..., own] - block_outputs(double(folder))[-1]).abs().max() < 1e-12


def test_paths_of_one_width_begin_with_the_mean(tmp_path):
    folders = [saved_path(tmp_path / f"p{i}", i) for i in range(3)]
    model = double(compose(folders, tmp_path / "made", blocks=0))
    whole, narrow, _ = stage_outputs(model)
    parts = whole.split(16, dim=-1)
    assert (narrow - sum(parts) / 3).abs().max() < 1e-7  # a third is rounded
    first, last = parallel_stage(model).layers
    outputs = [torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(3)]
    assert (first.join(outputs, narrow)[0] - sum(outputs) / 3).abs().max() < 1e-6
    assert torch.equal(last.join(outputs, narrow)[0], torch.cat(outputs, dim=-1))


def test_twins_begin_as_one_of_them(tmp_path):
    """Two copies of one model, composed: their mean is either, and so is what comes out in each part."""
    folders = [saved_path(tmp_path / name, 5) for name in ("one", "other")]
    alone = block_outputs(double(folders[0]))[-1]
    for join in ("shared_linear", {"kind": "shared_linear", "residual": True}, "gumbel_v1", "gumbel_v2"):
        name = join if isinstance(join, str) else "residual"
        model = double(compose(folders, tmp_path / name, join=join, blocks=0))
        made = stage_outputs(model)[-1].split(16, dim=-1)
        if name == "residual":  # what came in counts twice, in every part alike
            assert (made[0] - made[1]).abs().max() < 1e-12
        else:
            assert max((part - alone).abs().max() for part in made) < 1e-12


def test_routers_begin_by_chance_all_the_same(tmp_path):
    folders = [saved_path(tmp_path / f"p{i}", i) for i in range(2)]
    model = load_model(compose(folders, tmp_path / "made", join="gumbel_v1"))
    routers = [module.router.weight for module in model.modules() if isinstance(module, GumbelJoin)]
    assert all(0.01 < router.std() < 0.03 for router in routers)


def test_random_begins_as_the_initialisation_says(tmp_path, capsys):
    folders = [saved_path(tmp_path / f"p{i}", i) for i in range(2)]
    made = [load_model(compose(folders, tmp_path / f"made-{seed}", start="random", seed=seed)) for seed in (1, 2)]
    one, other = ([layer.join.linear.weight for layer in parallel_stage(model).layers] for model in made)
    for a, b in zip(one, other, strict=True):
        assert not torch.isclose(a, b).any()
        assert 0.5 < a.std() / b.std() < 2
    assert "projections and joins begin at random, as the initialisation says" in capsys.readouterr().out
    compose(folders, None, join="concat", dry_run=True)
    assert "begin" not in capsys.readouterr().out.split("note:", 1)[1]
