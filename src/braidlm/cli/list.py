"""`braid list`: the recipes, parts and data that exist here."""

import argparse
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

HELP = "list what exists: recipes, parts, data"

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--json", action="store_true", help="print facts for programs")


def run(args: argparse.Namespace) -> None:
    from braidlm.core.console import show
    from braidlm.core.errors import BraidError, did_you_mean

    if args.what not in WHAT:
        raise BraidError(f"there is no list of '{args.what}'.{did_you_mean(args.what, WHAT)}")
    collect, display = WHAT[args.what]
    rows = collect()
    if args.json:
        show(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        display(rows)


def _recipes() -> list[Row]:
    from braidlm.core.recipes import list_recipes

    return [{"name": name, "about": about} for name, about in list_recipes()]


def _show_recipes(rows: list[Row]) -> None:
    from braidlm.core.console import table

    table(("recipe", ""), [(row["name"], row["about"]) for row in rows])


def _data() -> list[Row]:
    from braidlm.data.corpora import CORPORA
    from braidlm.data.sources import FORMATS

    corpora = [
        {"kind": "corpus", "name": name, "about": _home_doc(make), "files": []} for name, make in CORPORA.items()
    ]
    formats = [
        {"kind": "source", "name": name, "about": _home_doc(FORMATS[name]), "files": list(FORMATS[name].extensions)}
        for name in FORMATS
        if name != "builtin"  # the corpora above
    ]
    return corpora + formats


def _show_data(rows: list[Row]) -> None:
    from braidlm.core.console import show, table
    from braidlm.data.sources.hub import PREFIX
    from braidlm.data.sources.streams import COMPRESSIONS

    table(("", "name", "files", ""), [(r["kind"], r["name"], " ".join(r["files"]), r["about"]) for r in rows])
    show(
        f"\nA source is a corpus, a file (also with {', '.join(COMPRESSIONS)}), a folder or glob of files, or "
        f"{PREFIX}NAME for a Hub data set."
    )


def _parts() -> list[Row]:
    from braidlm.core.catalogue import list_parts

    return list_parts()


def _show_parts(rows: list[Row]) -> None:
    from braidlm.core.console import show, table

    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines: list[tuple[str, str, str, str]] = []
        for part in (row for row in rows if row["kind"] == kind):
            lines.append((part["name"], "", "", part["about"]))
            lines += [("", o["name"], _written(o), o["about"]) for o in part["options"]]
        table((kind, "option", "default", ""), lines)
        show("")


def _written(option: Row) -> str:
    """A default as YAML would have it."""
    default = option["default"]
    if option["required"]:
        return "(needed)"
    if isinstance(default, dict):
        return "{" + ", ".join(f"{key}: {value}" for key, value in default.items()) + "}"
    return default if isinstance(default, str) else json.dumps(default)


def _home_doc(thing: Any) -> str:
    """The first line of the file that defines something: files say what they are for."""
    return (import_module(thing.__module__).__doc__ or "").strip().split("\n")[0]


WHAT: dict[str, tuple[Callable[[], list[Row]], Callable[[list[Row]], None]]] = {
    "recipes": (_recipes, _show_recipes),
    "parts": (_parts, _show_parts),
    "data": (_data, _show_data),
}
"""What can be listed: where the rows come from and how they are shown; `--json` prints the rows."""
