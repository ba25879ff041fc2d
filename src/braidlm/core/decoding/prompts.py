"""Prompts for models: a file with one a line, plain or JSON, or a set that comes with Braid; and pauses after them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import parse_row, read_text
from braidlm.core.recipes import recipe_root
from braidlm.core.tokenizer import Tokenizer

DEFAULT_PROMPTS = "papaformer"
"""The 20 prompts of PaPaformer's Table 6, half of them stories and half maths."""
EXAMPLE = '{"prompt": "Once upon a time", "domain": "stories"}'


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    domain: str | None = None
    """Its subject: the name of the path that should know it, or the path's number counted from 1."""
    name: str = ""
    """Its name in tables; by default its text."""

    @property
    def label(self) -> str:
        return self.name or self.text


def read_prompts(source: str | Path) -> list[Prompt]:
    """The prompts of a file (`.jsonl`: objects with `prompt`, `domain`, `name`; else a prompt a line), or a set's."""
    path = _find(source)
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    is_json = path.suffix in (".jsonl", ".ndjson")
    prompts = [_from_json(line, f"{path}, line {number}") if is_json else Prompt(line) for number, line in lines]
    if not prompts:
        raise BraidError("there is no prompt in this file", str(path), f"Write one a line; in JSONL: {EXAMPLE}")
    return prompts


def shipped() -> Iterator[str]:
    """The names of the sets that come with Braid."""
    return (path.stem for path in sorted((recipe_root() / "prompts").glob("*.jsonl")))


def _find(source: str | Path) -> Path:
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):
        return path
    if str(source) in shipped():
        return recipe_root() / "prompts" / f"{source}.jsonl"
    near = [item.name for item in path.parent.iterdir()] if os.path.isdir(path.parent) else []
    hint = did_you_mean(path.name, [*near, *shipped()])
    todo = f"Give a file with a prompt a line, or the name of a set that comes with Braid: {', '.join(shipped())}."
    raise BraidError(f"there is no such file of prompts.{hint if 'Did you' in hint else ''}", str(source), todo)


def _from_json(line: str, where: str) -> Prompt:
    todo = f"A line is an object such as {EXAMPLE}."
    row = parse_row(line, where, todo)
    if "prompt" not in row:
        hint = did_you_mean("prompt", row)
        raise BraidError(f"there is no 'prompt'.{hint.replace('There are', 'It has')}", where, todo)
    for key in ("prompt", "domain", "name"):
        value = row.get(key)
        if key == "domain" and isinstance(value, int) and not isinstance(value, bool):
            row[key] = str(value)
        elif not isinstance(value, str | None):
            kind = "text or a path's number" if key == "domain" else "text"
            raise BraidError(f"'{key}' is to be {kind}, not {json.dumps(value)[:40]}", where)
    return Prompt(row["prompt"] or "", row.get("domain") or None, row.get("name") or "")


def pause_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """So many pause tokens, which only the tokenizer of a model that was trained with them has."""
    if count and tokenizer.pause_id is None:
        what = "this model has no pause token: it was not trained with pauses"
        raise BraidError(what, todo="Leave out the pauses, or train a model with data.pauses.")
    return [] if tokenizer.pause_id is None else [tokenizer.pause_id] * count
