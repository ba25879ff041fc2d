"""Between command-line options and Python: options from the fields of a settings dataclass, arguments for a verb."""

import argparse
import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from braidlm.cli.numbers import number
from braidlm.model.config.strict import plain_type

T = TypeVar("T")
COMMON = ("verb", "run", "quiet", "debug", "json")
"""Arguments of the command line that the functions of the verbs do not have."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_settings(parser: argparse.ArgumentParser, settings: type, title: str) -> None:
    """An option for each field: flags for true and false, choices, numbers, texts and lists of these."""
    from braidlm.core.attribute_docs import attribute_docs

    docs, hints = attribute_docs(settings), get_type_hints(settings, include_extras=True)
    add = parser.add_argument_group(title).add_argument
    for field in dataclasses.fields(settings):
        default = _default(field)
        help_text = _help(docs.get(field.name, ""), default)
        name = field.name.replace("_", "-")
        if hints[field.name] is bool:
            action = "store_false" if default else "store_true"
            option = f"--no-{name}" if default else f"--{name}"
            add(option, dest=field.name, action=action, default=argparse.SUPPRESS, help=help_text)
        else:
            add(f"--{name}", default=argparse.SUPPRESS, help=help_text, **_values(hints[field.name]))


def settings_from(args: argparse.Namespace, settings: type[T]) -> T:
    """The settings with the options of the command line."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type]
    options = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


def common_options(**defaults: Any) -> argparse.ArgumentParser:
    """The options of every verb; a kind of a verb has them too, without defaults that would hide what stood before."""
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--quiet", action="store_true", help="show results and errors only", **defaults)
    add("--debug", action="store_true", help="show the traceback of an error", **defaults)
    help_text = "print the result for programs: one JSON document, messages on stderr"
    add("--json", action="store_true", help=help_text, **defaults)
    return common


def options_of(args: argparse.Namespace, *others: str) -> dict[str, Any]:
    """The arguments of a verb, which has a function with parameters of the same names, without `others`."""
    return {name: value for name, value in vars(args).items() if name not in (*COMMON, *others)}


def _values(hint: Any) -> dict[str, Any]:
    """argparse's arguments for a field's type."""
    hint = _without_none(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"choices": inner, "type": type(inner[0])}
    if origin in (tuple, list):
        return {"nargs": "+", "action": "extend", **_values(inner[0])}
    kind = plain_type(hint)
    if kind not in METAVARS:
        raise TypeError(f"a setting of type {hint} cannot be an option")
    return {"type": str if kind is str else number(hint), "metavar": METAVARS[kind]}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _help(text: str, default: Any) -> str:
    """In the style of the other options: no capital, no full stop, and the default where there is one."""
    text = text[:1].lower() + text[1:].rstrip(".")
    shown = " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)
    has_default = default is not None and not isinstance(default, bool) and default != ()
    return (f"{text} ({shown})" if has_default else text).replace("%", "%%")
