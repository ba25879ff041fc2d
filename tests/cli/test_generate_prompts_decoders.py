"""The prompt study over a base, the base with gates and the base upcycled: decoders of transformers side by side."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.inspection.generate import generate, prompt_study
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gated_folders import write_adapter_files
from braidlm.opening.gating import gates_of
from tests.tiny_models import randomised

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
VOCABULARY = bytes_tokenizer().vocab_size
PROMPTS = ["Once upon a time", "2 + 2 ="]


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """base: a Llama; gated: an adapter for it, trained a little; upcycled: a Mixtral; neox: what no bridge reads."""
    home = tmp_path_factory.mktemp("decoders")
    more: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 48}
    configs = {
        "base": LlamaConfig(**SIZES, **more, num_key_value_heads=2, bos_token_id=None, eos_token_id=256),
        "neox": GPTNeoXConfig(**SIZES, **more),
    }
    for name, config in configs.items():
        randomised(AutoModelForCausalLM.from_config(config)).save_pretrained(home / name)
        bytes_tokenizer().save(home / name)
    edit("gate", home / "base", home / "zero", kind="vector")
    opened = decoder_by_name(home / "zero")
    model: Any = opened.load()
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.weight.fill_(0.5)
    (home / "gated").mkdir()
    write_adapter_files(model, home / "gated", str(home / "base"), None, {"made_by": "test"}, "gated")
    edit("upcycle", home / "base", home / "upcycled", experts=2, top_k=1)
    return {name: home / name for name in ("base", "zero", "gated", "upcycled", "neox")}


def test_base_gated_and_upcycled_side_by_side(braid, decoders: dict[str, Path], tmp_path: Path) -> None:
    models = [decoders[name] for name in ("base", "zero", "gated", "upcycled", "neox")]
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    out = tmp_path / "study.csv"
    options = ("--greedy", "--max-tokens", 5, "--top-next", 2, "--out", out)
    shown = braid("generate", "--prompts", tmp_path / "prompts.txt", "--models", *models, *options)
    assert shown.code == 0, shown.err
    for name in ("base", "zero", "gated", "upcycled", "neox"):
        assert shown.out.count(f"  {name}:\n") == len(PROMPTS)
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    said = {(row["prompt"], row["model"]): row for row in rows}
    for prompt in PROMPTS:
        base, zero, gated, upcycled = (said[prompt, name] for name in ("base", "zero", "gated", "upcycled"))
        assert base["continuation"] == zero["continuation"] == upcycled["continuation"]
        probabilities = [float(row["probability_1"]) for row in (base, zero, upcycled)]
        assert probabilities == pytest.approx([probabilities[0]] * 3, abs=2e-6)
        assert gated["probability_1"] != base["probability_1"]


def test_a_decoder_says_what_transformers_says(decoders: dict[str, Path]) -> None:
    for name in ("gated", "neox", "upcycled"):
        said = generate(decoders[name], PROMPTS, max_tokens=6, greedy=True, top_next=3, device="cpu")
        opened = decoder_by_name(decoders[name])
        model: Any = opened.load()
        for prompt, text in zip(PROMPTS, said.texts, strict=True):
            ids = torch.tensor([opened.tokenizer.encode(prompt)])
            with torch.no_grad():
                chances = model(ids).logits[0, -1].softmax(-1).topk(3)
            assert [token.id for token in text.next] == chances.indices.tolist()
            assert [token.probability for token in text.next] == pytest.approx(chances.values.tolist(), rel=1e-4)
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 256}
            new = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
            assert text.text == opened.tokenizer.decode(new.tolist(), skip_special_tokens=True)


def test_what_only_braids_models_have(decoders: dict[str, Path]) -> None:
    for options, text in (
        ({"paths": ["a"]}, "only Braid's models and members have paths"),
        ({"without": ["a"]}, "only Braid's models have named modules"),
        ({"exit_layer": 1}, "only Braid's models have early exits"),
    ):
        with pytest.raises(BraidError, match=text):
            generate(decoders["gated"], "a", **options)
        with pytest.raises(BraidError, match=text):
            prompt_study(decoders["gated"], ["a"], **options)
    with pytest.raises(BraidError, match="has 60 tokens, and the model's limit is 48"):
        prompt_study([decoders["gated"]], ["a" * 60])
