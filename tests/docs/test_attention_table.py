"""The table of attention implementations and caches in docs/format.md says what the models do."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import random_ids, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
ROWS = dict(re.findall(r"^\| (`.+) \| ((?:supported|refused): .+) \|$", PAGE.read_text(), re.MULTILINE))
"""By names, what the page says of them."""
TABLE = {name: said for names, said in ROWS.items() for name in re.findall(r"`(\w+)`", names) if name != "generate"}
CACHES = ("dynamic", "static", "offloaded_static")
LLAMA = {"block": {"attention": {"heads": 4, "kv_heads": 2}}}


@pytest.fixture(autouse=True)
def _a_program_registers_vllm() -> Iterator[None]:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("vllm", sdpa)
    yield
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


def computed(name: str) -> torch.Tensor:
    """What a model with a cache or an implementation computes: the logits of a text, or the text that it writes."""
    model, ids = tiny_model(**LLAMA), random_ids(2, 6)
    if name in CACHES:
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": name}
        return model.generate(ids, **options)  # type: ignore[no-any-return]
    model.set_attn_implementation(name)
    return model(ids).logits  # type: ignore[no-any-return]


def test_every_name_is_in_the_table() -> None:
    known = {"sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"}
    assert {*known, *CACHES, "vllm"} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
@torch.no_grad()
def test_a_row_says_what_happens(name: str) -> None:
    verdict, _, reason = TABLE[name].partition(": ")
    if verdict == "refused":
        with pytest.raises(BraidError) as caught:
            computed(name)
        assert reason in caught.value.what
    else:
        torch.testing.assert_close(computed(name), computed("dynamic" if name in CACHES else "sdpa"))


@pytest.mark.parametrize("name", [name for name in TABLE if "flash" in name or "flex" in name])
def test_a_folder_is_not_opened_with_what_is_refused(tmp_path: Path, name: str) -> None:
    tiny_model(**LLAMA).save_pretrained(tmp_path)
    with pytest.raises(BraidError, match="is refused"):
        BraidForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
