"""From a row with fields (JSONL, parquet, Hub) to the text of a document."""

from collections.abc import Mapping
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.sources.format import ANSWER, QUESTION, Piece, ReadOptions


def document_of(row: Mapping[str, Any], options: ReadOptions, where: str) -> Piece:
    """The chosen fields of a row, joined; with an answer, as the template says. A null counts as nothing.

    A question without an answer, or an answer without a question, is an empty document.
    """
    parts = [_text_of(row, name, options, where) for name in options.fields]
    text = options.joiner.join(part for part in parts if part)
    if options.answer is None:
        return Piece(text, True)
    question, answer = text.strip(), _text_of(row, options.answer, options, where).strip()
    if not question or not answer:
        return Piece("", True)
    prompt = options.template.removesuffix(ANSWER).replace(QUESTION, question)
    return Piece(prompt + answer, True, len(prompt))


def check_columns(columns: list[str], options: ReadOptions, where: str) -> list[str]:
    """The top-level columns that the fields need, or an error that names those that exist."""
    needed = []
    for name in (*options.fields, *filter(None, [options.answer])):
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
        "Choose with `--field NAME` (several: `--field A --field B`; inside an object: `--field A.B`), an answer with "
        "`--answer NAME`.",
    )


def _text_of(row: Mapping[str, Any], name: str, options: ReadOptions, where: str) -> str:
    return _as_text(_field(row, name, where), name, options, where)


def _as_text(value: Any, name: str, options: ReadOptions, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.isascii() else _without_surrogates(value, options, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    inside = f" Its fields: {', '.join(map(str, value))}." if isinstance(value, Mapping) else ""
    kind = {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), type(value).__name__)
    raise BraidError(
        f"the field '{name}' holds {kind}, not text.{inside}", where, "Choose another with `--field NAME`."
    )


def _without_surrogates(text: str, options: ReadOptions, where: str) -> str:
    """Handle a lone surrogate, which JSON can contain (\\ud83d alone) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        if options.errors == "strict":
            raise BraidError(
                "a text holds half a character (a lone surrogate)", where, "`--errors replace` puts � in its place."
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", options.errors)
    return text
