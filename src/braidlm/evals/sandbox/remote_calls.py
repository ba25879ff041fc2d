"""Calls between two Python processes: the program under test is in one, its tests are in the other.

Both get this file as the beginning of their script, so that it needs the standard library alone. A message is a line of
JSON. Plain values are copied; any other object stays where it is, and the tests hold a `Remote` in its place. So what
tests compare are plain values of their own process, whatever a program thinks equality is, and the expected values
never are in the program's process.
"""

import builtins
import json
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_FROM_OTHER, _TO_OTHER = 3, 4
"""Descriptors, in both processes."""
_LARGEST_PLAIN_INT = 2**53

_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Any] = {"OrderedDict": OrderedDict, "Counter": Counter, "dict": dict}
"""A dictionary is sent as the first of these that it is."""
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # JSON's have a limit of digits
    "complex": (complex, repr, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
}


class Channel:
    """Lines to and from the other process."""

    def __init__(self) -> None:
        self._source = os.fdopen(_FROM_OTHER, "r", encoding="ascii", newline="\n")
        self._sink = os.fdopen(_TO_OTHER, "w", encoding="ascii", newline="\n")

    def send(self, message: Any) -> None:
        self._sink.write(json.dumps(message) + "\n")
        self._sink.flush()

    def receive(self) -> Any:
        """The next message; an EOFError if the other process has ended."""
        line = self._source.readline()
        if not line.endswith("\n"):
            raise EOFError
        return json.loads(line)


def encode(value: Any, reference: Callable[[Any], int]) -> Any:
    """A value as JSON; an object that is not plain becomes what `reference` gives for it."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if type(value) is int and -1 < value < _LARGEST_PLAIN_INT:
        return value
    if isinstance(value, list):
        return [encode(item, reference) for item in value]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, reference) for item in value]}
    for name, kind in _MAPPINGS.items():
        if isinstance(value, kind):
            return {name: [[encode(key, reference), encode(item, reference)] for key, item in value.items()]}
    for name, (kind, to_text, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {name: to_text(value)}
    if isinstance(value, type) and getattr(builtins, (name := value.__name__), None) is value:
        return {"type": name}
    return {"reference": reference(value)}


def decode(message: Any, dereference: Callable[[int], Any]) -> Any:
    """The value of a message; `dereference` gives the object of a reference."""
    if isinstance(message, list):
        return [decode(item, dereference) for item in message]
    if not isinstance(message, dict):
        return message
    ((name, content),) = message.items()
    if name == "reference":
        return dereference(content)
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, dereference) for item in content)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, dereference): decode(item, dereference) for key, item in content})
    if name != "type":
        return _TEXTS[name][2](content)
    if not isinstance(found := getattr(builtins, content), type):
        raise TypeError(f"{content} is not a type")
    return found


class ServedProgram:
    """In the program's process: it runs the program, and does what the tests ask."""

    def __init__(self) -> None:
        self.channel = Channel()
        self.namespace: dict[str, Any] = {}
        self.objects: list[Any] = []
        """The objects that the tests hold."""

    def serve(self) -> NoReturn:
        """Answer until the tests end."""
        while True:
            try:
                action, *arguments = self.channel.receive()
            except EOFError:
                os._exit(0)
            try:
                values = [decode(argument, self.objects.__getitem__) for argument in arguments]
                answer = {"result": encode(getattr(self, action)(*values), self._reference)}
            except Exception as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            self.channel.send(answer)

    def run(self, source: str) -> None:
        # In a namespace that is not __main__, as the harness of HumanEval does: a sample's own tests do not run.
        exec(compile(source, "program.py", "exec"), self.namespace)

    def find(self, name: str) -> Any:
        if name not in self.namespace:
            raise NameError(f"name '{name}' is not defined")
        return self.namespace[name]

    def call(self, function: Callable, arguments: list[Any], named: dict[str, Any]) -> Any:
        return function(*arguments, **named)

    def get(self, holder: Any, name: str) -> Any:
        return getattr(holder, name)

    def set(self, holder: Any, name: str, value: Any) -> None:
        setattr(holder, name, value)

    def _reference(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


class Remote:
    """In the tests' process: an object of the program. It is equal to nothing but itself."""

    def __init__(self, tests: "RemoteTests", number: int):
        self.__dict__.update({"_tests": tests, "_number": number})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._tests.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        return self._tests.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._tests.ask("set", self, name, value)


class RemoteTests:
    """In the tests' process: it runs the tests, and says at the end that they have passed."""

    def __init__(self) -> None:
        self.channel = Channel()

    def run(self, program: str, given: str, names: Sequence[str], tests: str, proof: str) -> NoReturn:
        """Run tests of these names, which the program defines; `given` is code that the tests use."""
        sys.stdout = sys.stderr
        namespace: dict[str, Any] = {}
        try:
            exec(compile(given, "given.py", "exec"), namespace)
            self.ask("run", program)
            namespace.update({name: self.ask("find", name) for name in names})
            exec(compile(tests, "tests.py", "exec"), namespace)
        except BaseException as error:
            self._end(1, f"{type(error).__name__}: {error}".rstrip(": "))
        self._end(0, proof)

    def ask(self, action: str, *values: Any) -> Any:
        """The result of an action in the program's process."""
        try:
            self.channel.send([action, *(encode(value, self._number) for value in values)])
            answer = self.channel.receive()
        except (EOFError, BrokenPipeError):
            self._end(0)  # without the proof; at once, since tests may catch any exception
        if "error" in answer:
            raise _exception(answer["error"], answer["text"])
        return decode(answer["result"], lambda number: Remote(self, number))

    def _number(self, value: Any) -> int:
        if not isinstance(value, Remote):
            raise TypeError(f"a test cannot give {type(value).__name__} to a program in another process")
        return value.__dict__["_number"]

    def _end(self, code: int, last: str = "") -> NoReturn:
        sys.stderr.flush()
        os.write(2 if code else 1, last.encode(errors="replace"))
        os._exit(code)


def _exception(name: str, text: str) -> Exception:
    """An exception of the program: Python's own of that name, or a new one."""
    known = getattr(builtins, name, None)
    if not (isinstance(known, type) and issubclass(known, Exception)):
        known = type(name, (Exception,), {})
    try:
        return known(text)
    except TypeError:  # some, such as UnicodeDecodeError, are not made from a text
        return Exception(f"{name}: {text}")
