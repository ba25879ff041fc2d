"""How programs in each language are built and run, and when their tests have passed.

As in the harness of HumanEval-X (Zheng and others, 2023; CodeGeeX, codegeex/benchmark/execution.py): Python in one
namespace with its tests, C++ with `g++ -std=c++11`, Java with javac and java, JavaScript with node, where any output is
a failed assertion, Go with `go test`. What differs: Go's tests need only `assert.Equal` of testify, which is replaced
here, so that nothing is downloaded; and Python must reach the end of its tests, so that a program that exits before
them has not passed.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox.sandbox import MEGABYTE, IsolationPolicy, Limits, Outcome, Program, Sandbox, Step, python


@dataclass(frozen=True)
class Test:
    """A program with its tests, and the conditions for passing them."""

    __test__ = False  # not one of pytest's

    program: Program
    ending: str | None = None
    """The required end of the output."""
    silent: bool = False
    """Whether any output means that a test has failed."""

    def failure(self, outcome: Outcome) -> str:
        """Why it failed; empty if it passed."""
        if outcome.reason and outcome.steps < len(self.program.steps):
            lines = (outcome.err + outcome.out).splitlines()
            error = next((line.strip() for line in lines if "error" in line), outcome.reason)
            return f"does not compile: {error[:200]}"
        if outcome.reason:
            return outcome.reason
        if self.ending is not None and not outcome.out.endswith(self.ending):
            return "ended before its tests did"
        output = (outcome.err or outcome.out).strip()
        if self.silent and output:
            return f"printed: {output.splitlines()[0][:200]}"
        return ""


@dataclass(frozen=True)
class Language:
    """One language: its tools, by name, and how a test is made from a source text and the paths of these tools."""

    name: str
    tools: tuple[str, ...]
    make: Callable[[str, Mapping[str, str]], Test]
    example: str
    """A program that passes, to test whether the tools work in the sandbox."""
    prepare: Callable[[Mapping[str, str], Path], None] | None = None
    """Preparation that is done once, in a folder that all programs can read (its path is the tool `prepared`)."""
    paths: dict[str, str] = field(default_factory=dict)

    def with_tools(self) -> "Language | None":
        """The language with the paths of its tools; None where one is missing."""
        paths = {tool: python() if tool == "python" else shutil.which(tool) for tool in self.tools}
        installed = {tool: os.path.realpath(path) for tool, path in paths.items() if path}
        return replace(self, paths=installed) if len(installed) == len(paths) else None

    def test(self, source: str) -> Test:
        """The test of a source text that includes its tests."""
        return self.make(source, self.paths)


@dataclass(frozen=True)
class CodeEnvironment:
    """A sandbox, the languages that run in it, and why others do not."""

    sandbox: Sandbox
    languages: dict[str, Language]
    missing: dict[str, str]


@contextlib.contextmanager
def open_code_environment(names: list[str], policy: IsolationPolicy) -> Iterator[CodeEnvironment]:
    """The languages of these names, each tested with its example; it is an error if none can be run."""
    with tempfile.TemporaryDirectory(prefix="braid-") as shared:
        os.chmod(shared, 0o755)
        languages_or_none = {name: LANGUAGES[name].with_tools() for name in names}
        missing = {
            name: f"not run: {' and '.join(LANGUAGES[name].tools)} not found"
            for name, language in languages_or_none.items()
            if language is None
        }
        installed = {name: language for name, language in languages_or_none.items() if language is not None}
        folders = [_folder_of(path) for language in installed.values() for path in language.paths.values()]
        sandbox = Sandbox.open(policy, [*folders, shared])
        languages = {}
        for name, language in installed.items():
            try:
                languages[name] = _tested(_prepared(language, Path(shared) / name), sandbox)
            except BraidError as error:
                missing[name] = f"not run: {error.what}"
        if not languages:
            reasons = "; ".join(f"{name} {why}" for name, why in missing.items())
            raise BraidError(f"no program could be run: {reasons}", "code execution", "Install a toolchain.")
        yield CodeEnvironment(sandbox, languages, missing)


def _prepared(language: Language, folder: Path) -> Language:
    if language.prepare is None:
        return language
    folder.mkdir()
    language.prepare(language.paths, folder)
    return replace(language, paths={**language.paths, "prepared": str(folder)})


def _tested(language: Language, sandbox: Sandbox) -> Language:
    test = language.test(language.example)
    failure = test.failure(sandbox.run(test.program))
    if failure:
        raise BraidError(f"{' and '.join(language.tools)} cannot be used in the sandbox ({failure})")
    return language


def _folder_of(tool: str) -> str:
    """The folder that a tool needs: the parent of its `bin`."""
    folder = os.path.dirname(tool)
    return os.path.dirname(folder) if os.path.basename(folder) == "bin" else folder


def _python(source: str, paths: Mapping[str, str]) -> Test:
    # In a namespace that is not __main__, as the harness of HumanEval does: a sample's own tests at its end do not run.
    done = f"done {secrets.token_hex(8)}\n"
    run = f"""
        with open("program.py", encoding="utf-8", newline="") as file:
            source = file.read()
        exec(compile(source, "program.py", "exec"), {{}})
        print({done!r}, end="")
    """
    limits = Limits(seconds=3, wall=10)
    step = Step([paths["python"], "-I", "-S", "{scratch}/run.py"], limits)
    return Test(Program({"program.py": source, "run.py": textwrap.dedent(run)}, [step]), ending=done)


_COMPILING = Limits(
    seconds=30, wall=60, memory=2048 * MEGABYTE, memory_is_watched=True, may_fork=True, processes=64, open_files=256
)
_MANAGED = Limits(seconds=5, wall=15, memory_is_watched=True, processes=64, open_files=256)
"""For virtual machines, which reserve address space and take a second to start."""


def _cpp(source: str, paths: Mapping[str, str]) -> Test:
    extra = ["-lcrypto", "-lssl"] if "openssl/" in source else []
    build = Step([paths["g++"], "-std=c++11", "test.cpp", "-o", "test", *extra], _COMPILING)
    return Test(Program({"test.cpp": source}, [build, Step(["{scratch}/test"], Limits(seconds=3, wall=10))]))


_JAVA = ("-XX:+UseSerialGC", "-XX:ActiveProcessorCount=1", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xmx512m")


def _java(source: str, paths: Mapping[str, str]) -> Test:
    build = Step([paths["javac"], *(f"-J{flag}" for flag in _JAVA), "Main.java"], _COMPILING)
    run = Step([paths["java"], *_JAVA, "-cp", "{scratch}", "Main"], _MANAGED)
    return Test(Program({"Main.java": source}, [build, run]))


def _js(source: str, paths: Mapping[str, str]) -> Test:
    run = Step([paths["node"], "--max-old-space-size=512", "test.js"], _MANAGED)
    return Test(Program({"test.js": source}, [run]), silent=True)


_GO_PACKAGES = (
    *("bytes", "container/heap", "container/list", "crypto/md5", "errors", "fmt", "math", "math/big", "math/bits"),
    *("math/rand", "os", "reflect", "regexp", "sort", "strconv", "strings", "testing", "testing/internal/testdeps"),
    *("time", "unicode", "unicode/utf8"),
)
"""The imports of tests and most samples; other packages are compiled within the time of a build."""
_GO_MODULE = """module sample

