"""Every tiny folder in half precision on a GPU, opened as plain transformers opens it: forward, backward, generate."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.compat.tiny_folders import TINY, TinyFolders, save_tiny_folders
from tests.tiny_models import random_ids

pytestmark = pytest.mark.gpu
MAX_ERROR = 0.05
"""The mean difference of the logits, in units of their standard deviation."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TinyFolders:
    return save_tiny_folders(tmp_path_factory.mktemp("saved") / "folders")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_a_folder_computes_trains_and_generates_in_half_precision(
    name: str, dtype: torch.dtype, saved: TinyFolders
) -> None:
    folder: Path = saved.root / name
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).cuda()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    ids = random_ids(2, 24, vocab_size=model.config.vocab_size)
    with torch.no_grad():
        expected = saved.models[name](ids).logits
        got = model(ids.cuda()).logits.float().cpu()
    assert (got - expected).abs().mean() / expected.std() < MAX_ERROR
    model.train()
    loss = model(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    assert loss.isfinite()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    generated = model.eval().generate(ids.cuda(), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert generated.shape[0] == 2
    assert generated.shape[1] > 24
