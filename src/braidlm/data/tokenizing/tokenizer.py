"""One thin class over every fast tokenizer: ids, roles of special tokens, a fingerprint, saving.

Text is only text: a document that contains the literal `<|endoftext|>` is encoded as those characters, never as the
special token, so no data set can end a document, or open a role, that Braid did not write itself.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, processors

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import write_json, write_text

SpaceBefore = Literal["nothing", "texts", "lines"]
"""What a tokenizer puts a space before, so that a first word is the token that it is elsewhere: texts that have none,
or these and every further line."""
BETWEEN_LINES = ("\n", "\n ")
"""The end of a line, and what the normalizer makes of it; decoding turns it back. A line that begins with spaces gets
one more, so that none is lost."""
ROLES = ("eos", "bos", "pad", "unk", "mask")
PAUSE = "<pause>"
"""The special token that gives a model time before it answers; it is never predicted."""
KEPT_SETTINGS = ("model_max_length", "chat_template")
"""What a saved tokenizer keeps of the tokenizer_config.json it was loaded from."""


@dataclass(frozen=True)
class SpecialTokens:
    """Which special token has which role; `order` lists all of them in the order of their ids."""

    eos: str | None = "<|endoftext|>"
    bos: str | None = "<|endoftext|>"
    pad: str | None = "<|pad|>"
    unk: str | None = None
    mask: str | None = None
    order: tuple[str, ...] = ("<|endoftext|>", "<|pad|>")

    @classmethod
    def parse(cls, tokens: Mapping[str, str] | Sequence[str]) -> "SpecialTokens":
        """From {role: token} in the order of the ids, or from a list of `role=token` and of plain tokens."""
        pairs = list(tokens.items()) if isinstance(tokens, Mapping) else [_role_and_token(item) for item in tokens]
        roles: dict[str, str] = {}
        for role, token in pairs:
            if role and role not in ROLES:
                raise BraidError(f"unknown role '{role}' of a special token.{did_you_mean(role, ROLES)}")
            if role in roles:
                raise BraidError(f"two special tokens have the role '{role}': '{roles[role]}' and '{token}'")
            if not token:
                raise BraidError(f"the special token of role '{role}' is empty")
            if role:
                roles[role] = token
        tokens_of = {role: roles.get(role) for role in ROLES}
        tokens_of["bos"] = roles.get("bos", roles.get("eos"))  # unless it is named, it is the one that ends a text
        return cls(**tokens_of, order=tuple(dict.fromkeys(token for _, token in pairs)))

    def roles(self) -> dict[str, str]:
        """The roles that have a token."""
        return {role: token for role in ROLES if (token := getattr(self, role)) is not None}


def byte_characters() -> list[str]:
    """The visible character of each byte in GPT-2's byte-level alphabet."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]


