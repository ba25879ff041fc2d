"""The licence of a model: its own, or that of the models it was made of."""

import re
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import parse_yaml, read_text

CARD = "README.md"
FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
"""What the Hub reads at the beginning of a card."""


def licence_of_folder(folder: Path) -> str | None:
    """The licence that the card of a model folder states, Braid's or another's; a file of weights has no card."""
    if not (folder / CARD).is_file():
        return None
    try:
        match = FRONT_MATTER.match(read_text(folder / CARD))
        licence = parse_yaml(match[1], str(folder / CARD)).get("license") if match else None
    except BraidError:  # a card is for people: one that cannot be read keeps no model from being used
        return None
    return licence if isinstance(licence, str) and licence else None


def licence_record(folder: Path) -> dict[str, str]:
    """The licence of a source, for the lineage of what is made of it."""
    licence = licence_of_folder(folder)
    return {"licence": licence} if licence else {}


def licence_of(lineage: dict[str, Any]) -> str | None:
    """The licence that a lineage states, or else the one that all models it was made of have."""
    own = lineage.get("licence")
    if isinstance(own, str) and own:
        return own
    inherited = set(source_licences(lineage).values())
    return inherited.pop() if len(inherited) == 1 else None


def source_licences(lineage: dict[str, Any]) -> dict[str, str | None]:
    """The licence of each model that this one was made of, by its name."""
    sources = lineage.get("sources")
    models = [s for s in sources if isinstance(s, dict) and "data" not in s] if isinstance(sources, list) else []
    return {
        str(next((source[key] for key in ("name", "model", "path") if source.get(key)), number)): (
            licence if isinstance(licence := source.get("licence"), str) else None
        )
        for number, source in enumerate(models, 1)
    }
