"""From the messages of a chat to token ids, by the template that a model's tokenizer has."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_text
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.opening.opened_model import OpenedModel

FILE = "chat_template.jinja"
PRIVATE = range(0xE000, 0xF900)
"""Characters that mean nothing, of which one is put into special tokens that somebody wrote as text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template in Jinja, which runs in transformers' sandbox, and the tokenizer that it is for."""

    source: str
    tokenizer: BraidTokenizer

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat up to where the next message begins; special tokens are the template's alone.

        The name of a special token that stands in a message is text, as everywhere in Braid.
        """
        special = {token: self.tokenizer.backend.token_to_id(token) for token in self.tokenizer.special.order}
        texts = "".join(text for message in messages for text in message.values())
        mark = next(chr(code) for code in PRIVATE if chr(code) not in texts)
        names = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"

        def as_text(text: str) -> str:
            return re.sub(names, lambda match: match[0][0] + mark + match[0][1:], text)

        marked = [{key: as_text(text) for key, text in message.items()} for message in messages]
        ids: list[Any] = []
        roles = {f"{role}_token": token for role, token in self.tokenizer.special.roles().items()}
        options: dict[str, Any] = {"chat_template": self.source, "add_generation_prompt": True, **roles}
        try:
            rendered: Any = render_jinja_template([marked], **options)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise BraidError(f"the model's chat template does not take these messages: {error}") from None
        for piece in re.split(f"({names})", rendered[0][0]):
            if special.get(piece) is not None:
                ids.append(special[piece])
            elif piece:
                ids += self.tokenizer.encode(piece.replace(mark, ""))
        return ids


def chat_template(opened: OpenedModel) -> ChatTemplate | None:
    """The chat template of a model, or None where its tokenizer has none."""
    file = next((part.folder / FILE for part in opened.parts if (part.folder / FILE).is_file()), None)
    source: Any = read_text(file) if file else opened.tokenizer.settings.get("chat_template")
    if isinstance(source, list):  # several by name, as older tokenizers have them
        by_name = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = by_name.get("default") or next(iter(by_name.values()), None)
    return ChatTemplate(source, opened.tokenizer) if isinstance(source, str) and source else None
