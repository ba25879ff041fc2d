"""The names that users write, read from what the program prints: verbs, options, keys, parts, edits, tasks, recipes.

    python tests/docs/reference_names.py docs/reference.md > tests/docs/reference-VERSION.txt

writes the list of a version, with which `test_reference_names.py` compares the program of today.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

from braidlm.cli.main import main

LISTS = ("recipes", "tasks", "data")


def names_of(reference: Path) -> list[str]:
    """One line for each name, with where it stands."""
    return sorted({*_of_page(reference.read_text(encoding="utf-8")), *_of_edits(), *_of_lists()})


def _of_page(text: str) -> list[str]:
    """Every heading, part and first cell of a table row, with its headings before it."""
    found, section, title, part = [], "", "", ""
    for line in text.splitlines():
        if match := re.match(r"(##|###) (.+)", line):
            name = match[2].split(": ")[0].strip("`")
            section, title, part = (name, "", "") if match[1] == "##" else (section, name, "")
        elif match := re.match(r"\*\*`(.+?)`\*\*", line):
            part = match[1]
        elif match := re.match(r"\| `([^`]+)` ", line):
            option = match[1].split()[0] if match[1].startswith("-") else match[1]
            found.append(" > ".join(filter(None, (section, title, part, option))))
            continue
        else:
            continue
        found.append(" > ".join(filter(None, (section, title, part))))
    return found


def _printed(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words])
    return out.getvalue()


def _of_edits() -> list[str]:
    kinds = re.findall(r"^    ([a-z]+)\b", _printed("edit", "--help"), re.MULTILINE)
    assert kinds
    found = []
    for kind in kinds:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", _printed("edit", kind, "--help").split("options:", 1)[1]))
        found += [f"edit > {kind}", *(f"edit > {kind} > {option}" for option in sorted(options))]
    return found


def _of_lists() -> list[str]:
    found = []
    for what in LISTS:
        listed = json.loads(_printed("list", what, "--json"))
        rows = listed if isinstance(listed, list) else list(listed)
        found += [f"list {what} > {row['name'] if isinstance(row, dict) else row}" for row in rows]
    return found


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in names_of(Path(sys.argv[1]))))
