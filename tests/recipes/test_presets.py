"""Model presets: each has exactly the parameters its paper's table means, counted a second time by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.presets import config_from
from braidlm.core.recipes import compose_recipe, list_recipes


def gpt2(vocab: int, positions: int, width: int, layers: int) -> int:
    attention = 4 * width * width + 4 * width
    feed = 8 * width * width + 5 * width
    norms = 4 * width
    return vocab * width + positions * width + layers * (attention + feed + norms) + 2 * width


def llama(vocab: int, width: int, layers: int, hidden: int, tied: bool = True) -> int:
    block = 4 * width * width + 3 * width * hidden + 2 * width
    return (1 if tied else 2) * vocab * width + layers * block + width


def papaformer(vocab: int, width: int, layers: int, hidden: int) -> int:
    """No output projection, a Swish steepness per channel, untied."""
    block = 3 * width * width + 3 * width * hidden + hidden + 2 * width
    return 2 * vocab * width + layers * block + width


def moep(feed_weights: int, expert_size: Callable[[int, int], int]) -> int:
    """Width 384 outside and 192 inside; `feed_weights` matrices of width x 4 width in a feed-forward part."""
    wide, narrow, layers, paths, experts = 384, 192, 10, 4, 4

    def block(width: int) -> int:
        attention, norms = 4 * width * width + 4 * width, 4 * width
        feed = feed_weights * width * 4 * width + (feed_weights - 1) * 4 * width + width
        return attention + norms + feed

    def router(width: int) -> int:
        return experts * width + experts

    embeddings = (16_384 + 512) * wide
    parallel = layers * (paths * block(narrow) + router(narrow))
    shrink, grow = expert_size(wide, narrow), expert_size(narrow, wide)
    projections = experts * (shrink + grow) + router(wide) + router(narrow)
    return embeddings + 2 * block(wide) + parallel + projections + 2 * wide


def linear_expert(width: int, to: int) -> int:
    return width * to + to


def gated_expert(width: int, to: int, hidden: int = 384) -> int:
    return 2 * (width * hidden + hidden) + hidden * to + to


def routed(experts: int, hidden: int, shared: int) -> int:
    """GPT-2 28M without learned positions, in the last half of its layers experts and a shared part as feed-forward."""
    width, layers = 384, 12
    sparse = layers // 2

    def feed(size: int) -> int:
        return 2 * width * size + size + width

    bank = experts * feed(hidden) + feed(shared) + experts * width + experts
    return gpt2(16_384, 0, width, layers) + sparse * (bank - feed(4 * width))


def modules(
    vocab: int, width: int, layers: int, attention: tuple[int, int], feed: tuple[int, int], shared: bool, tied: bool
) -> int:
    """A ModuleFormer; numbers and inner sizes of its modules, and two routers of two layers with width / 4 between."""

    def router(choices: int) -> int:
        return width * width // 4 + width // 4 + choices * width // 4

    keys_values = 2 * (width * attention[1] + attention[1]) if shared else 0
    banks = 2 * width * (attention[0] * attention[1] + feed[0] * feed[1])
    layer = banks + keys_values + router(attention[0]) + router(feed[0]) + 4 * width
    return (1 if tied else 2) * vocab * width + layers * layer + 2 * width


def byte_ends(width: int, byte_width: int = 128, hidden: int = 384, layers: int = 2, piece: int = 12) -> int:
    """A tied embedding and head of bytes; a head has a vector of its own for the end of a token."""
    blocks = layers * (4 * byte_width * byte_width + 3 * byte_width * hidden + 2 * byte_width) + byte_width
    embedding = (256 + 16) * byte_width + piece * byte_width + blocks + byte_width * width
    return embedding + (width + 1) * piece * byte_width + blocks + byte_width


PRESETS = {
    "gpt2": (124_439_808, gpt2(50_257, 1024, 768, 12)),  # 124M: the real GPT-2 small
    "llama": (123_551_232, llama(50_257, 768, 12, 2048)),  # ours: no paper's
    "llama-bytes": (87_123_072, llama(0, 768, 12, 2048) + byte_ends(768)),  # STLM's ends on our Llama
    "gpt2-28m": (27_782_400, gpt2(16_384, 512, 384, 12)),  # MoEP, Table 2: 28M
    "rotary-28m": (27_585_792, gpt2(16_384, 0, 384, 12)),  # ours: GPT-2 28M without learned positions
    "routed-28m": (59_625_408, routed(32, 248, 512)),  # ours
    "moep-28m": (28_434_480, moep(2, linear_expert)),  # MoEP, Table 2: 28M
    "moep-swiglu-38m": (37_616_688, moep(3, gated_expert)),  # MoEP, Table 2: 38M
    "papaformer-llama-256": (33_619_200, papaformer(50_278, 256, 8, 1024)),  # PaPaformer, Table 2: 32M
    "papaformer-llama-192": (23_555_200, papaformer(50_278, 192, 8, 728)),  # PaPaformer, Table 2: 22.5M
    "papaformer-path-128": (13_610_880, papaformer(50_278, 128, 3, 512)),  # PaPaformer, Table 2: 13.5M
    "molm-4b-k2": (4_142_526_464, modules(50_295, 1024, 24, (16, 1024), (32, 2048), False, False)),  # Table 1: 4B
    "molm-4b-k4": (4_142_526_464, modules(50_295, 1024, 24, (16, 1024), (32, 2048), False, False)),  # Table 1: 4B
    "molm-8b-k2": (8_182_046_720, modules(50_295, 1024, 48, (16, 1024), (32, 2048), False, False)),  # Table 1: 8B
    "modules-46m": (46_240_000, modules(16_384, 384, 8, (8, 256), (16, 256), True, True)),  # ours
    "stlm-10m": (10_040_000, llama(50_257, 160, 6, 480)),  # ours: the paper names 10M and gives no shape
    "stlm-100m": (101_404_160, llama(50_257, 640, 13, 1920)),  # ours: the paper names 100M and gives no shape
    "stlm-50m": (59_821_056, llama(50_257, 512, 10, 1536)),  # STLM, Table 2: 50M; its own Table 1 gives this
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name: str):
    expected, by_hand = PRESETS[name]
    config = config_from(f"models/{name}", vocab_size=50_257)
    assert model_cost(skeleton(config)).parameters == expected == by_hand


def test_every_preset_is_in_the_table():
    assert {name.removeprefix("models/") for name, _ in list_recipes() if name.startswith("models/")} == set(PRESETS)


def test_every_preset_says_what_it_is():
    for name, about in list_recipes():
        assert len(about) > 20, name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_inside_a_recipe_of_another_folder(name: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults:\n  - /models/{name}@model\n  - _self_\nseed: 3\n")
    assert compose_recipe(str(file)) == {"seed": 3, "model": compose_recipe(f"models/{name}")}
    assert (
        config_from(str(file), vocab_size=50_257).to_dict()
        == config_from(f"models/{name}", vocab_size=50_257).to_dict()
    )


def test_gpt2_28m_keeps_the_family_and_draws_weights_as_moep():
    architecture = config_from("models/gpt2-28m").decoded
    block = architecture.stages[0].options
    assert architecture.positions.kind == "learned"
    assert block.norm.kind == architecture.norm.kind == "layer"
    assert (block.feed.kind, block.feed.options.activation, block.feed.options.bias) == ("mlp", "gelu_new", True)
    assert block.attention.options.bias
    assert (architecture.initialisation.kind, architecture.initialisation.options.std) == ("normal", 0.02)
    assert (architecture.dropout.embedding, block.dropout.attention, block.dropout.residual) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("papaformer")])
def test_papaformer_blocks(name: str):
    architecture = config_from(f"models/{name}").decoded
    block = architecture.stages[0].options
    assert architecture.width // block.attention.options.heads == 32
    assert not block.attention.options.out_projection
    assert block.feed.options.learned_beta
    assert architecture.positions.options.pairs == "interleaved"
    assert (architecture.context, architecture.tie_embeddings, architecture.norm.options.eps) == (256, False, 1e-5)


def test_any_size_by_overrides():
    changes = ["width=64", "stages.0.block.layers=2", "block.attention.heads=4", "context=32"]
    config = config_from("models/gpt2", changes, vocab_size=100)
    assert model_cost(skeleton(config)).parameters == gpt2(100, 32, 64, 2)
    config = config_from(
        "models/llama", ["width=64", "stages=[block,{block:{layers:2}}]", "block.attention.heads=4"], 100
    )
    assert model_cost(skeleton(config)).parameters == llama(100, 64, 3, 192)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["gpt2-28m", "llama", "moep-28m", "moep-swiglu-38m", "routed-28m", "stlm-50m"])
def test_every_size_follows_from_the_width(name: str, width: int) -> None:
    full, small = (skeleton(config_from(f"models/{name}", more, 100)) for more in ([], [f"width={width}"]))
    assert model_cost(small).parameters < model_cost(full).parameters
    assert small.config.hidden_size == width
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in full.named_parameters()], "only sizes change"


def test_a_moep_of_another_width_has_the_same_proportions() -> None:
    shapes = {
        name: tuple(p.shape) for name, p in skeleton(config_from("models/moep-28m", ["width=64"])).named_parameters()
    }
    assert shapes["model.stages.2.layers.0.stack.0.attention.qkv.weight"] == (4, 32, 3 * 32)
    assert shapes["model.stages.0.layers.0.feed.up.weight"] == (4 * 64, 64)


def test_a_size_of_the_width_outside_a_model(tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text("seed: ${of_width:1/2}\n")
    with pytest.raises(BraidError, match="stands in a model, which has a `width`"):
        compose_recipe(str(tmp_path / "lost.yaml"))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["widht=3"], "models/gpt2-28m: unknown key 'widht'. Did you mean 'width'?"),
        (["width=wide"], "models/gpt2-28m: width: expected a whole number from 1 to 100000, got 'wide'"),
        (["block.attention.haeds=3"], "stages[0].block.attention: unknown key 'haeds'. Did you mean 'heads'?"),
        (["vocab_size=0"], "vocab_size: expected a whole number from 1 to 10000000, got 0"),
        (["vocab_size=many", "context=0"], "10000000, got 'many'\ncontext: expected a whole number from 1 to"),
        (["model.width=3"], "a model preset has its keys at the top, not under 'model'"),
    ],
)
def test_wrong_overrides(overrides: list[str], text: str):
    with pytest.raises(BraidError) as error:
        config_from("models/gpt2-28m", overrides)
    assert text in str(error.value)


def test_a_vocabulary_that_nobody_gives(tmp_path: Path):
    with pytest.raises(BraidError, match="takes it from the tokenizer\nGive vocab_size=N"):
        config_from("models/gpt2")
    (tmp_path / "empty.yaml").write_text("seed: 1\n")
    with pytest.raises(BraidError, match="describes no model"):
        config_from(str(tmp_path / "empty.yaml"))
