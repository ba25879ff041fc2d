"""Between command-line options and Python: options from the fields of a settings dataclass, arguments for a verb."""

import argparse
import contextlib
import dataclasses
import types
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from braidlm.core.catalogue import list_options
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, Probability, Seed, Temperature
from braidlm.model.config.strict import decode, plain_type

COMMON = ("verb", "run", "quiet", "verbose", "debug", "json")
"""Arguments of the command line that the functions of the verbs do not have."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of recipes and folders, and changes to recipes: `key=value`, and `~key`, which takes a key away."""
    names = [word for word in words if not ("=" in word or word.startswith("~")) or Path(word).exists()]
    return names, [word for word in words if word not in names]


def number(hint: Any) -> Callable[[str], Any]:
    """argparse's `type` for a number with the range of a recipe key, such as `Count`; argparse names the option."""
    kind = plain_type(hint)

    def read(text: str) -> Any:
        value: Any = text  # decoding explains a text that is no number
        with contextlib.suppress(ValueError):
            value = kind(text)
        try:
            return decode(hint, value)
        except BraidError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def add_settings(
    parser: argparse.ArgumentParser, settings: type, title: str, prefix: str = "", but: Collection[str] = ()
) -> None:
    """An option for each field, `but` some: flags for true and false, choices, numbers, texts and lists of these.

    With a `prefix`, it is before the names of the options and of their arguments, and all of them may be left out.
    """
    hints = get_type_hints(settings, include_extras=True)
    add = parser.add_argument_group(title).add_argument
    for field in list_options(settings):
        name, default = field["name"], field["default"]
        if name in but:
            continue
        option = f"{prefix}{name}".replace("_", "-")
        shared: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field["about"], default)}
        if hints[name] is bool:
            flag = ("--no-" if default else "--") + option
            add(flag, dest=f"{prefix}{name}", action="store_false" if default else "store_true", **shared)
        else:
            add(f"--{option}", required=not prefix and field["required"], **shared, **_values(hints[name]))


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
    about = "show the details of a plan too: where every tensor of an edit comes from"
    add("--verbose", action="store_true", help=about, **defaults)
    add("--debug", action="store_true", help="show the traceback of an error", **defaults)
    help_text = "print the result for programs: one JSON document, messages on stderr"
    add("--json", action="store_true", help=help_text, **defaults)
    return common


def add_sampling(add: Callable[..., Any], gives: str) -> None:
    """The options of how tokens are chosen; those that are not given are left to the verb's function."""
    add = partial(add, default=argparse.SUPPRESS)
    add("--temperature", type=number(Temperature), help="0: the most probable token (default 0.8)")
    add("--top-k", type=number(Count), metavar="N", help="choose among the N most probable tokens")
    about = "choose among tokens that together have probability P"
    add("--top-p", type=number(Probability), metavar="P", help=about)
    add("--seed", type=number(Seed), help=f"the same seed gives the same {gives}")
    add("--greedy", action="store_true", help="always the most probable token")


def add_switches(add: Callable[..., Any]) -> None:
    """The options of verbs that run a model: which of its paths are used, and which modules are switched off."""
    add("--paths", nargs="+", action=_Listed, metavar="PATH", help="use only these paths of the model")
    help_text = "switch off these modules: expert_3, 'german*', 'stages.0.layers.3.feed:expert_2'"
    add("--without", nargs="+", action=_Listed, metavar="MODULE", help=help_text)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """The option of verbs whose work is several jobs."""
    help_text = "run the jobs on a Ray cluster: ray (this machine, or the cluster that it is in) or ray:HOST:PORT"
    parser.add_argument("--cluster", metavar="ray[:ADDRESS]", help=help_text)


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
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"choices": inner, "type": type(inner[0])}
    if origin in (tuple, list):
        return {"nargs": "+", "action": "extend", **_values(inner[0])}
    kind = plain_type(hint)
    if kind not in METAVARS:
        raise TypeError(f"a setting of type {hint} cannot be an option")
    return {"type": str if kind is str else number(hint), "metavar": METAVARS[kind]}


def _help(text: str, default: Any) -> str:
    """In the style of the other options: no capital but of a name, no full stop, and the default where there is one."""
    text = (text if text[1:2].isupper() else text[:1].lower() + text[1:]).rstrip(".")
    shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    has_default = default not in (None, []) and not isinstance(default, bool)
    return (f"{text} ({shown})" if has_default else text).replace("%", "%%")
