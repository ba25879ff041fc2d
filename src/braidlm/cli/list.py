"""`braid list`: the recipes, tables of the papers, parts, data and tasks that exist here."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from braidlm.core.console import show, show_json, table
from braidlm.core.errors import BraidError, did_you_mean

HELP = "list what exists: recipes, the papers' tables, parts, data, tasks"

Row = dict[str, Any]

PAGES = "docs/papers"
"""A page for each paper: its tables, and ours beside them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", metavar="WHAT", help=", ".join(WHAT))
    about = "tasks: the folder in which their data is looked for (default BRAID_DATA or data)"
    parser.add_argument("--data", metavar="DIR", help=about)


def run(args: argparse.Namespace) -> None:
    if args.what is None:
        raise BraidError("there is nothing to list", todo=f"Say what: {', '.join(WHAT)}.")
    if args.what not in WHAT:
        raise BraidError(f"there is no list of '{args.what}'.{did_you_mean(args.what, WHAT)}")
    collect, display = WHAT[args.what]
    if args.data is not None and args.what != "tasks":
        raise BraidError(f"--data is for `braid list tasks`, not for {args.what}")
    rows = _tasks(args.data) if args.what == "tasks" else collect()
    show_json(rows)
    display(rows)


def _recipes() -> list[Row]:
    from braidlm.core.recipes import list_recipes

    return [{"name": name, "about": about} for name, about in list_recipes()]


def _papers() -> list[Row]:
    papers = [(*row["name"].split("/", 2), row["about"]) for row in _recipes() if row["name"].startswith("papers/")]
    return [
        {"paper": paper, "command": f"braid train papers/{paper}/{name}", "about": about, "page": f"{PAGES}/{paper}.md"}
        for _, paper, name, about in papers
    ]


def _show_papers(rows: list[Row]) -> None:
    for page in dict.fromkeys(row["page"] for row in rows):
        of_paper = [row for row in rows if row["page"] == page]
        table((of_paper[0]["paper"], ""), [(row["command"], row["about"]) for row in of_paper])
        show(f"The paper's numbers, ours beside them, verdicts: {page}\n")


def _data() -> list[Row]:
    from braidlm.core.catalogue import about
    from braidlm.data.corpora.builtin import CORPORA
    from braidlm.data.sources.plan import FORMATS

    corpora = [{"kind": "corpus", "name": name, "about": about(make), "files": []} for name, make in CORPORA.items()]
    formats = {name: FORMATS[name] for name in FORMATS if name != "builtin"}  # the corpora above
    return corpora + [
        {"kind": "source", "name": name, "about": about(part), "files": list(part.extensions)}
        for name, part in formats.items()
    ]


def _show_data(rows: list[Row]) -> None:
    from braidlm.data.sources.files import COMPRESSIONS
    from braidlm.data.sources.rows import HUB

    table(("", "name", "files", ""), [(r["kind"], r["name"], " ".join(r["files"]), r["about"]) for r in rows])
    show(
        f"\nA source is a corpus, a file (also with {', '.join(COMPRESSIONS)}), a folder or glob of files, or "
        f"{HUB}NAME for a Hub data set."
    )


def _parts() -> list[Row]:
    from braidlm.core.catalogue import list_parts

    return list_parts()


def _show_parts(rows: list[Row]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines: list[tuple[str, str, str, str]] = []
        for part in (row for row in rows if row["kind"] == kind):
            lines.append((part["name"], "", "", part["about"]))
            lines += [("", o["name"], _default_text(o), o["about"]) for o in part["options"]]
        table((kind, "option", "default", ""), lines)
        show("")


def _tasks(root: str | None = None) -> list[Row]:
    from braidlm.evals.task_data import data_here
    from braidlm.evals.tasks import TASKS
    from braidlm.evals.tasks.task import SUITES

    rows: list[Row] = []
    for name in TASKS:
        task, here = TASKS[name], data_here(name, root)
        about = {key: getattr(task, key) for key in ("description", "size", "licence", "metric", "fetch", "version")}
        about["fetch"] = f"{task.fetch} {task.collection}".strip()
        suites = [suite for suite, tasks in SUITES.items() if name in tasks]
        rows.append({"name": name, **about, "data": None if here is None else str(here), "suites": suites})
    return rows


def _show_tasks(rows: list[Row]) -> None:
    from braidlm.evals.tasks.task import SUITES

    table(("task", "data", ""), [(row["name"], _where(row), _task_text(row)) for row in rows])
    suites = ", ".join(f"{name} ({len(tasks)} tasks)" for name, tasks in SUITES.items())
    show(f"\nSuites are names for several tasks, as in `braid eval MODEL babylm_fast`: {suites}.")
    if missing := sum(_where(row) == "not here" for row in rows):
        show(
            f"The data of {missing} tasks is not here. `--data DIR` (or BRAID_DATA=DIR) says where data is; "
            "`braid eval MODEL TASK` says how to get what is missing."
        )


def _where(row: Row) -> str:
    from braidlm.evals.task_data import BUILT_IN

    if row["name"] == "bits_per_byte":
        return "yours"
    if row["data"] == str(BUILT_IN):
        return "built in"
    return "here" if row["data"] else "not here"


def _task_text(row: Row) -> str:
    """The description, and below it the size, the licence and the suites."""
    suites = f"; in {', '.join(row['suites'])}" if row["suites"] else ""
    return f"{row['description']}\n  {row['size']}; licence: {row['licence']}{suites}"


def _default_text(option: Row) -> str:
    default = option["default"]
    if option["required"]:
        return "(needed)"
    if isinstance(default, dict):
        return "{" + ", ".join(f"{key}: {value}" for key, value in default.items()) + "}"
    return default if isinstance(default, str) else json.dumps(default)


WHAT: dict[str, tuple[Callable[[], list[Row]], Callable[[list[Row]], None]]] = {
    "recipes": (_recipes, lambda rows: table(("recipe", ""), [(row["name"], row["about"]) for row in rows])),
    "papers": (_papers, _show_papers),
    "parts": (_parts, _show_parts),
    "data": (_data, _show_data),
    "tasks": (_tasks, _show_tasks),
}
"""What can be listed: the functions that collect and show the rows; `--json` prints the rows."""
