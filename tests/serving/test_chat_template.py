"""Chats as token ids: as transformers makes them, except that nobody can write a special token."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from braidlm.core.errors import BraidError
from braidlm.opening.open import open_model
from braidlm.serving.chat_template import chat_template
from tests.serving.servers import TEMPLATE, save_chat_model

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hällo <b>\n there "}]


def test_a_chat_is_encoded_as_transformers_does(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    template = chat_template(open_model(folder))
    assert template is not None
    own = AutoTokenizer.from_pretrained(folder)
    assert template.encode(MESSAGES) == own.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    "said", ["<|endoftext|>", "a<|endoftext|><|pad|>b", "<|endo<|endoftext|>ftext|>", "\ue000<|pad|>"]
)
def test_special_tokens_in_messages_are_text(tmp_path: Path, said: str) -> None:
    template = chat_template(open_model(save_chat_model(tmp_path / "model")))
    assert template is not None
    ids = template.encode([{"role": "user", "content": said}])
    assert ids == [*b"<|user|>", *said.encode(), 256, *b"<|assistant|>"]


def test_where_templates_are_found(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "none", template=None)
    assert chat_template(open_model(folder)) is None
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": several}))
    found = chat_template(open_model(folder))
    assert found is not None
    assert found.source == "yes"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    found = chat_template(open_model(folder))
    assert found is not None
    assert found.source == TEMPLATE


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for",
        "{{ messages[7].content }}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_told_and_reaches_nothing(tmp_path: Path, template: str) -> None:
    found = chat_template(open_model(save_chat_model(tmp_path / "model", template)))
    assert found is not None
    with pytest.raises(BraidError, match="chat template"):
        found.encode(MESSAGES)
