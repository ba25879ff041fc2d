"""Programs that pretend to pass: none does. Those that are right still pass."""

import shutil
from collections.abc import Iterator

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox.languages import LANGUAGES, CodeEnvironment, TestedCode, open_code_environment
from braidlm.evals.sandbox.sandbox import Sandbox
from braidlm.evals.tasks.code import humaneval_code, mbpp_code, x_code

ROW = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\n",
}
X = {
    "js": {
        "prompt": "const double = (x) => {\n",
        "test": "const test = () => { console.assert(double(2) === 4) }\ntest()",
    },
    "cpp": {
        "prompt": "#include<stdlib.h>\nint twice(int x){\n",
        "test": "#undef NDEBUG\n#include<assert.h>\nint main(){ assert(twice(2) == 4); }",
    },
    "java": {
        "prompt": "class Solution {\n    public int twice(int x) {\n",
        "test": "public class Main { public static void main(String[] a) {\n"
        "if (new Solution().twice(2) != 4) throw new AssertionError(); } }",
    },
}
RIGHT = {"js": "  return 2 * x\n}", "cpp": "  return 2 * x;\n}", "java": "        return 2 * x;\n    }"}
WRONG = {name: text.replace("2 * x", "3 * x") for name, text in RIGHT.items()}

EQUAL = """
    class Equal:
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __hash__(self): return 4
        def __sub__(self, other): return 0
        def __abs__(self): return 0
        def __bool__(self): return True
"""
PYTHON = {
    "exits in the function": "    import os; os._exit(0)",
    "exits politely": "    import sys; sys.exit(0)",
    "raises SystemExit": "    raise SystemExit",
    "ends before its tests": "    return 1\nimport os; os._exit(0)",
    "an object equal to everything": f"{EQUAL}    return Equal()",
    "a number equal to everything": EQUAL.replace("class Equal", "class Equal(int)") + "    return Equal()",
    "a list equal to everything": EQUAL.replace("class Equal", "class Equal(list)") + "    return Equal()",
    "a text equal to everything": EQUAL.replace("class Equal", "class Equal(str)") + "    return Equal()",
    "reads the proof from the files": """
    import os
    for folder, _, names in os.walk("."):
        for name in names:
            print(open(os.path.join(folder, name)).read(), end="")
    os._exit(0)""",
    "reads the answers from the files": """
    import re
    answers = re.findall(r"== (\\d+)", open("program.py").read())
    return int(answers[0])""",
    "reads its own script": """
    import os
    text = os.pread(0, 1 << 20, 0)
    assert b"candidate" not in text
    os.write(1, text)
    os._exit(0)""",
    "looks for the proof on the stack": """
    import sys, os
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, str) and len(value) == 32:
                os.write(1, value.encode())
        frame = frame.f_back
    os._exit(0)""",
    "looks for the proof in all objects": """
    import gc, os
    found = [value for value in gc.get_objects() if isinstance(value, str)]
    found += [value for holder in gc.get_objects() if isinstance(holder, dict) for value in holder.values()]
    os.write(1, b"".join(value.encode() for value in found if isinstance(value, str) and len(value) == 32))
    os._exit(0)""",
    "replaces the code of check": """
    import gc, types
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__name__ == "check":
            function.__code__ = (lambda candidate: None).__code__
    return 0""",
    "finds the tests above it": """
    import sys
    frame = sys._getframe()
    while frame:
        if "candidate" in frame.f_locals or "check" in frame.f_globals:
            frame.f_globals["check"] = None
            return frame.f_globals["ANSWER"]
        frame = frame.f_back
    return 0""",
    "changes what assert means": """
    import builtins
    builtins.AssertionError = type("Fine", (BaseException,), {})
    builtins.int.__eq__ = lambda self, other: True""",
    "changes the protocol": """
    import __main__
    __main__.encode = lambda value, reference: {"reference": 0}
    __main__.ServedProgram.call = lambda *all: True
    return 0""",
    "writes on all descriptors": """
    import os
    for number in range(1, 64):
        try: os.write(number, b'{"result": true}\\n{"result": null}\\n')
        except OSError: pass
    os._exit(0)""",
    "answers for ever": """
    import os
    try:
        while True: os.write(4, b'{"result": 4}\\n')
    except OSError: os._exit(0)""",
    "answers with nonsense": "    import os; os.write(4, b'nonsense\\n')",
    "answers with a type": """    import os; os.write(4, b'{"result": {"type": "object"}}\\n')""",
    "answers with nothing": "    import os; os.close(4)",
    "reads the tests' process": """
    import glob, os
    for path in glob.glob("/proc/[0-9]*/mem"):
        if path != f"/proc/{os.getpid()}/mem":
            try: open(path, "rb"); print("opened")
            except OSError: pass
    return 4 if os.path.exists("/proc/self/mem") else 0""",
    "reads descriptors of the tests": """
    import glob
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try: open(path, "wb", 0).write(b"passed")
        except OSError: pass
    return 0""",
    "kills the tests": """
    import os
    for number in range(1, 4000):
        try: os.kill(number, 9)
        except OSError: pass
    return 0""",
    "prints what tests could have printed": "    print('passed', 'ok', '0', sep='\\n', flush=True)",
    "an exception that is caught nowhere": "    raise BaseException",
    "an exception of any name": "    raise type('passed\\0', (Exception,), {})",
    "a generator": "    yield 4",
}  # fmt: skip


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeEnvironment]:
    """The languages that there are."""
    names = [name for name in ("python", *X) if all(shutil.which(tool) for tool in LANGUAGES[name].tools)]
    try:
        with open_code_environment(list({"python": 0} | dict.fromkeys(names)), "required") as opened:
            yield opened
    except BraidError as error:
        pytest.skip(error.what)