class BraidTokenizer:
    """A fast tokenizer and the roles of its special tokens."""

    def __init__(self, backend: Tokenizer, special: SpecialTokens, settings: Mapping[str, Any] | None = None):
        self.backend = backend
        self.settings = dict(settings or {})
        """The tokenizer_config.json it came with, if any."""
        # A tokenizer.json may contain padding and truncation, which would cut documents silently.
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        for role, token in special.roles().items():
            if backend.token_to_id(token) is None:
                raise BraidError(f"the tokenizer has no token '{token}' for the role '{role}'")
        added = sorted(backend.get_added_tokens_decoder().items())
        self.special = replace(special, order=tuple(token.content for _, token in added if token.special))
        pause = PAUSE if PAUSE in self.special.order else None
        roles = (special.eos, special.bos, special.pad, pause)
        self.eos_id, self.bos_id, self.pad_id, self.pause_id = (
            None if token is None else backend.token_to_id(token) for token in roles
        )

    def begin_texts(self) -> None:
        """Put the token that ends a text before every text too, as it stands before every packed document."""
        if self.special.eos is None:
            raise BraidError("texts cannot begin with the token that ends one: no token has the role 'eos'")
        eos, index = self.special.eos, self.backend.token_to_id(self.special.eos)
        self.backend.post_processor = processors.TemplateProcessing(
            single=f"{eos} $A", pair=f"{eos} $A {eos} $B", special_tokens=[(eos, index)]
        )

    @property
    def beginning(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text; `encode` leaves them out."""
        encoding = self.backend.encode("a")
        return encoding.ids[: [*encoding.special_tokens_mask, 0].index(0)]

    @property
    def space_before(self) -> SpaceBefore:
        """What the tokenizer puts a space before."""
        split = self.definition.get("pre_tokenizer", {})
        if split.get("type") != "ByteLevel" or "add_prefix_space" not in split:
            return "nothing"
        line, spaced = BETWEEN_LINES
        between = {"type": "Replace", "pattern": {"String": line}, "content": spaced}
        return "lines" if self.definition.get("normalizer") == between else "texts"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, without special tokens."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the rows that an embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def token_bytes(self) -> list[bytes | None]:
        """The bytes of each token by its id; None for special tokens and for ids without a token.

        Where tokens are not written in a byte alphabet, these are their names in UTF-8, marks of word boundaries and
        all, so that no two tokens have the same.
        """
        alphabet = {character: byte for byte, character in enumerate(byte_characters())}
        found: list[bytes | None] = [None] * self.vocab_size
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            is_spelled = self.is_byte_level and all(character in alphabet for character in token)
            found[index] = bytes(alphabet[c] for c in token) if is_spelled else token.encode("utf-8")
        for index, added in self.backend.get_added_tokens_decoder().items():
            found[index] = None if added.special else added.content.encode("utf-8")
        return found

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Everything that determines the ids of a text, in one canonical form."""
        facts = json.loads(self.backend.to_str())
        model = facts["model"]
        if "merges" in model:
            # Older files write a merge as "a b", newer ones as ["a", "b"].
            model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        added = sorted(facts["added_tokens"], key=lambda token: token["id"])
        if facts["normalizer"] is None:
            added = [{**token, "normalized": None} for token in added]
        kept = {key: facts[key] for key in ("model", "normalizer", "pre_tokenizer")}
        return _without_defaults(kept | {"added_tokens": added})

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the definition: equal for tokenizers that give equal ids, whatever their files look like."""
        text = json.dumps(self.definition, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are written in GPT-2's byte alphabet, so that a token's length is its number of bytes."""
        return _has_type(self.definition.get("pre_tokenizer"), "ByteLevel")

    @cached_property
    def is_plain_bytes(self) -> bool:
        """Whether every byte is a token whose id is the byte, and there are no other tokens but special ones."""
        model = self.definition["model"]
        return (
            self.is_byte_level
            and "normalizer" not in self.definition
            and not model.get("merges")
            and model.get("vocab") == {char: byte for byte, char in enumerate(byte_characters())}
            and all(token.get("special") for token in self.definition.get("added_tokens", []))
        )

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens."""
        folder = Path(folder)
        facts = json.loads(self.backend.to_str())
        write_text(folder / "tokenizer.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config["model_input_names"] = ["input_ids", "attention_mask"]  # Transformers 4 would add token_type_ids
        if self.space_before != "nothing":
            config["add_prefix_space"] = True  # Transformers 4 takes this, and not what tokenizer.json says
        config |= {key: self.settings[key] for key in KEPT_SETTINGS if key in self.settings}
        config |= {f"{role}_token": token for role, token in self.special.roles().items()}
        write_json(folder / "tokenizer_config.json", config)

    def with_roles(self, roles: SpecialTokens) -> "BraidTokenizer":
        """A tokenizer with these roles for the tokens of this one; other roles stay."""
        merged = SpecialTokens(**{role: getattr(roles, role) or getattr(self.special, role) for role in ROLES})
        return BraidTokenizer(self.backend, merged, self.settings)

    def identity(self) -> dict[str, Any]:
        """Fingerprint, roles and how texts begin: what a packed folder has of the tokenizer that it keeps."""
        roles = {role: token for role, token in asdict(self.special).items() if role in ROLES}
        facts = {"fingerprint": self.fingerprint, "roles": roles}
        return facts | ({"beginning": self.beginning} if self.beginning else {})


def differences(a: BraidTokenizer, b: BraidTokenizer, max_lines: int = 5) -> list[str]:
    """The first few differences between two tokenizers, one per line; empty if they give equal ids."""
    if a.fingerprint == b.fingerprint:
        return []
    lines: list[str] = []
    if a.vocab_size != b.vocab_size:
        lines.append(f"the vocabularies have {a.vocab_size} and {b.vocab_size} tokens")
    for index in range(max(a.vocab_size, b.vocab_size)):
        if len(lines) >= max_lines:
            break
        one, other = a.backend.id_to_token(index), b.backend.id_to_token(index)
        if one != other:
            lines.append(f"id {index} is {_quoted(one)} in one and {_quoted(other)} in the other")
    for part in ("normalizer", "pre_tokenizer", "added_tokens"):
        if a.definition.get(part) != b.definition.get(part) and len(lines) < max_lines:
            lines.append(f"their {part.replace('_', ' ')} differs")
    if not lines:
        lines.append("they have the same tokens and merge them differently")
    return lines


def _role_and_token(item: str) -> tuple[str, str]:
    role, equals, token = item.partition("=")
    # "<a=b>" is a token with an equals sign in it, not a role.
    return (role.strip(), token) if equals and role.strip().isidentifier() else ("", item)


def _without_defaults(value: Any) -> Any:
    """Drop unset values, because other versions of the library write other defaults."""
    if isinstance(value, dict):
        kept = {key: _without_defaults(item) for key, item in value.items()}
        # False by identity: an id of 0 is set, and equal to it.
        unset = [key for key, item in kept.items() if item is None or item is False or item in ("", [])]
        return {key: item for key, item in kept.items() if key not in unset}
    if isinstance(value, list):
        return [_without_defaults(item) for item in value] if value and not isinstance(value[0], str) else value
    return value


def _has_type(part: Any, kind: str) -> bool:
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has_type(item, kind) for item in part.values())
    return isinstance(part, list) and any(_has_type(item, kind) for item in part)


def _quoted(token: str | None) -> str:
    return "missing" if token is None else f"'{token}'"
