"""The model's files joined into one, in the order of their imports: the code that a saved folder carries.

Transformers of every version copies and opens one file; the package may have rooms. Imports of other packages come
first, each once; imports among our own files and their docstrings give way to a comment that names the file.

The file has what the configuration can reach, and no more: a part is reached by its name in the configuration alone,
and everything else by its name in the code. So it holds the Auto classes, the parts whose names the configuration or
the default one contains, and the definitions that these mention.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile, zip_longest
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
    # transformers compares a configuration with the default one, which the folder's code must be able to make.
    body = body_of(reachable(names | names_in(BraidConfig().architecture)))
    return HEADER.format(version=__version__, digest=hashlib.sha256(body.encode()).hexdigest()) + body


def body_of(reached: frozenset[str]) -> str:
    """The text of these definitions, after the imports that they need."""
    sources = [source for source in in_order() if source.definitions_in(reached)]
    bodies = [source.body(reached) for source in sources]
    return "\n".join([*_merged_imports(sources, "\n".join(bodies)), bodies[0].removeprefix("\n"), *bodies[1:], ""])


def names_in(value: Any) -> frozenset[str]:
    """Every text in a configuration, as a key or as a value; and both, for parts whose names alone are also keys."""
    if isinstance(value, dict):
        both = frozenset(f"{key}={own}" for key, own in value.items() if isinstance(own, str))
        return frozenset(value) | both | names_in(list(value.values()))
    if isinstance(value, list):
        return frozenset().union(*map(names_in, value))
    return frozenset({value} if isinstance(value, str) else ())


def reachable(names: frozenset[str]) -> frozenset[str]:
    """The names of the definitions that a configuration with these names needs."""
    named = (name for one in definitions().values() if one.registered & names for name in one.names)
    return needed_by({name for one in source_file(LAST).definitions for name in one.names} | set(named))


def needed_by(names: Iterable[str]) -> frozenset[str]:
    """These names of definitions, and those that they mention, and so on."""
    defined, waiting = definitions(), list(names)
    reached: set[str] = set()
    while waiting:
        definition = defined[waiting.pop()]
        if not reached.issuperset(definition.names):
            reached |= definition.names
            waiting += [name for name in definition.mentioned if name in defined]
    return frozenset(reached)


def definitions() -> dict[str, "Definition"]:
    """What the files of the package define, by name."""
    defined: dict[str, Definition] = {}
    for source in in_order():
        for definition in source.definitions:
            for name in definition.names:
                if name in defined:
                    raise RuntimeError(f"'{name}' is defined in {defined[name].path} and in {source.path}")
                defined[name] = definition
    return defined


def in_order() -> list["SourceFile"]:
    """The files of the package, each after the files that it imports; the Auto classes are the last."""
    order: dict[Path, None] = {}

    def visit(path: Path) -> None:
        if path not in order:
            for imported in source_file(path).imported_files:
                visit(imported)
            order[path] = None

    for path in sorted(ROOT.rglob("*.py")):
        if path not in (LAST, Path(__file__)) and path.name != "__init__.py":
            visit(path)
    visit(LAST)
    return [source_file(path) for path in order]


@dataclass(frozen=True)
class Definition:
    """What one statement at the top level of a file defines."""

    path: Path
    names: frozenset[str]
    mentioned: frozenset[str]
    """The names in it, those in annotations that are texts too."""
    registered: frozenset[str]
    """The names in a configuration that reach it: `@registry.register("name")`."""
    lines: range
    """Where it stands, with its decorators and with the comments before it and the docstring after it."""
    space: int
    """The number of empty lines before it."""
    is_block: bool
    """Whether it is a function or a class, which two empty lines follow."""


class SourceFile:
    """One file of the package, taken apart."""

    def __init__(self, path: Path):
        self.path = path
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.tree = ast.parse("\n".join(self.lines))
        self.imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.definitions = list(self._definitions())

    @cached_property
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
        """The names under which it registers parts."""
        return frozenset().union(*(definition.registered for definition in self.definitions))

    @property
    def outside(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports of other packages."""
        return [node for node in self.imports if isinstance(node, ast.Import) or not node.level]

    def definitions_in(self, reached: frozenset[str]) -> list[Definition]:
        """Those of its definitions that are reached."""
        return [definition for definition in self.definitions if definition.names <= reached]

    def body(self, reached: frozenset[str]) -> str:
        """The text of the definitions that are reached, under a comment that says what the file is."""
        about = (ast.get_docstring(self.tree) or "").split("\n")[0]
        text, after_block = "", False
        for definition in self.definitions_in(reached):
            lines = self.lines[definition.lines.start : definition.lines.stop]
            text += "\n" * (2 if after_block else definition.space) + "\n".join(lines) + "\n"
            after_block = definition.is_block
        return f"\n\n# {self.path.relative_to(ROOT)}\n# {about}\n\n\n" + text.strip("\n")

    def _definitions(self) -> Iterator[Definition]:
        statements = [node for node in self.tree.body if node not in self.imports]
        for node, following in zip_longest(statements, statements[1:]):
            if _is_docstring(node):
                continue
            names = _defined_names(node)
            if not names:
                raise RuntimeError(f"{self.path}:{node.lineno}: the model's files only define names")
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1
            while self.lines[first - 1].startswith("#"):
                first -= 1
            last = following if following is not None and _is_docstring(following) else node
            lines = range(first, last.end_lineno or 0)
            space = sum(1 for _ in takewhile(lambda line: not line, reversed(self.lines[:first])))
            is_block = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            registered = _registered_names(node)
            yield Definition(self.path, names, _mentioned_names(node), registered, lines, space, is_block)


@cache
def source_file(path: Path) -> SourceFile:
    """A file of the package, read once."""
    return SourceFile(path)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _defined_names(node: ast.stmt) -> frozenset[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return frozenset(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _mentioned_names(node: ast.stmt) -> frozenset[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for inner in ast.walk(node):
        for annotation in (getattr(inner, "annotation", None), getattr(inner, "returns", None)):
            for part in ast.walk(annotation) if annotation is not None else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names.update(re.findall(r"\w+", part.value))
    return frozenset(names)


def _registered_names(node: ast.stmt) -> frozenset[str]:
    decorators: list[Any] = getattr(node, "decorator_list", [])
    calls = [d for d in decorators if isinstance(d, ast.Call) and getattr(d.func, "attr", None) == "register"]
    return frozenset(call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))  # type: ignore[misc]


def _merged_imports(sources: list[SourceFile], text: str) -> list[str]:
    """The imports of other packages that the text uses, each once, in the order that import sorters use."""
    used = set(re.findall(r"\w+", text))
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for source in sources:
        for node in source.outside:
            spelled = {_spelled(alias) for alias in node.names if (alias.asname or alias.name).split(".")[0] in used}
            if isinstance(node, ast.ImportFrom):
                names.setdefault(node.module or "", set()).update(spelled)
            else:
                plain |= spelled
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(plain):
        groups[_is_third_party(name)].append(f"import {name}")
    for module in sorted(module for module, spelled in names.items() if spelled):
        groups[_is_third_party(module)].append(_import_from(module, sorted(names[module], key=_sort_key)))
    return [*groups[False], "", *groups[True]]


def _spelled(alias: ast.alias) -> str:
    return alias.name + (f" as {alias.asname}" if alias.asname else "")


def _sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name.lower()


def _is_third_party(module: str) -> bool:
    return module.split(".")[0].split(" ")[0] in ("torch", "transformers")


def _import_from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
