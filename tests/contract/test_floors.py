"""The floors: a file imports only from lower ones, and the model folder stands alone. Read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import braidlm

SOURCE = Path(braidlm.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = {
    "model": 0,
    "kernels": 1,
    "core": 1,
    "data": 2,
    "bridges": 3,
    "opening": 4,
    "training": 5,
    "evals": 5,
    "inspection": 5,
    "edits": 6,
    "studies": 7,
    "serving": 8,
    "cli": 9,
}
"""Design, section 4. Folders of one number are siblings, which do not import each other."""
MODEL_MAY_IMPORT = {"torch", "transformers"} | sys.stdlib_module_names
LONGEST = 400


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests read."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, by name in a call too, relative names made absolute."""
    package = ["braidlm", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, name = ast.unparse(node.func).split(".")[-1], node.args[0].value
            if called in ("import_module", "__import__"):
                yield node.lineno, name if not name.startswith(".") else ".".join(package) + name


def file_of(name: str) -> Path | None:
    """The file of ours that a dotted name is, or is in; None for other packages."""
    first, *parts = name.split(".")
    for length in (len(parts), len(parts) - 1) if first == "braidlm" else ():
        path = SOURCE.joinpath(*parts[: max(length, 0)])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def circles(files: list[Path]) -> list[list[Path]]:
    """Files that import each other, directly or by way of others, wherever in the file the imports stand."""
    graph = {path: {found for _, name in imports(path) if (found := file_of(name))} - {path} for path in files}
    reached: dict[Path, set[Path]] = {}
    for path in graph:
        waiting, reached[path] = list(graph[path]), set()
        while waiting:
            other = waiting.pop()
            if other not in reached[path]:
                reached[path].add(other)
                waiting += graph.get(other, ())
    found = {
        frozenset(o for o in reached[path] if path in reached.get(o, ())) for path in graph if path in reached[path]
    }
    return [sorted(circle) for circle in found]


def floor_of(name: str) -> str | None:
    """The folder of ours that a dotted name lies in; None for other packages and for braidlm's own `__version__`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "braidlm" and len(parts) > 1 and (SOURCE / parts[1]).is_dir() else None


def upward(path: Path) -> list[str]:
    """The lines of a file that import from its own height or above, elsewhere."""
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:  # braidlm/__init__.py and __main__.py stand above everything
        return []
    own = parts[0]
    found = []
    for line, name in imports(path):
        other = floor_of(name)
        if other is not None and other != own and FLOORS[other] >= FLOORS[own]:
            found.append(f"{path}:{line}: {own}/ (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})")
    return found


def test_every_folder_has_a_floor() -> None:
    folders = {path.relative_to(SOURCE).parts[0] for path in FILES if path.parent != SOURCE}
    assert folders <= set(FLOORS), "say in FLOORS where the new folder stands"


def test_every_folder_says_its_floor() -> None:
    """In the first words of its docstring, and in the table of docs/concepts.md."""
    table = (SOURCE.parent.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    for folder, floor in FLOORS.items():
        assert (ast.get_docstring(parsed(SOURCE / folder / "__init__.py")) or "").startswith(f"Floor {floor}: "), folder
        assert f"| {floor} | `{folder}/` |" in table, folder


def test_a_file_imports_only_from_lower_floors() -> None:
    assert not [line for path in FILES for line in upward(path)]


def test_no_files_import_each_other() -> None:
    assert not circles(FILES)


def test_the_model_stands_alone() -> None:
    """Torch, transformers, the standard library and itself, relatively: a saved folder carries it as one file."""
    model, problems = SOURCE / "model", []
    for path in model.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.level:
                if not path.parents[node.level - 1].is_relative_to(model):
                    problems.append(f"{where}: imports from outside of the model")
            elif isinstance(node, ast.ImportFrom) and path == model / "bundle.py" and node.module == "braidlm":
                problems += [f"{where}: imports {a.name}" for a in node.names if a.name != "__version__"]
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                problems += [f"{where}: imports {name}" for name in names if name.split(".")[0] not in MODEL_MAY_IMPORT]
    assert not problems


def test_this_test_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    for folder in FLOORS:
        (tmp_path / folder).mkdir()
    path = tmp_path / "evals" / "a.py"
    path.write_text(
        "from braidlm import __version__\n"
        "from braidlm.core import files\n"
        "from . import b\n"
        "def late():\n"
        "    from braidlm.training.loop import train\n"
        "import braidlm.cli.main\n"
        "from braidlm import serving\n"
        "from ..inspection import results\n"
        "import torch\n"
    )
    assert [line.split(": ")[0].rsplit(":", 1)[1] for line in sorted(upward(path))] == ["5", "6", "7", "8"]
    assert "imports braidlm.training.loop.train (floor 5)" in "".join(upward(path))
    path.write_text("import_module('braidlm.cli.main')\nimport_module('.b', __package__)\nimport_module(name)\n")
    parsed.cache_clear()
    assert len(upward(path)) == 1
    other = tmp_path / "evals" / "b.py"
    other.write_text("def late():\n    from braidlm.evals.c import x\n")
    (tmp_path / "evals" / "c.py").write_text("from . import a\n")
    (circle,) = circles(sorted(tmp_path.rglob("*.py")))
    assert [file.name for file in circle] == ["a.py", "b.py", "c.py"]


def test_files_stay_readable() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {str(path): lines for path, lines in lengths.items() if lines > LONGEST}


def test_only_the_command_line_prints() -> None:
    found = []
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] == "cli":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{path}:{node.lineno}")
    assert not found


def test_every_file_says_what_it_is_for() -> None:
    assert not [str(p) for p in FILES if not ast.get_docstring(parsed(p))]


HELP = """
import sys
from braidlm.cli.main import main
try:
    main({arguments})
except SystemExit as end:
    assert not end.code, end.code
heavy = [name for name in ("torch", "transformers", "datasets", "hydra") if name in sys.modules]
assert not heavy, f"imported on the way: {{heavy}}"
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["list", "recipes"]], ids=" ".join)
def test_help_and_lists_answer_without_torch(arguments: list[str]) -> None:
    script = HELP.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
