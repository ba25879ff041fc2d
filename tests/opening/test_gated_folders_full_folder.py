"""Folders of decoders with gates: plain transformers opens them without braidlm, and nothing loses the gates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gated_folders import CODE, register_ours, write_decoder
from braidlm.opening.gating import attach, gates_of
from tests.opening.random_decoders import CONFIGS, open_gates, tiny_decoder, token_ids
from tests.without_braid import run_without_braid

KINDS: list[Any] = ["vector", "scalar", "matrix", {"kind": "matrix", "rank": 3, "bias": True}]


def gated_decoder(name: str, kind: Any) -> PreTrainedModel:
    model = tiny_decoder(name)
    attach(model, decode(GatesConfig, {"kind": kind, "layers": [2, 4]}))
    open_gates(gates_of(model))
    return model


ALONE = """
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[2], weights_only=True)
for folder in Path(sys.argv[1]).iterdir():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
    torch.save({"logits": model(ids).logits, "made": made}, folder / "computed")
    model.save_pretrained(folder / "again")
    again = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
    assert torch.equal(again(ids).logits, model(ids).logits)
"""


def test_folders_of_all_architectures_open_without_braidlm(tmp_path: Path) -> None:
    """One test, since all folders are opened in one process."""
    models = {name: gated_decoder(name, KINDS[number % len(KINDS)]) for number, name in enumerate(CONFIGS)}
    for name, model in models.items():
        (tmp_path / "folders" / name).mkdir(parents=True)
        write_decoder(model, tmp_path / "folders" / name)
    ids = token_ids(2, 7)
    torch.save(ids, tmp_path / "ids")
    run_without_braid(ALONE, tmp_path / "folders", tmp_path / "ids")
    for name, model in models.items():
        computed = torch.load(tmp_path / "folders" / name / "computed", weights_only=True)
        torch.testing.assert_close(computed["logits"], model(ids).logits, rtol=0, atol=1e-6)
        made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert torch.equal(computed["made"], made), name


@pytest.mark.parametrize("name", CONFIGS)
def test_braid_opens_them_by_its_own_code(name: str, tmp_path: Path) -> None:
    model, ids = gated_decoder(name, "matrix"), token_ids(2, 7)
    write_decoder(model, tmp_path)
    (tmp_path / CODE).unlink()
    register_ours(tmp_path)
    register_ours(tmp_path)  # a second time it is known
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(opened(ids).logits, model(ids).logits)
    assert list(gates_of(opened)) == [2, 4]
    write_decoder(opened, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_decoder_without_gates_is_saved_as_it_is(tmp_path: Path) -> None:
    write_decoder(tiny_decoder("llama"), tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
    assert not (tmp_path / CODE).exists()


def test_a_decoder_of_another_folder_is_refused(tmp_path: Path) -> None:
    model = gated_decoder("llama", "vector")
    model.config.model_type = "someones"
    with pytest.raises(BraidError, match="transformers itself has no decoder 'someones'"):
        write_decoder(model, tmp_path)
    assert not list(tmp_path.iterdir())
