"""How programs in each language are built and run, and when their tests have passed.

As in the harness of HumanEval-X (Zheng and others, 2023; CodeGeeX, codegeex/benchmark/execution.py): C++ with
`g++ -std=c++11`, Java with javac and java, JavaScript with node, where any output is a failed assertion, Go with
`go test`. What differs: Go's tests need only `assert.Equal` of testify, which is replaced here, so that nothing is
downloaded; and to have passed, the tests must print a proof when they have reached their end. Tests of Python and
JavaScript run in another process than the program, which never has the proof. Those of the compiled languages are
compiled with the program: it does not have the proof in its files, but it could be written to read it.
"""

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox.sandbox import MEGABYTE, IsolationPolicy, Limits, Outcome, Program, Sandbox, Step, python


@dataclass(frozen=True)
class TestedCode:
    """What a model wrote, and its tests."""

    __test__ = False  # not one of pytest's

    program: str
    tests: str
    given: str = ""
    """What the tests use of the prompt, where they run apart from the program."""
    names: tuple[str, ...] = ()
    """What the tests use of the program, where they run apart from it."""

    @property
    def whole(self) -> str:
        return f"{self.program}\n{self.tests}"


@dataclass(frozen=True)
class Test:
    """A program with its tests, and the conditions for passing them."""

    __test__ = False  # not one of pytest's

    program: Program
    proof: str
    """The required end of the output."""
    silent: bool = False
    """Whether any other output means that a test has failed."""

    def failure(self, outcome: Outcome) -> str:
        """Why it failed; empty if it passed."""
        if outcome.reason and outcome.steps < len(self.program.steps):
            lines = (outcome.err + outcome.out).splitlines()
            error = next((line.strip() for line in lines if "error" in line), outcome.reason)
            return f"does not compile: {error[:200]}"
        if outcome.reason:
            return outcome.reason
        if not outcome.out.endswith(self.proof):
            return "ended before its tests did"
        printed = (outcome.err + outcome.out.removesuffix(self.proof)).strip()
        if self.silent and printed:
            return f"printed: {printed.splitlines()[0][:200]}"
        return ""


@dataclass(frozen=True)
class Language:
    """One language: its tools, by name, and how a program is made from tested code, the tools' paths and a proof."""

    name: str
    tools: tuple[str, ...]
    make: Callable[[TestedCode, Mapping[str, str], str], Program]
    example: TestedCode
    """One that passes, to test whether the tools work in the sandbox."""
    tests_apart: bool = False
    """Whether tests run in another process than the program."""
    silent: bool = False
    """Whether any output means that a test has failed."""
    prepare: Callable[[Mapping[str, str], Path], None] | None = None
    """Preparation that is done once, in a folder that all programs can read (its path is the tool `prepared`)."""
    paths: dict[str, str] = field(default_factory=dict)

    def trust(self, sandbox: Sandbox) -> str:
        """What a pass proves."""
        if not self.tests_apart:
            return "run in the program's process: it cannot pass by exiting, but a program made to cheat could pass"
        if sandbox.isolation == "none":
            return "run in another process than the program, which is not isolated: a program made to cheat could pass"
        return "run in another process than the program, which cannot pretend to have passed"

    def test(self, code: TestedCode) -> Test:
        proof = secrets.token_hex(16)
        return Test(self.make(code, self.paths, proof), proof, self.silent)

    def prepared(self, folder: Path, sandbox: Sandbox) -> "Language":
        """The language after its preparation; an error where its example does not pass in the sandbox."""
        language = self
        if self.prepare is not None:
            folder.mkdir()
            self.prepare(self.paths, folder)
            language = replace(self, paths={**self.paths, "prepared": str(folder)})
        test = language.test(self.example)
        if failure := test.failure(sandbox.run(test.program)):
            raise BraidError(f"{' and '.join(self.tools)} cannot be used in the sandbox ({failure})")
        return language


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
        languages, missing = {}, {}
        for name, language in ((name, LANGUAGES[name]) for name in names):
            paths = {tool: python() if tool == "python" else shutil.which(tool) for tool in language.tools}
            installed = {tool: os.path.realpath(path) for tool, path in paths.items() if path}
            if len(installed) == len(paths):
                languages[name] = replace(language, paths=installed)
            else:
                missing[name] = f"not run: {' and '.join(language.tools)} not found"
        folders = [_folder_of(path) for language in languages.values() for path in language.paths.values()]
        sandbox = Sandbox.open(policy, [*folders, shared])
        for name, language in list(languages.items()):
            try:
                languages[name] = language.prepared(Path(shared) / name, sandbox)
            except BraidError as error:
                del languages[name]
                missing[name] = f"not run: {error.what}"
        if not languages:
            reasons = "; ".join(f"{name} {why}" for name, why in missing.items())
            raise BraidError(f"no program could be run: {reasons}", "code execution", "Install a toolchain.")
        yield CodeEnvironment(sandbox, languages, missing)


