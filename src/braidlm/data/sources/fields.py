"""From a row of fields (JSONL, parquet, Hub) to the text of a document."""

from collections.abc import Mapping
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.sources.format import Reading


def text_of(row: Mapping[str, Any], reading: Reading, where: str) -> str:
    """The chosen fields of a row, joined; a null counts as nothing."""
    parts = [_as_text(_field(row, name, where), name, reading, where) for name in reading.fields]
    return reading.joiner.join(part for part in parts if part)


def check_columns(columns: list[str], reading: Reading, where: str) -> list[str]:
    """The top-level columns that the fields need, or an error that names those that exist."""
    needed = []
    for name in reading.fields:
        top = name if name in columns else name.split(".")[0]
        if top not in columns:
            raise _unknown(name, columns, where)
        needed.append(top)
    return list(dict.fromkeys(needed))


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name in row:  # a name with a dot in it comes before a path
        return row[name]
    value: Any = row
    for step in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or step not in value:
            raise _unknown(name, value if isinstance(value, Mapping) else (), where, step)
        value = value[step]
    return value


def _unknown(name: str, known: Any, where: str, step: str | None = None) -> BraidError:
    names = [str(item) for item in known]
    listed = f" It has: {', '.join(names)}." if names else ""
    hint = did_you_mean(step or name, names) if names else ""
    return BraidError(
        f"there is no field '{name}'.{hint if 'Did you' in hint else ''}{listed}",
        where,
        "Choose with `--field NAME` (several: `--field A --field B`; inside an object: `--field A.B`).",
    )


def _as_text(value: Any, name: str, reading: Reading, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.isascii() else _without_surrogates(value, reading, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    inside = f" Its fields: {', '.join(map(str, value))}." if isinstance(value, Mapping) else ""
    kind = {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), type(value).__name__)
    raise BraidError(
        f"the field '{name}' holds {kind}, not text.{inside}", where, "Choose another with `--field NAME`."
    )


def _without_surrogates(text: str, reading: Reading, where: str) -> str:
    """JSON can spell half of a character (\\ud83d alone), which is no text and has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        if reading.errors == "strict":
            raise BraidError(
                "a text holds half a character (a lone surrogate)", where, "`--errors replace` puts � in its place."
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", reading.errors)
    return text
