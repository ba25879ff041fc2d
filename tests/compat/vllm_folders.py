"""Model folders served by vLLM on the CPU, in an environment of its own: `make vllm`.

pytest collects this file only when it is named, since the environment takes minutes to install.
"""

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.folders import read_tokenizer, save_model
from braidlm.data.tokenizing.build import train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert
from tests.compat.check_folder import TEXTS
from tests.compat.serve_folders import NEW_TOKENS
from tests.compat.tiny_folders import TINY
from tests.tiny_models import randomised
from tests.without_braid import WITHOUT_BRAID

PYTHON = Path(__file__).parents[2] / ".venvs" / "vllm" / "bin" / "python"
SCRIPT = Path(__file__).with_name("serve_folders.py")
ALONE = WITHOUT_BRAID + f"import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
WIDTH, CONTEXT = 64, 128
NARROW = {"attention": {"heads": 2}}
ARCHITECTURES: dict[str, Any] = {
    "llama": {"block": {"attention": {"heads": 4, "kv_heads": 2}}, "stages": [{"block": {"layers": 2}}]},
    "gpt2": TINY["gpt2"].architecture,
    "paths": {
        "block": {"attention": {"heads": 4}},
        "stages": [
            "block",
            {"project": {"to": 32}},
            {"parallel": {"layers": 2, "paths": ["stories", "maths"], **NARROW, "join": "shared_linear", "to": 64}},
            "block",
        ],
        "tie_embeddings": False,
    },
    "moep": TINY["moep"].architecture,
    "experts": {
        "block": {"attention": {"heads": 2, "experts": {"names": 4}}, "feed": {"kind": "mlp", "experts": {"names": 6}}},
        "stages": [{"block": {"layers": 2}}],
    },
    "mixture-of-heads": {
        "block": {
            "attention": {"heads": 2, "head_dim": 32, "experts": {"names": 4, "keys": "shared"}},
            "feed": {"kind": "mlp", "experts": {"names": 6}},
        },
        "stages": [{"block": {"layers": 2}}],
    },
    "windows": {
        "block": {"attention": {"heads": 4}},
        "stages": [{"block": {"attention": {"window": 9}}}, "block", {"block": {"attention": {"window": 9}}}],
    },
    "shared": TINY["shared"].architecture,
    "stick-breaking": TINY["modules"].architecture,
    "quantised": {
        "block": {"attention": {"heads": 2}},
        "stages": [{"block": {"layers": 2}}],
        "compression": [{"int8": {"modules": ["stages.*"]}}],
    },
}
REFUSED = ("stick-breaking", "quantised")
CONVERTED = "converted"
"""The quantised model as a Llama folder, as its refusal advises."""
DIVIDED = ("llama", "gpt2", "paths", "moep", "experts")
"""Also served by two processes."""


@dataclass
class Folders:
    """The folders, and what Braid continues the prompts with."""

    root: Path
    tokens: dict[str, list[list[int]]]


def continuations(model: BraidForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Those of `braid generate`."""
    decoder = Decoder(model, len(prompts), max(map(len, prompts)) + NEW_TOKENS)
    steps = [tokens for tokens, _ in decode_tokens(decoder, prompts, NEW_TOKENS, Sampling(0.0))]
    return [list(text) for text in zip(*steps, strict=True)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Random weights, and 50 prompts of 1 to 60 tokens."""
    saved = Folders(tmp_path_factory.mktemp("vllm") / "folders", {})
    saved.root.mkdir()
    special = SpecialTokens()
    tokenizer = BraidTokenizer(train_bpe(TEXTS * 2, 300, special.order), special)
    draw = random.Random(0)
    prompts = [draw.choices(range(10, 290), k=draw.randint(1, 60)) for _ in range(50)]
    (saved.root / "prompts.json").write_text(json.dumps(prompts))
    for name, architecture in ARCHITECTURES.items():
        if isinstance(architecture, dict):
            architecture = {"width": WIDTH, "context": CONTEXT, **architecture}
        model = randomised(BraidForCausalLM(BraidConfig(architecture, tokenizer.vocab_size))).eval()
        read_tokenizer(model, tokenizer)
        save_model(model, saved.root / name, tokenizer, {"made_by": "a test"})
        saved.tokens[name] = continuations(model, prompts)
    convert(saved.root / "quantised", saved.root / CONVERTED, to="llama")
    saved.tokens[CONVERTED] = saved.tokens["quantised"]
    return saved


def answers(folders: Folders, names: tuple[str, ...], processes: int) -> dict[str, Any]:
    """What vLLM makes of the folders of these names."""
    root, out = folders.root.parent / f"served-{processes}", folders.root.parent / f"answers-{processes}"
    for made in (root, out):
        made.mkdir()
    for name in (*names, "prompts.json"):
        (root / name).symlink_to(folders.root / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_MODULES_CACHE": str(out / "cached_code"), "HF_HOME": str(out / "hub"), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CACHE_ROOT": str(out / "vllm")}
    command = [PYTHON, "-I", "-c", ALONE, root, out, str(processes)]
    done = subprocess.run(
        command, cwd=out, env=environment, capture_output=True, text=True, timeout=850, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    assert not any(answer["imported"] for answer in found.values())
    return found


@pytest.fixture(scope="module")
def by_one(folders: Folders) -> dict[str, Any]:
    return answers(folders, (*ARCHITECTURES, CONVERTED), 1)


@pytest.fixture(scope="module")
def by_two(folders: Folders) -> dict[str, Any]:
    return answers(folders, DIVIDED, 2)


@pytest.mark.parametrize("name", [*(name for name in ARCHITECTURES if name not in REFUSED), CONVERTED])
def test_it_continues_prompts_as_braid_generate_does(name: str, folders: Folders, by_one: dict[str, Any]) -> None:
    assert by_one[name].get("tokens") == folders.tokens[name], by_one[name].get("error")


@pytest.mark.parametrize("name", DIVIDED)
def test_so_do_two_processes_that_divide_the_model(name: str, folders: Folders, by_two: dict[str, Any]) -> None:
    assert by_two[name].get("tokens") == folders.tokens[name], by_two[name].get("error")


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_serve_says_so(name: str, by_one: dict[str, Any]) -> None:
    assert "cannot serve this model" in by_one[name]["error"]
    assert "Serve it with `braid serve`" in by_one[name]["error"]
