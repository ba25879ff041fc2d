"""The model's files joined into one, in the order of their imports: the code that a saved folder carries.

Transformers of every version copies and opens one file; the package may have rooms. Imports of other packages come
first, each once; imports among our own files and their docstrings give way to a comment that names the file.

A part is reached by its name in the configuration alone. So the file has what `modeling_braid.py` imports, and of the
files that register parts those whose names the configuration, or the default one, contains.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from braidlm import __version__

from .config.braid_config import BraidConfig

ROOT = Path(__file__).parent
LAST = ROOT / "modeling_braid.py"
"""The file that readers of a folder look for first has the Auto classes at its end."""
WIDTH = 120
HEADER = '''"""Braid's model in one file, so that plain transformers opens this folder: see config.json, `auto_map`.

Written by braidlm {version} from its package `braidlm.model`; a comment names the file that each part comes from.
SHA-256 of the text from the first import on: {digest}
License: Apache-2.0.
"""

'''


@cache
def bundle(names: frozenset[str]) -> str:
    """The text of the file, for a configuration that contains these names."""
    sources = [source_file(path) for path in in_order(names)]
    defined: dict[str, Path] = {}
    for source in sources:
        for name in source.names:
            if name in defined:
                raise RuntimeError(
                    f"'{name}' is defined in {defined[name]} and in {source.path}: the model is one file"
                )
            defined[name] = source.path
    first, *rest = (source.body for source in sources)
    body = "\n".join([*_merged_imports(sources), first.removeprefix("\n"), *rest, ""])
    return HEADER.format(version=__version__, digest=hashlib.sha256(body.encode()).hexdigest()) + body


def names_in(value: Any) -> frozenset[str]:
    """Every text in a configuration, as a key or as a value."""
    if isinstance(value, dict):
        return frozenset(value) | names_in(list(value.values()))
    if isinstance(value, list):
        return frozenset().union(*map(names_in, value))
    return frozenset({value} if isinstance(value, str) else ())


def in_order(names: frozenset[str]) -> list[Path]:
    """The files of the package that a configuration with these names needs, each after the files that it imports."""
    order: list[Path] = []

    def visit(path: Path) -> None:
        if path not in order:
            for imported in source_file(path).imported_files:
                visit(imported)
            order.append(path)

    # transformers compares a configuration with the default one, which the folder's code must be able to make.
    names |= names_in(BraidConfig().architecture)
    for path in sorted(ROOT.rglob("*.py")):
        if source_file(path).registered & names:
            visit(path)
    visit(LAST)
    return order


class SourceFile:
    """One file of the package, taken apart."""

    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]

    @property
    def imported_files(self) -> list[Path]:
        """The files of ours that it imports from."""
        found = []
        for node in self.imports:
            if isinstance(node, ast.ImportFrom) and node.level:
                if not node.module or any(alias.asname for alias in node.names):
                    raise RuntimeError(f"{self.path}:{node.lineno}: import names, not files, and under their own names")
                found.append(self.path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py"))
        return found

    @property
    def registered(self) -> frozenset[str]:
        """The names under which it registers parts: `@registry.register("name")`."""
        decorators = [d for node in self.tree.body for d in getattr(node, "decorator_list", ())]
        calls = [d for d in decorators if isinstance(d, ast.Call) and getattr(d.func, "attr", None) == "register"]
        return frozenset(call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))  # type: ignore[misc]

    @property
    def outside(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports of other packages."""
        return [node for node in self.imports if isinstance(node, ast.Import) or not node.level]

    @property
    def names(self) -> list[str]:
        """What the file defines at its top level."""
        found: list[str] = []
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        return found

    @property
    def body(self) -> str:
        """The text without docstring and imports, under a comment that says what it is."""
        docstring = self.tree.body[0]
        dropped = {n for node in (docstring, *self.imports) for n in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines = [line for number, line in enumerate(self.text.split("\n"), start=1) if number not in dropped]
        about = (ast.get_docstring(self.tree) or "").split("\n")[0]
        return f"\n\n# {self.path.relative_to(ROOT)}\n# {about}\n\n\n" + "\n".join(lines).strip("\n")


@cache
def source_file(path: Path) -> SourceFile:
    """A file of the package, read once."""
    return SourceFile(path)


def _merged_imports(sources: list[SourceFile]) -> list[str]:
    """The imports of other packages, each once, in the order that import sorters use."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for source in sources:
        for node in source.outside:
            spelled = {alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names.setdefault(node.module or "", set()).update(spelled)
            else:
                plain |= spelled
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(plain):
        groups[_is_third_party(name)].append(f"import {name}")
    for module in sorted(names):
        groups[_is_third_party(module)].append(_import_from(module, sorted(names[module], key=_sort_key)))
    return [*groups[False], "", *groups[True]]


def _sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name.lower()


def _is_third_party(module: str) -> bool:
    return module.split(".")[0].split(" ")[0] in ("torch", "transformers")


def _import_from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