go 1.18

require github.com/stretchr/testify v0.0.0

replace github.com/stretchr/testify => ./testify
"""
_GO_ASSERT = """// Package assert has the one check of testify that the tests of HumanEval-X use.
package assert

import (
	"bytes"
	"reflect"
	"testing"
)

type Assertions struct{ t *testing.T }

func New(t *testing.T) *Assertions { return &Assertions{t} }

func (a *Assertions) Equal(expected, actual interface{}, message ...interface{}) bool {
	a.t.Helper()
	one, isBytes := expected.([]byte)
	other, alsoBytes := actual.([]byte)
	if isBytes && alsoBytes && one != nil && other != nil && bytes.Equal(one, other) {
		return true
	}
	if reflect.DeepEqual(expected, actual) {
		return true
	}
	a.t.Errorf("not equal: expected %#v, got %#v", expected, actual)
	return false
}
"""


def _go_environment(paths: Mapping[str, str], folder: str, cache: str) -> dict[str, str]:
    return {
        "GOROOT": _folder_of(paths["go"]),
        "GOPATH": f"{folder}/go",
        "GOCACHE": cache,
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }


def _prepare_go(paths: Mapping[str, str], folder: Path) -> None:
    """Compile the standard library's packages once: Go ships them as source, and samples have no shared cache."""
    environment = {**_go_environment(paths, str(folder), str(folder)), "HOME": str(folder), "PATH": os.defpath}
    done = subprocess.run(
        [paths["go"], "build", *_GO_PACKAGES], env=environment, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise BraidError(f"go cannot compile its standard library ({done.stderr.strip()[-200:]})")


def _go(source: str, paths: Mapping[str, str]) -> Test:
    files = {
        "main_test.go": source,
        "go.mod": _GO_MODULE,
        "testify/go.mod": "module github.com/stretchr/testify\n\ngo 1.18\n",
        "testify/assert/assert.go": _GO_ASSERT,
        "temporary/made": "",
    }
    environment = {
        **_go_environment(paths, "{scratch}", paths["prepared"]),
        "TMPDIR": "{scratch}/temporary",  # a module in TMPDIR itself is ignored
        "GOFLAGS": "-mod=mod -vet=off",
    }
    limits = replace(_COMPILING, processes=256, open_files=1024, file_size=128 * MEGABYTE)
    build = Step([paths["go"], "test", "-c", "-o", "test.out"], limits, environment)
    run = Step(["{scratch}/test.out", "-test.timeout=10s"], _MANAGED)
    return Test(Program(files, [build, run], disk=256 * MEGABYTE))


LANGUAGES = {
    "python": Language("Python", ("python",), _python, "assert sum(range(4)) == 6\n"),
    "cpp": Language("C++", ("g++",), _cpp, "#include <cassert>\nint main() { assert(1 + 1 == 2); }\n"),
    "java": Language(
        "Java", ("javac", "java"), _java, "public class Main { public static void main(String[] words) { } }\n"
    ),
    "js": Language("JavaScript", ("node",), _js, "console.assert(1 + 1 === 2)\n"),
    "go": Language(
        "Go",
        ("go",),
        _go,
        'package main\n\nimport (\n\t"testing"\n\t"github.com/stretchr/testify/assert"\n)\n\n'
        "func TestSum(t *testing.T) {\n\tassert.New(t).Equal(2, 1+1)\n}\n",
        _prepare_go,
    ),
}
