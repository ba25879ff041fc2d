"""Parts that are switched for one request alone, and decoders of transformers behind the same engine."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.decoding.decoder import Sampling, decode_tokens
from braidlm.core.decoding.generation import TransformersDecoder
from braidlm.model.paths.switches import switch_off_modules, use_paths
from braidlm.opening.gating import gates_of
from braidlm.serving.engine import IDLE_LANES, Request, Switches
from tests.serving.engines import GREEDY, alone, engine_of, save_tiny, texts
from tests.tiny_decoders import save_decoder, save_gates
from tests.tiny_models import tiny_model

HALVES = [{"name": "b", "width": 8}, {"name": "a", "width": 8}]
PATHS: dict[str, Any] = {"stages": [{"parallel": {"paths": ["a", "b", "c"], "layers": 2, "join": "routed"}}]}
EXPERTS: dict[str, Any] = {"block": {"feed": {"experts": {"names": ["x", "y", "z"], "router": {"top_k": 1}}}}}
GATES: dict[str, Any] = {"stages": [{"block": {"layers": 3}}], "gates": {"kind": "matrix"}}
POSTERIOR: dict[str, Any] = {
    "stages": [{"parallel": {"paths": ["b", "a"], "join": "concat"}}],
    "norm": {"kind": "per_path", "paths": HALVES},
    "head": {"kind": "posterior", "paths": HALVES},
    "tie_embeddings": False,
}


def without_gates(model: Any, numbers: Sequence[int]) -> None:
    for number in numbers:
        gates_of(model)[number].is_off = True


SWITCHED: list[tuple[dict[str, Any], Switches, Any]] = [
    (PATHS, Switches(paths=("a", "c")), lambda model: use_paths(model, ["a", "c"])),
    (EXPERTS, Switches(without=("y", "stages.0.*:x")), lambda model: switch_off_modules(model, ["y", "stages.0.*:x"])),
    (GATES, Switches(gates_off=("layer 2",)), lambda model: without_gates(model, [2])),
    (POSTERIOR, Switches(members=("a",)), lambda model: model.head.use_paths(frozenset("a"))),
    (POSTERIOR, Switches(paths=("b",)), lambda model: use_paths(model, ["b"])),
]


@pytest.mark.parametrize(("architecture", "switches", "change"), SWITCHED)
def test_texts_with_and_without_switches_run_beside_each_other(
    architecture: dict[str, Any], switches: Switches, change: Any, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "m", **architecture)
    plain, changed = tiny_model(**architecture), tiny_model(**architecture)
    change(changed)
    prompts = [(1, 2, 3), (4, 5), (6,), (7, 8, 9, 10)]
    requests = [Request(p, 12, GREEDY, s, ignore_eos=True) for p in prompts for s in (Switches(), switches)]
    with engine_of(folder, rows=5) as engine:
        got = texts(engine, requests)
        assert engine.free == 5
        seen = asyncio.run(engine.call(lambda model: model(torch.tensor([[1, 2, 3]])).logits, switches))
        torch.testing.assert_close(seen, changed(torch.tensor([[1, 2, 3]])).logits.detach())
    assert got[0::2] == [alone(plain, prompt, 12) for prompt in prompts]
    assert got[1::2] == [alone(changed, prompt, 12) for prompt in prompts]
    assert got[0::2] != got[1::2]


def test_caches_that_nobody_uses_are_given_back(tmp_path: Path) -> None:
    names = [f"e{number}" for number in range(IDLE_LANES + 4)]
    folder = save_tiny(tmp_path / "m", block={"feed": {"experts": {"names": names}}})
    with engine_of(folder, rows=3) as engine:
        for name in names:
            texts(engine, [Request((1, 2), 3, GREEDY, Switches(without=(name,)))])
        asyncio.run(engine.call(lambda model: None))
        asyncio.run(engine.call(lambda model: None))
        assert len(engine._lanes) <= IDLE_LANES + 1


@pytest.fixture(scope="module")
def llama(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder("llama", stories / "tokenizer", tmp_path_factory.mktemp("decoders") / "llama")


def decoded(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    steps = decode_tokens(TransformersDecoder(model, 32), [list(prompt)], tokens, GREEDY)
    return [int(chosen[0] or 0) for chosen, _ in steps]


def test_a_gated_decoder_of_transformers_runs_in_rows(llama: Path, tmp_path: Path) -> None:
    folder = save_gates(llama, tmp_path / "gates", moved=2.0)
    prompts = [(1, 2, 3), (4, 5), (6,), (7, 8, 9, 10)]
    for_all = [Switches(), Switches(gates_off=("layer 2", "layer 3"))]
    with engine_of(folder, rows=3) as engine:
        assert engine.facts["batching"] == "texts join and leave at every step"
        got = texts(engine, [Request(p, 12, GREEDY, s, ignore_eos=True) for s in for_all for p in prompts])
        model = engine.opened.load()
        assert got[:4] == [decoded(model, prompt, 12) for prompt in prompts]
        without_gates(model, [2, 3])
        assert got[4:] == [decoded(model, prompt, 12) for prompt in prompts]
        assert got[:4] != got[4:]


def test_a_decoder_with_a_window_runs_one_text_after_another(stories: Path, tmp_path: Path) -> None:
    folder = save_decoder("phi3", stories / "tokenizer", tmp_path / "window", sliding_window=6)
    with engine_of(folder, rows=3) as engine:
        assert engine.facts["rows"] == engine.free == 1
        assert engine.facts["batching"] == "one text after another: its attention sees a window of the text, or is none"
        prompts = [(1, 2, 3), (4, 5), (6,)]
        got = texts(engine, [Request(prompt, 9, GREEDY, ignore_eos=True) for prompt in prompts])
        assert got == [decoded(engine.opened.load(), prompt, 9) for prompt in prompts]
        (seeded,) = texts(engine, [Request((1,), 9, Sampling(1.0, seed=3), ignore_eos=True)])
        assert len(seeded) == 9
