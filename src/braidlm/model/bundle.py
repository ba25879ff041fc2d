"""The model's files joined into one, in the order of their imports: the code that a saved folder carries.

Transformers of every version copies and opens one file; the package may have rooms. Imports of other packages come
first, each once; imports among our own files and their docstrings give way to a comment that names the file.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from braidlm import __version__

ROOT, HERE = Path(__file__).parent, Path(__file__)
CODE_FILE = "modeling_braid.py"
"""The code in a folder; here, the file with the Auto classes, which readers look for first and which comes last."""
APART = ("members.py",)
"""Files of other models than Braid's, which folders of those carry."""
WIDTH = 120
HEADER = '''"""Braid's model in one file, so that plain transformers opens this folder: see config.json, `auto_map`.

Written by braidlm {version} from its package `braidlm.model`; a comment names the file that each part comes from.
SHA-256 of the text from the first import on: {digest}
License: Apache-2.0.
"""

'''
APART_HEADER = '''"""{what}, in one file, so that transformers opens this folder: see config.json, `auto_map`.

Written by braidlm {version}; a comment names the file of its package `braidlm.model` that each part comes from.
License: Apache-2.0.
"""

'''
IN_FOLDER = '''"""The code of a folder: a model that came from one writes the code it was opened with."""

from pathlib import Path

CODE_FILE = "modeling_braid.py"


def bundle() -> str:
    """The text of this file."""
    return Path(__file__).read_text(encoding="utf-8")
'''
"""What a folder has in place of this file."""


@cache
def bundle() -> str:
    """The text of the file that a folder carries."""
    rest = [path for path in sorted(ROOT.rglob("*.py")) if path.name not in ("__init__.py", *APART)]
    body = join_files([*(path for path in rest if path != ROOT / CODE_FILE), ROOT / CODE_FILE])
    return HEADER.format(version=__version__, digest=hashlib.sha256(body.encode()).hexdigest()) + body


def alone(what: str, file: str) -> str:
    """The text of one file of the package, with what it imports, for a folder that holds `what`."""
    return APART_HEADER.format(what=what, version=__version__) + join_files([ROOT / file]).rstrip() + "\n"


def join_files(paths: Iterable[Path]) -> str:
    """The text of these files and of those that they import, each after the files that it imports itself."""
    sources: dict[Path, SourceFile] = {}

    def visit(path: Path) -> None:
        if path not in sources:
            source = SourceFile(path, IN_FOLDER if path == HERE else path.read_text(encoding="utf-8"))
            for imported in source.imported_files:
                visit(imported)
            sources[path] = source

    for path in paths:
        visit(path)
    defined: dict[str, Path] = {}
    for path, source in sources.items():
        for name in source.defined_names:
            if name in defined:
                raise RuntimeError(f"'{name}' is defined in {defined[name]} and in {path}")
            defined[name] = path
    first, *others = (source.body for source in sources.values() if source.body)
    return "\n".join([*_merged_imports(sources.values()), "", first, *("\n\n" + body for body in others), ""])


class SourceFile:
    """One file of the package, taken apart."""

    def __init__(self, path: Path, text: str):
        self.path, self.text, self.tree = path, text, ast.parse(text)
        self.imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.outside = [node for node in self.imports if isinstance(node, ast.Import) or not node.level]
        """The imports of other packages."""

    @property
    def imported_files(self) -> list[Path]:
        """The files of the package that it imports from."""
        found = []
        for node in self.imports:
            if isinstance(node, ast.ImportFrom) and node.level:
                if not node.module or any(alias.asname for alias in node.names):
                    raise RuntimeError(f"{self.path}:{node.lineno}: import names, not files, and under their own names")
                found.append(self.path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py"))
        return found

    @property
    def defined_names(self) -> list[str]:
        """The names that its statements define."""
        names: list[str] = []
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.append(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
            elif node not in self.imports and not isinstance(getattr(node, "value", None), ast.Constant):
                raise RuntimeError(f"{self.path}:{node.lineno}: the model's files only define names")
        return names

    @property
    def body(self) -> str:
        """The text after the docstring and the imports, under a comment that says what the file is."""
        about = (ast.get_docstring(self.tree) or "").split("\n")[0]
        first = max(node.end_lineno or 0 for node in (self.tree.body[0], *self.imports))
        text = "\n".join(self.text.split("\n")[first:]).strip("\n")
        return f"# {self.path.relative_to(ROOT)}\n# {about}\n\n\n{text}" if text else ""


def _merged_imports(sources: Iterable[SourceFile]) -> list[str]:
    """The imports of other packages, each once, in the order that import sorters use."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in (node for source in sources for node in source.outside):
        spelled = {alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.setdefault(node.module or "", set()).update(spelled)
        else:
            plain |= spelled
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(plain):
        groups[_is_third_party(name)].append(f"import {name}")
    for module in sorted(names):
        # Constants, then classes, then functions.
        own = sorted(names[module], key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n.lower()))
        line = f"from {module} import {', '.join(own)}"
        wrapped = f"from {module} import (\n    " + ",\n    ".join(own) + ",\n)"
        groups[_is_third_party(module)].append(line if len(line) <= WIDTH else wrapped)
    return [*groups[False], "", *groups[True]]


def _is_third_party(module: str) -> bool:
    return module.split(".")[0].split(" ")[0] in ("torch", "transformers")