def _folder_of(tool: str) -> str:
    """The folder that a tool needs: the parent of its `bin`."""
    folder = os.path.dirname(tool)
    return os.path.dirname(folder) if os.path.basename(folder) == "bin" else folder


@functools.cache
def _harness(name: str) -> str:
    """The source of a harness, in the language of the program."""
    return (Path(__file__).parent / "harnesses" / name).read_text(encoding="utf-8")


_COMPILING = Limits(
    seconds=30, wall=60, memory=2048 * MEGABYTE, memory_is_watched=True, may_fork=True, processes=64, open_files=256
)
_MANAGED = Limits(seconds=5, wall=15, memory_is_watched=True, processes=64, open_files=256)
"""For virtual machines, which reserve address space and take a second to start."""


def _cpp(code: TestedCode, paths: Mapping[str, str], proof: str) -> Program:
    extra = ["-lcrypto", "-lssl"] if "openssl/" in code.program else []
    command = [paths["g++"], "-std=c++11", "test.cpp", "harness.cpp", "-Wl,--wrap=main", "-o", "test", *extra]
    run = Step(["{scratch}/test"], Limits(seconds=3, wall=10), input=proof)
    return Program({"test.cpp": code.whole, "harness.cpp": _harness("harness.cpp")}, [Step(command, _COMPILING), run])


