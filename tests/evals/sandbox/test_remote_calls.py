"""Values that go from one process to another, and tests that run apart from their program."""

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox.languages import CodeEnvironment, TestedCode, open_code_environment
from braidlm.evals.sandbox.remote_calls import decode, encode


def sent(value: Any, objects: list[Any] | None = None) -> Any:
    """A value after its way through JSON."""
    kept: list[Any] = [] if objects is None else objects
    message = json.loads(json.dumps(encode(value, lambda item: kept.append(item) or len(kept) - 1)))
    return decode(message, kept.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -7, 2**53, -(10**5000), 0.1, -0.0, math.inf, 1e300, 2 + 3j, "a\n\udc80ü", b"\x00\xff"),
        *([], [1, [2.0, "x"]], (), ((1,), [2]), {1, "a", (2, 3)}, frozenset({1}), deque([1, 2]), bytearray(b"x")),
        *({}, {"a": 1, (1, 2): {None: [3]}}, OrderedDict(b=1, a=2), Counter("hello"), int, [str, dict]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_stay_what_they_are(value: Any) -> None:
    result = sent(value)
    assert (type(result), result) == (type(value), value)


def test_values_that_become_plain() -> None:
    assert math.isnan(sent(math.nan))
    assert type(sent(defaultdict(list, a=[1]))) is dict
    assert math.copysign(1, sent(-0.0)) == -1
    assert list(sent({3: 0, 1: 0, 2: 0})) == [3, 1, 2]


def test_a_value_with_its_own_idea_of_equality_arrives_without_it() -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert Equal(3) == 4
    assert sent([Equal(3)]) != [4]


def test_functions_of_python_are_not_values() -> None:
    with pytest.raises(TypeError, match="eval is not a type"):
        decode({"type": "eval"}, lambda number: number)


def test_other_objects_are_referred_to() -> None:
    thing, objects = object(), []
    assert sent([thing], objects) == [thing]
    assert objects == [thing]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[CodeEnvironment]:
    with contextlib.ExitStack() as opened:
        try:
            environment = opened.enter_context(open_code_environment(["python"], "required"))
        except BraidError as error:
            pytest.skip(error.what)
        yield environment


def failure(
    sandbox: CodeEnvironment, program: str, tests: str, given: str = "", names: tuple[str, ...] = ("f",)
) -> str:
    test = sandbox.languages["python"].test(TestedCode(program, tests, given, names))
    return test.failure(sandbox.sandbox.run(test.program))


def test_arguments_and_results(sandbox: CodeEnvironment) -> None:
    program = "def f(*values, **named):\n    print('talks')\n    return values, named"
    tests = "assert f([1], {2: (3,)}, x=None) == (([1], {2: (3,)}), {'x': None})\nassert f() is not f()\nprint('too')"
    assert failure(sandbox, program, tests) == ""
    assert failure(sandbox, program, "assert f(1) == 2") == "ended with 1: AssertionError"
    assert failure(sandbox, program, "assert f(1) == 2, 'as it was said'").endswith("AssertionError: as it was said")


def test_objects_of_the_program(sandbox: CodeEnvironment) -> None:
    program = "class Node:\n    def __init__(self, value): self.value, self.left = value, None\n"
    program += "def f(node): return node.value + (f(node.left) if node.left else 0)"
    tests = "root = Node(1)\nroot.left = Node(2)\nassert f(root) == 3\nassert root.left.value == 2\nassert root != 1"
    assert failure(sandbox, program, tests, names=("Node", "f")) == ""


def test_what_is_given_is_the_tests_own(sandbox: CodeEnvironment) -> None:
    given = "def square(x): return x * x\n"
    program = given + "def f(x):\n    global square\n    square = lambda x: 4\n    return x"
    assert failure(sandbox, program, "assert square(f(2)) == 4", given) == ""
    assert "AssertionError" in failure(sandbox, program, "assert square(f(3)) == 4", given)


def test_errors_of_the_program_are_errors_of_the_test(sandbox: CodeEnvironment) -> None:
    program = "class Own(Exception): pass\ndef f(x):\n    if x: raise Own('mine')\n    return {}['key']"
    caught = "try:\n    f(0)\n    assert False\nexcept KeyError as error:\n    assert 'key' in str(error)\n"
    assert failure(sandbox, program, caught) == ""
    assert failure(sandbox, program, "f(1)") == "ended with 1: Own: mine"
    assert failure(sandbox, "def f(:", "f(1)").startswith("ended with 1: SyntaxError")
    assert failure(sandbox, "g = 1", "f(1)") == "ended with 1: NameError: name 'f' is not defined"
    assert "cannot give function" in failure(sandbox, "def f(x): return x", "f(lambda: 1)")
    assert "RecursionError" in failure(sandbox, "def f(): return f()", "f()")
    loop = "def f():\n    x = []\n    x.append(x)\n    return x"
    assert "RecursionError" in failure(sandbox, loop, "f()")


def test_limits_hold_for_the_program(sandbox: CodeEnvironment) -> None:
    assert "MemoryError" in failure(sandbox, "def f(): return bytearray(100 << 30)", "f()")
    assert "SIGABRT" in failure(sandbox, "import os\ndef f(): os.abort()", "f()")
    assert "printed more than" in failure(sandbox, "def f():\n    while True: print('x' * 9999)", "f()")


def test_the_apparatus_is_fast_enough_for_many_calls(sandbox: CodeEnvironment) -> None:
    assert failure(sandbox, "def f(x): return x + 1", "for x in range(2000): assert f(x) == x + 1") == ""
