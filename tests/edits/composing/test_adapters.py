"""LoRA adapters of one base as members that share its weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from braidlm.core.errors import BraidError
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.open import open_model
from tests.outcome import Outcome
from tests.tiny_decoders import save_decoder
from tests.tiny_models import random_ids
from tests.without_braid import run_without_braid

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
OPENS = """
import sys
sys.modules["peft"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.load(sys.argv[2], weights_only=True)
made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
torch.save({"logits": model(ids).logits, "made": made}, sys.argv[3])
"""


def save_lora(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """Adapters that change what their base says."""
    model: Any = decoder_by_name(base).load()
    kind = model.config.model_type
    settings = {"r": 2 + seed, "lora_alpha": 6, "target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2"}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**settings, **options}))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=1.0)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, each with two adapters; a folder of the adapters of each, one of them with the base as a member."""
    folder = tmp_path_factory.mktemp("adapters")
    for kind in TARGETS:
        base = save_decoder(kind, stories / "tokenizer", folder / kind)
        for seed, name in enumerate(("anna", "bert"), start=1):
            save_lora(base, folder / f"{name}-{kind}", seed, use_rslora=name == "bert")
    compose([folder / "anna-llama", folder / "bert-llama", folder / "llama"], folder / "both", join="posterior")
    compose([folder / "anna-gpt2", folder / "bert-gpt2"], folder / "both-gpt2", join="average")
    return folder


@torch.no_grad()
@pytest.mark.parametrize(
    ("made", "sources"), [("both", ("anna-llama", "bert-llama", "llama")), ("both-gpt2", ("anna-gpt2", "bert-gpt2"))]
)
def test_each_member_is_its_adapters_merged_into_the_base(home: Path, made: str, sources: tuple[str, ...]) -> None:
    ids, apart = random_ids(2, 9, vocab_size=300), []
    for name in sources:
        alone = open_model(home / made, paths=[name]).load()(ids).logits
        apart.append(open_model(home / name, "own").load()(ids).logits.log_softmax(-1))
        torch.testing.assert_close(alone, apart[-1], rtol=0, atol=1e-5)
    assert (apart[0] - apart[1]).abs().max() > 0.02, "adapters that change nothing would prove nothing"


def test_the_base_is_in_memory_and_in_the_folder_once(home: Path) -> None:
    model = open_model(home / "both").load()
    assert list(model.decoders) == ["base"]
    assert {member["decoder"] for member in model.members.values()} == {"base"}
    matrix = model.decoders["base"].model.layers[0].self_attn.q_proj
    assert sorted(matrix.adapters) == ["anna-llama", "bert-llama"]
    places = [p.data_ptr() for name, p in model.named_parameters() if name.endswith("layers.0.self_attn.q_proj.weight")]
    assert len(places) == 1
    own, base = (sum(p.numel() for p in one.parameters()) for one in (model, open_model(home / "llama", "own").load()))
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".adapters." in name)
    assert own == base + adapters
    with safe_open(home / "both" / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == own


def test_plain_transformers_needs_no_peft(home: Path, tmp_path: Path, braid: Callable[..., Outcome]) -> None:
    ids = random_ids(2, 9, vocab_size=300)
    torch.save(ids, tmp_path / "ids")
    run_without_braid(
        "import sys\nsys.modules['peft'] = None\n" + OPENS, home / "both", tmp_path / "ids", tmp_path / "out"
    )
    found, model = torch.load(tmp_path / "out", weights_only=True), open_model(home / "both").load()
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(ids).logits, rtol=0, atol=1e-5)
    made = [
        model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], found["made"])
    assert "anna-llama (llama, LoRA), bert-llama (llama, LoRA), llama (llama)" in braid("show", home / "both").out


@pytest.mark.parametrize("gone", ["anna-llama", "bert-llama", "llama"])
def test_a_withdrawn_adapter_was_never_there(home: Path, tmp_path: Path, gone: str) -> None:
    left = [home / name for name in ("anna-llama", "bert-llama", "llama") if name != gone]
    compose(left, tmp_path / "wanted", join="posterior")
    edit("withdraw", home / "both", tmp_path / "found", paths=(gone,))
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name


@torch.no_grad()
def test_the_last_adapter_stays_a_member_and_the_last_base_is_a_decoder(home: Path, tmp_path: Path) -> None:
    edit("withdraw", home / "both", tmp_path / "anna", paths=("bert-llama", "llama"))
    edit("withdraw", home / "both", tmp_path / "base", paths=("anna-llama", "bert-llama"))
    anna, base = open_model(tmp_path / "anna", "own"), open_model(tmp_path / "base", "own")
    assert (anna.kind, base.kind) == ("braid_members", "llama")
    ids = random_ids(2, 9, vocab_size=300)
    wanted = open_model(home / "both", paths=["anna-llama"]).load()(ids).logits
    assert torch.equal(anna.load()(ids).logits, wanted)
    assert torch.equal(base.load()(ids).logits, open_model(home / "llama", "own").load()(ids).logits)


@torch.no_grad()
def test_the_plan_says_which_members_are_adapters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compose([home / "anna-llama", home / "llama"], None, join="posterior", dry_run=True)
    said = capsys.readouterr().out
    assert "anna-llama: llama, LoRA, from anna-llama" in said
    assert "  llama: llama, " in said
    assert "parameters, from llama" in said


def test_what_is_more_than_products_is_merged(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = save_lora(home / "llama", tmp_path / "more", 3, use_dora=True)
    made = compose([home / "anna-llama", more], tmp_path / "out", join="average")
    assert made is not None
    assert "'more': its LoRA adapters are merged into its matrices" in capsys.readouterr().out
    model, ids = open_model(made).load(), random_ids(1, 7, vocab_size=300)
    assert sorted(model.decoders) == ["base", "more"]
    each = [open_model(folder, "own").load()(ids).logits.softmax(-1) for folder in (home / "anna-llama", more)]
    torch.testing.assert_close(model(ids).logits.exp(), torch.stack(each).mean(0), rtol=0, atol=1e-5)


def test_adapters_of_other_bases_are_refused(home: Path, stories: Path, tmp_path: Path) -> None:
    other = save_decoder("llama", stories / "tokenizer", tmp_path / "other", num_hidden_layers=2)
    carla = save_lora(other, tmp_path / "carla", 4)
    with pytest.raises(
        BraidError, match=r"'anna-llama' and 'carla' are adapters of other bases.*other SHA-256"
    ) as caught:
        compose([home / "anna-llama", carla], tmp_path / "out", join="average")
    assert "braid convert ADAPTER --to transformers" in str(caught.value)
    changed = shutil.copytree(home / "anna-llama", tmp_path / "changed")
    (changed / "lineage.json").write_text(json.dumps({"sources": [{"model": "llama", "sha256": "another"}]}))
    with pytest.raises(BraidError, match="'changed' was trained on other weights than its base, llama, has now"):
        compose([home / "bert-llama", changed], tmp_path / "out", join="average")
    base = shutil.copytree(home / "gpt2", tmp_path / "base")
    with pytest.raises(BraidError, match="beside adapters no other model can be called 'base'"):
        compose([home / "bert-llama", base], tmp_path / "out", join="average")
    assert not (tmp_path / "out").exists()
