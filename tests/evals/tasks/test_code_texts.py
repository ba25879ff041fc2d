"""pass@k by counting, and code cut and completed by the rules of the original harnesses."""

import itertools
import math

import pytest

from braidlm.evals.formats.code_problems import pass_at_k
from braidlm.evals.scoring.requests import contains_any, truncate_at
from braidlm.evals.tasks.code import (
    humaneval_code,
    mbpp_code,
    mbpp_prompt,
    undefined_names,
    x_body,
    x_code,
    x_is_finished,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_one_that_passes(samples: int) -> None:
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        expected = sum(map(any, choices)) / len(choices)
        assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    for samples, passed, k in [(10_000, 3, 1000), (200, 1, 100), (2000, 1999, 1), (100_000, 1, 1)]:
        exact = 1 - math.comb(samples - passed, k) / math.comb(samples, k)
        assert pass_at_k(samples, passed, k) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == 1.0


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0)])
def test_pass_at_k_of_what_cannot_be(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot"):
        pass_at_k(samples, passed, k)


def test_stops() -> None:
    assert truncate_at("a\ndef b\nclass c", ["\nclass", "\ndef"]) == "a"
    assert truncate_at("abc", ["x"]) == "abc"
    assert contains_any("abc", ["x", "b"])
    assert not contains_any("abc", [])


def test_humaneval() -> None:
    prompt = "import math\n\ndef g(): return 1\n\ndef f(x):\n"
    row = {"prompt": prompt, "test": "def check(f):\n    assert f(1) == 2", "entry_point": "f"}
    code = humaneval_code(row, "    return x + 1\n\nprint(f(3))\ndef g(): pass")
    assert code.program == f"{prompt}    return x + 1\n"
    assert code.tests == "def check(f):\n    assert f(1) == 2\ncheck(f)"
    assert (code.given, code.names) == ("import math\n\ndef g(): return 1\n\n", ("f",))
    exec(code.whole, {})


def test_mbpp() -> None:
    first = {"text": "Add.", "test_list": ["assert f(1) == 2"], "code": "def f(x): return x + 1", "test_setup_code": ""}
    row = {"text": "Double.", "test_list": ["assert g(1) == 2", "assert g(2) == 4"], "test_setup_code": "import math"}
    prompt = mbpp_prompt(row, [first])
    assert prompt == (
        "You are an expert Python programmer, and here is your task: Add. Your code should pass these tests:\n\n"
        "assert f(1) == 2\n[BEGIN]\ndef f(x): return x + 1\n[DONE]\n\n"
        "You are an expert Python programmer, and here is your task: Double. Your code should pass these tests:\n\n"
        "assert g(1) == 2\nassert g(2) == 4\n[BEGIN]\n"
    )
    code = mbpp_code(row, "def g(x):\n    return 2 * x\n[DONE]\nand more")
    assert code.program == "def g(x):\n    return 2 * x\n"
    assert code.tests == "import math\nassert g(1) == 2\nassert g(2) == 4"
    assert (code.given, code.names) == ("", ("g",))
    exec(code.whole, {})


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        ("assert f(1, len([2])) == 3", ["f"]),
        ("root = Node(1)\nroot.left = Node(2)\nassert height(root) == 2", ["Node", "height"]),
        ("import math as m\nassert [f(x) for x in range(3)] == list(map(lambda y: m.sqrt(y), []))", ["f"]),
        ("assert size() == sys.getsizeof(1)", ["size", "sys"]),
        ("assert sum(10, 15) == 6", ["sum"]),
    ],
)
def test_what_tests_use_of_a_program(tests: str, names: list[str]) -> None:
    assert undefined_names(tests) == names


def test_modules_are_not_the_programs() -> None:
    row = {"test_list": ["assert size() == sys.getsizeof(1)"], "test_setup_code": ""}
    code = mbpp_code(row, "")
    assert (code.given, code.names) == ("import sys\n", ("size",))


@pytest.mark.parametrize(
    ("language", "written", "finished", "body"),
    [
        ("python", "    return 1\n\n    # more\n", False, "    return 1\n\n    # more\n"),
        ("python", "    return 1\ndef g():\n    pass", True, "    return 1\n"),
        ("python", "\treturn 1\n@x", True, "\treturn 1\n"),
        ("cpp", "  if(x){ return 1; }\n", False, "  if(x){ return 1; }"),
        ("cpp", "  return 1;\n}", True, "  return 1;\n}"),
        ("cpp", "  return 1;\n}\nint g", True, "  return 1;\n}"),
        ("js", "  return {a: 1}\n}\nx", True, "  return {a: 1}\n}"),
        ("java", "        return 1;\n    }", True, "        return 1;\n    }\n}"),
        ("java", "        return 1;\n    }\n}", False, "        return 1;\n    }\n}"),
        ("java", "    return 1;\n  }\n  public static void main(String[] a) {", False, "    return 1;\n  }\n  }"),
        ("go", "    return 1\n}\n// another\nfunc g() {}", True, "    return 1\n}"),
        ("go", "    return 1\n}\nfunc main() {\n", False, "    return 1\n}"),
    ],
)
def test_where_functions_of_humaneval_x_end(language: str, written: str, finished: bool, body: str) -> None:
    assert x_is_finished(language, written) is finished
    assert x_body(language, written) == body


def test_programs_of_humaneval_x() -> None:
    row = {"prompt": "def f(x):\n", "test": "assert f(4) == 2.0"}
    python = x_code("python", row, "    return math.sqrt(x)\n")
    exec(python.whole, {})
    assert python.names == ("f",)
    assert python.given.endswith("from collections import *\n")
    js = x_code("js", {"prompt": "const g = 1\n/* f */\nconst f = (x) => {\n", "test": "f(g)"}, "  return x\n}")
    assert (js.given, js.names, js.tests) == ("const g = 1\n/* f */\n", ("f",), "f(g)")
    cpp = x_code("cpp", {"prompt": "#include<vector>\nint f(){\n", "test": "int main(){}"}, "  return 1;\n}").whole
    assert cpp.count("#include<vector>") == 1
    assert cpp.endswith("#include<vector>\nint f(){\n  return 1;\n}\nint main(){}")
    go = {
        "prompt": 'import (\n    "math"\n)\nfunc F() float64 {\n',
        "import": 'import (\n    "math"\n)\n',
        "test_setup": 'package main\nimport (\n    "testing"\n    "fmt"\n)\n',
        "test": "func TestF(t *testing.T) {}",
    }
    assert x_code("go", go, "  return math.Sqrt(rand.Float64() + fmt.X)\n}").whole == (
        f'{go["test_setup"]}\nimport (\n    "math"\n    "math/rand"\n)\nfunc F() float64 {{\n'
        "  return math.Sqrt(rand.Float64() + fmt.X)\n}\nfunc TestF(t *testing.T) {}"
    )
    assert "import (\n)" not in x_code("go", go, "  return 1\n}").whole
