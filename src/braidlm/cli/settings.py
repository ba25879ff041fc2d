"""Between command-line options and Python: options from the fields of a settings dataclass, arguments for a verb."""

import argparse
import dataclasses
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from braidlm.cli.numbers import number
from braidlm.model.config.strict import plain_type

T = TypeVar("T")
COMMON = ("verb", "run", "quiet", "debug", "json")
"""Arguments of the command line that the functions of the verbs do not have."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of recipes and folders, and changes to recipes: `key=value`, and `~key`, which takes a key away."""
    names = [word for word in words if not ("=" in word or word.startswith("~")) or Path(word).exists()]
    return names, [word for word in words if word not in names]


def add_settings(parser: argparse.ArgumentParser, settings: type, title: str, prefix: str = "") -> None:
    """An option for each field: flags for true and false, choices, numbers, texts and lists of these.

    With a `prefix`, it is before the names of the options and of their arguments, and all of them may be left out.
    """
    from braidlm.core.attribute_docs import attribute_docs

    docs, hints = attribute_docs(settings), get_type_hints(settings, include_extras=True)
    add = parser.add_argument_group(title).add_argument
    for field in dataclasses.fields(settings):
        default = _default(field)
        help_text = _help(docs.get(field.name, ""), default)
        dest = f"{prefix}{field.name}"
        name = dest.replace("_", "-")
        if hints[field.name] is bool:
            action = "store_false" if default else "store_true"
            option = f"--no-{name}" if default else f"--{name}"
            add(option, dest=dest, action=action, default=argparse.SUPPRESS, help=help_text)
        else:
            add(
                f"--{name}",
                default=argparse.SUPPRESS,
                required=not prefix and _is_required(field),
                help=help_text,
                **_values(hints[field.name]),
            )


def settings_from(args: argparse.Namespace, settings: type[T], prefix: str = "") -> T:
    """The settings with the options of the command line."""
    return settings(**given_settings(args, settings, prefix))


def given_settings(args: argparse.Namespace, settings: type, prefix: str = "") -> dict[str, Any]:
    """The fields for which the command line has options."""
    names = [field.name for field in dataclasses.fields(settings) if hasattr(args, f"{prefix}{field.name}")]
    options = {name: getattr(args, f"{prefix}{name}") for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def common_options(**defaults: Any) -> argparse.ArgumentParser:
    """The options of every verb; a kind of a verb has them too, without defaults that would hide what stood before."""
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--quiet", action="store_true", help="show results and errors only", **defaults)
    add("--debug", action="store_true", help="show the traceback of an error", **defaults)
    help_text = "print the result for programs: one JSON document, messages on stderr"
    add("--json", action="store_true", help=help_text, **defaults)
    return common


def add_switches(add: Callable[..., Any]) -> None:
    """The options of verbs that run a model: which of its paths are used, and which modules are switched off."""
    add("--paths", nargs="+", action=_Listed, metavar="PATH", help="use only these paths of the model")
    help_text = "switch off these modules: expert_3, 'german*', 'stages.0.layers.3.feed:expert_2'"
    add("--without", nargs="+", action=_Listed, metavar="MODULE", help=help_text)


class _Listed(argparse.Action):
    """Words with spaces or commas between them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        words = [word for value in values for word in value.split(",") if word]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *words])


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


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field) -> Any:
    """The default, None where a field must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _help(text: str, default: Any) -> str:
    """In the style of the other options: no capital, no full stop, and the default where there is one."""
    text = text[:1].lower() + text[1:].rstrip(".")
    shown = " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)
    has_default = default is not None and not isinstance(default, bool) and default != ()
    return (f"{text} ({shown})" if has_default else text).replace("%", "%%")