_JAVA = ("-XX:+UseSerialGC", "-XX:ActiveProcessorCount=1", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xmx512m")


def _java(code: TestedCode, paths: Mapping[str, str], proof: str) -> Program:
    build = Step([paths["javac"], *(f"-J{flag}" for flag in _JAVA), "Main.java", "BraidHarness.java"], _COMPILING)
    run = Step([paths["java"], *_JAVA, "-cp", "{scratch}", "BraidHarness"], _MANAGED, input=proof)
    return Program({"Main.java": code.whole, "BraidHarness.java": _harness("BraidHarness.java")}, [build, run])


def _python(code: TestedCode, paths: Mapping[str, str], proof: str) -> Program:
    """The tests run in another process (`remote_calls.py`), which alone has the proof and prints it at their end."""
    command = [paths["python"], "-I", "-S", "-"]
    calls = _harness("../remote_calls.py")
    run = f"RemoteTests().run({code.program!r}, {code.given!r}, {code.names!r}, {code.tests!r}, {proof!r})"
    served = f"{calls}\nServedProgram().serve()\n"
    return Program({}, [Step(command, Limits(), input=served, tests=f"{calls}\n{run}\n")])


def _js(code: TestedCode, paths: Mapping[str, str], proof: str) -> Program:
    """The tests run in another process, as Python's tests do."""
    command = [paths["node"], "--max-old-space-size=512", "-"]
    forwards = "\n".join(f"const {name} = __braid.forward({json.dumps(name)});" for name in code.names)
    tests = (
        f"{_harness('channel.js')}{_harness('tests.js')}__braid.ask('run', {json.dumps(code.program)});\n"
        f"{{\n{code.given}\n{forwards}\n{code.tests}\n}}\nprocess.stdout.write({json.dumps(proof)});\n"
    )
    program = _harness("channel.js") + _harness("program.js")
    return Program({}, [Step(command, _MANAGED, input=program, tests=tests)])


_GO_PACKAGES = (
    *("bytes", "container/heap", "container/list", "crypto/md5", "errors", "fmt", "math", "math/big", "math/bits"),
    *("math/rand", "os", "reflect", "regexp", "sort", "strconv", "strings", "testing", "testing/internal/testdeps"),
    *("time", "unicode", "unicode/utf8"),
)
"""The imports of tests and most samples; other packages are compiled within the time of a build."""
_TESTIFY = "github.com/stretchr/testify"
_GO_MODULE = f"module sample\n\ngo 1.18\n\nrequire {_TESTIFY} v0.0.0\n\nreplace {_TESTIFY} => ./testify\n"


def _go_environment(paths: Mapping[str, str], folder: str, cache: str) -> dict[str, str]:
    return {
        **{"GOROOT": _folder_of(paths["go"]), "GOPATH": f"{folder}/go", "GOCACHE": cache},
        **{"GOPROXY": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"},
    }


def _prepare_go(paths: Mapping[str, str], folder: Path) -> None:
    """Compile the standard library's packages once: Go ships them as source, and samples have no shared cache."""
    environment = {**_go_environment(paths, str(folder), str(folder)), "HOME": str(folder), "PATH": os.defpath}
    command = [paths["go"], "build", *_GO_PACKAGES]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise BraidError(f"go cannot compile its standard library ({done.stderr.strip()[-200:]})")


def _go(code: TestedCode, paths: Mapping[str, str], proof: str) -> Program:
    files = {
        "main_test.go": code.whole,
        "harness_test.go": _harness("harness_test.go"),
        "go.mod": _GO_MODULE,
        "testify/go.mod": f"module {_TESTIFY}\n\ngo 1.18\n",
        "testify/assert/assert.go": _harness("assert.go"),
        "temporary/made": "",
    }
    environment = {
        **_go_environment(paths, "{scratch}", paths["prepared"]),
        "TMPDIR": "{scratch}/temporary",  # a module in TMPDIR itself is ignored
        "GOFLAGS": "-mod=mod -vet=off",
    }
    limits = replace(_COMPILING, processes=256, open_files=1024, file_size=128 * MEGABYTE)
    build = Step([paths["go"], "test", "-c", "-o", "test.out"], limits, environment)
    run = Step(["{scratch}/test.out", "-test.timeout=10s"], _MANAGED, input=proof)
    return Program(files, [build, run], disk=256 * MEGABYTE)


_GO_EXAMPLE = TestedCode(
    'package main\n\nimport (\n\t"testing"\n\t"github.com/stretchr/testify/assert"\n)\n',
    "func TestSum(t *testing.T) {\n\tassert.New(t).Equal(2, 1+1)\n}\n",
)
_PYTHON_EXAMPLE = TestedCode("def f(x): return x + 1\n", "assert f(1) == 2\n", names=("f",))
_JS_EXAMPLE = TestedCode("const f = (x) => x + 1\n", "console.assert(f(1) === 2)\n", names=("f",))
_CPP_EXAMPLE = TestedCode("int f() { return 2; }", "#include <cassert>\nint main() { assert(f() == 2); }\n")
_JAVA_EXAMPLE = TestedCode("class Solution { }", "public class Main { public static void main(String[] words) { } }\n")
LANGUAGES = {
    "python": Language("Python", ("python",), _python, _PYTHON_EXAMPLE, tests_apart=True),
    "cpp": Language("C++", ("g++",), _cpp, _CPP_EXAMPLE),
    "java": Language("Java", ("javac", "java"), _java, _JAVA_EXAMPLE),
    "js": Language("JavaScript", ("node",), _js, _JS_EXAMPLE, tests_apart=True, silent=True),
    "go": Language("Go", ("go",), _go, _GO_EXAMPLE, prepare=_prepare_go),
}