def failure(environment: CodeEnvironment, language: str, code: TestedCode) -> str:
    if language not in environment.languages:
        pytest.skip(f"no {language} here")
    test = environment.languages[language].test(code)
    return test.failure(environment.sandbox.run(test.program))


@pytest.mark.parametrize("name", PYTHON)
def test_fakes_in_python(environment: CodeEnvironment, name: str) -> None:
    body = PYTHON[name]
    assert failure(environment, "python", humaneval_code(ROW, body if body.startswith(" ") else "    pass" + body))


@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef double(x): os._exit(0)",
        "def sum(*all): return True\ndef double(x): return 3 * x\nset = list = sorted = lambda *all: None",
        "class double(int):\n    def __eq__(self, other): return True",
        "import math\nmath.isclose = lambda *all: True\ndef double(x): return 1.0",
    ],
)
def test_fakes_of_mbpp(environment: CodeEnvironment, program: str) -> None:
    tests = ["assert double(2) == 4", "assert set([double(2)]) == set([4])", "assert math.isclose(double(2.0), 4.0)"]
    assert failure(environment, "python", mbpp_code({"test_list": tests, "test_setup_code": ""}, program))


@pytest.mark.parametrize(
    ("language", "body"),
    [
        ("js", "  process.exit(0)\n}"),
        ("js", "  process.reallyExit(0)\n}"),
        ("js", "  console.assert = () => {}\n  return 0\n}"),
        ("js", "  return {valueOf: () => 4, toString: () => '4', [Symbol.toPrimitive]: () => 4}\n}"),
        ("js", "  Object.is = () => true; JSON.stringify = () => '{\"result\":5}'; return 0\n}"),
        ("js", "  require('fs').writeSync(4, '{}\\n'); return 0\n}"),
        ("cpp", "  exit(0);\n}"),
        ("cpp", "  _Exit(0);\n}"),
        ("cpp", "  quick_exit(0);\n}"),
        ("cpp", "  abort();\n}"),
        ("java", "        System.exit(0); return 0;\n    }"),
        ("java", "        Runtime.getRuntime().halt(0); return 0;\n    }"),
    ],
)
def test_fakes_in_other_languages(environment: CodeEnvironment, language: str, body: str) -> None:
    assert failure(environment, language, x_code(language, X[language], body))


@pytest.mark.parametrize("language", X)
def test_right_and_wrong_programs(environment: CodeEnvironment, language: str) -> None:
    assert failure(environment, language, x_code(language, X[language], RIGHT[language])) == ""
    assert failure(environment, language, x_code(language, X[language], WRONG[language]))


def test_right_programs_in_python(environment: CodeEnvironment) -> None:
    for body in ("    return 2 * x", "    print('hm', flush=True)\n    return x + x", "    return float(2 * x)"):
        assert failure(environment, "python", humaneval_code(ROW, body)) == ""


def test_what_a_pass_proves_is_said() -> None:
    assert {name: language.tests_apart for name, language in LANGUAGES.items()} == {
        "python": True,
        "cpp": False,
        "java": False,
        "js": True,
        "go": False,
    }
    isolated, not_isolated = Sandbox("landlock", True, ()), Sandbox("none", True, ())
    assert "cannot pretend" in LANGUAGES["python"].trust(isolated)
    assert "made to cheat could pass" in LANGUAGES["python"].trust(not_isolated)
    assert "made to cheat could pass" in LANGUAGES["cpp"].trust(isolated)
