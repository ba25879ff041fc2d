"""Strict decoding of plain data into typed dataclasses, and back; errors list all problems, each with its path."""

import dataclasses
import sys
import types
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import BraidError, did_you_mean
from .ranges import MAX_INTEGER, MAX_ITEMS, Range
from .registry import ADVICE, Choice, Registry

NUMBERS = {
    int: Range(at_least=-MAX_INTEGER, at_most=MAX_INTEGER),
    float: Range(at_least=-sys.float_info.max, at_most=sys.float_info.max),
}
"""The ranges of numbers whose fields declare none."""
WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class PartOf:
    """Marks a field as a choice from a registry: `Annotated[Choice, PartOf(norms, "layer")]`.

    The data is a name (`rms`), or a mapping with `kind` and the part's own options (`{kind: rms, eps: 1e-6}`).
    With `by_key` it is a name or a mapping of one key (`block: {layers: 2}`), which reads better in a list.
    """

    registry: Registry
    default: str | None = None
    by_key: bool = False


def decode(cls: Any, data: Any, where: str = "") -> Any:
    """`data` (from YAML or JSON) as an instance of the dataclass `cls`; raises one BraidError with every problem. Data
    may be, or contain, what is decoded already or was built in Python: its values are checked, and it is kept. A type
    of a field will do too: `decode(Count, tokens, "tokens")` checks an argument."""
    problems: list[str] = []
    value = _decode(cls, data, where, problems)
    if problems:
        raise BraidError("\n".join(sorted(problems, key=ADVICE.__eq__)))  # advice comes last
    return value


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, with their ranges and registries."""
    return get_type_hints(cls, include_extras=True)


def encode(value: Any) -> Any:
    """The plain data that `decode` reads back to an equal value."""
    if hasattr(value, "to_shorthand"):
        return value.to_shorthand()
    if isinstance(value, Choice):
        return {"kind": value.kind, **encode(value.options)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = type_hints(type(value))
        return {f.name: _encode_as(hints[f.name], getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    return value


def _encode_as(hint: Any, value: Any) -> Any:
    if get_origin(hint) is list and isinstance(value, list):
        return [_encode_as(get_args(hint)[0], v) for v in value]
    if isinstance(value, Choice) and part_of(hint) is not None and part_of(hint).by_key:  # type: ignore[union-attr]
        return {value.kind: encode(value.options)}
    return encode(value)


def part_of(hint: Any) -> PartOf | None:
    """The PartOf mark of an annotation, also through `X | None`."""
    if get_origin(hint) is Annotated:
        return next((m for m in get_args(hint)[1:] if isinstance(m, PartOf)), None)
    if get_origin(hint) in (Union, types.UnionType):
        return next((p for p in map(part_of, get_args(hint)) if p), None)
    return None


def _decode(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    origin = get_origin(hint)
    if origin is Annotated and (part := part_of(hint)) is not None:
        return _decode_choice(part, data, where, problems)
    if plain_type(hint) in NUMBERS:
        return _decode_number(hint, data, where, problems)
    if origin is Annotated:
        return _decode(plain_type(hint), data, where, problems)
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(hint, data, where, problems)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where, problems)
    if origin is Literal:
        return _decode_literal(hint, data, where, problems)
    if origin in (list, tuple):
        return _decode_sequence(hint, origin, data, where, problems)
    if origin is dict:
        return _decode_mapping(hint, data, where, problems)
    if isinstance(data, hint):  # text, or true and false
        return data
    quotes = ": write it in quotes" if hint is str and isinstance(data, (int, float)) else ""
    return _refuse(problems, where, f"expected {_name(hint)}, got {_show(data)}{quotes}")


def _decode_dataclass(cls: Any, data: Any, where: str, problems: list[str], also: tuple[str, ...] = ()) -> Any:
    """`also` and the class's `other_keys` are keys that are read before, and that the list of what exists names too."""
    if hasattr(cls, "from_shorthand") and not isinstance(data, (dict, cls, type(None))):
        try:
            data = cls.from_shorthand(data)  # a mapping or an instance
        except BraidError as error:
            advice = f". {error.todo}" if error.todo else ""
            return _refuse(problems, where, f"{error.what.rstrip('.') if advice else error.what}{advice}")
    if isinstance(data, cls):
        return _checked(data, where, problems)
    data = {} if data is None else data
    if not isinstance(data, dict):
        return _refuse(problems, where, f"expected a mapping, got {_show(data)}")
    before = len(problems)
    hints = type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in data:
        if key not in fields:
            known = (*fields, *also, *getattr(cls, "other_keys", ()))
            _refuse(problems, where, f"unknown key '{key}'.{did_you_mean(key, known)}")
    values = {}
    for name, declared in fields.items():
        path = _join(where, name)
        if name in data:
            values[name] = _decode(hints[name], data[name], path, problems)
        elif declared.default is MISSING and declared.default_factory is MISSING:
            _refuse(problems, path, "missing; it has no default")
        elif (part := part_of(hints[name])) is not None and isinstance(declared.default, str):
            values[name] = _decode_choice(part, declared.default, path, problems)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except BraidError as error:  # from __post_init__, where a dataclass checks its values
        return _add_error(problems, where, error)


def _add_error(problems: list[str], where: str, error: BraidError) -> None:
    """Tell an error at its address, and the advice, which is for all addresses, unless a name is merely misspelled."""
    problem, *advice = error.lines()
    _refuse(problems, where, problem)
    if "Did you mean" not in problem:
        problems.extend(line for line in advice if line not in problems)


def _checked(instance: Any, where: str, problems: list[str]) -> Any:
    """A dataclass whose fields are checked as decoding would check them."""
    hints = type_hints(instance.__class__)
    for name in (f.name for f in dataclasses.fields(instance)):
        _decode(hints[name], getattr(instance, name), _join(where, name), problems)
    return instance


def _decode_choice(part: PartOf, data: Any, where: str, problems: list[str]) -> Any:
    if isinstance(data, Choice):
        _checked(data.options, _join(where, data.kind) if part.by_key else where, problems)
        return data
    kind, options, noun = part.default, data, part.registry.noun
    if isinstance(data, str):
        kind, options = data, {}
    elif isinstance(data, dict) and part.by_key:
        if len(data) != 1:
            return _refuse(problems, where, f"expected one {noun} name with its options, got {_show(data)}")
        kind, options = next(iter(data.items()))
    elif isinstance(data, dict):
        options = {k: v for k, v in data.items() if k != "kind"}
        kind = data.get("kind", part.default)
    elif data is None and part.default is not None:
        options = {}
    else:
        return _refuse(problems, where, f"expected a {noun} name or a mapping, got {_show(data)}")
    if kind is None:
        return _refuse(problems, where, f"no kind of {noun} is given.{did_you_mean('', part.registry)}")
    try:
        cls = part.registry[str(kind)]
    except BraidError as error:
        return _add_error(problems, where, error)
    inside = _join(where, kind) if part.by_key else where
    return Choice(str(kind), _decode_dataclass(cls.Config, options, inside, problems, () if part.by_key else ("kind",)))


def _decode_union(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    arms = get_args(hint)
    if data is None and type(None) in arms:
        return None
    rest = [a for a in arms if a is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], data, where, problems)
    found: list[str] = []
    for arm in rest:
        trial: list[str] = []
        value = _decode(arm, data, where, trial)
        if not trial:
            return value
        kind = plain_type(arm)
        kind = type(get_args(kind)[0]) if get_origin(kind) is Literal else kind
        if _as_number(kind, data) is not None if kind in NUMBERS else isinstance(data, get_origin(kind) or kind):
            found = found or trial  # data of this type: what is wrong is inside of it
    if not found:
        return _refuse(problems, where, f"expected {' or '.join(_name(a) for a in rest)}, got {_show(data)}")
    return problems.extend(found)


def _decode_literal(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    allowed = get_args(hint)
    if data in allowed and type(data) in map(type, allowed):
        return data
    tip = did_you_mean(data, allowed) if isinstance(data, str) else ""
    tip = tip if "?" in tip else ""  # what there is follows anyway
    return _refuse(problems, where, f"{_show(data)} is not one of {', '.join(map(str, allowed))}.{tip}")


def _decode_sequence(hint: Any, origin: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, (list, tuple)):
        return _refuse(problems, where, f"expected a list, got {_show(data)}")
    if _is_too_long(data, where, problems):
        return None
    args = [a for a in get_args(hint) if a is not Ellipsis]
    if origin is tuple and len(args) > 1 and len(args) != len(data):
        return _refuse(problems, where, f"expected {len(args)} values, got {len(data)}")
    inner = args if len(args) == len(data) and origin is tuple else args[:1] * len(data)
    return origin(_decode(a, d, f"{where}[{i}]", problems) for i, (a, d) in enumerate(zip(inner, data, strict=True)))


def _decode_mapping(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _refuse(problems, where, f"expected a mapping, got {_show(data)}")
    if _is_too_long(data, where, problems):
        return None
    inner = get_args(hint)[1]
    return {str(k): _decode(inner, v, _join(where, k), problems) for k, v in data.items()}


def _is_too_long(data: Any, where: str, problems: list[str]) -> bool:
    if len(data) > MAX_ITEMS:
        _refuse(problems, where, f"expected at most {MAX_ITEMS} elements, got {len(data)}")
    return len(data) > MAX_ITEMS


def _decode_number(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    """The one place that checks numbers: the type, and the range that the field declares."""
    kind = plain_type(hint)
    number = _as_number(kind, data)
    for allowed in (range_of(hint) or NUMBERS[kind], NUMBERS[kind]):
        if number is None or number not in allowed:
            expected = _name(hint) if number is None else f"{WORDS[kind]} {allowed}"
            return _refuse(problems, where, f"expected {expected}, got {_show(data)}")
    return number


def _as_number(kind: type, data: Any) -> float | None:
    """The number that is written; None for what is no number of this kind."""
    if isinstance(data, bool) or not isinstance(data, int if kind is int else (int, float, str)):
        return None
    try:
        return kind(data)  # YAML 1.1 reads 3e-4 as text
    except (ValueError, OverflowError):
        return None


def range_of(hint: Any) -> Range | None:
    """The range that an annotation declares."""
    return next((mark for mark in get_args(hint)[1:] if isinstance(mark, Range)), None)


def plain_type(hint: Any) -> Any:
    """An annotation's type without its marks."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _refuse(problems: list[str], where: str, problem: str) -> None:
    problems.append(f"{where}: {problem}" if where else problem)


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _name(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    if allowed := range_of(hint):
        return f"{WORDS[plain_type(hint)]} {allowed}"
    hint = plain_type(hint)
    return WORDS.get(hint, WORDS.get(get_origin(hint), str(getattr(hint, "__name__", hint))))


def _show(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
