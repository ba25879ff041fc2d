"""Strict decoding of plain data into typed dataclasses, and back; errors list all problems, each with its path."""

import dataclasses
import types
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import BraidError, did_you_mean
from .registry import ADVICE, Choice, Registry


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
    """`data` (from YAML or JSON) as an instance of the dataclass `cls`; raises one BraidError with every problem."""
    problems: list[str] = []
    value = _decode(cls, data, where, problems)
    if problems:
        raise BraidError("\n".join(sorted(problems, key=ADVICE.__eq__)))  # advice comes last
    return value


def encode(value: Any) -> Any:
    """The plain data that `decode` reads back to an equal value."""
    if hasattr(value, "to_shorthand"):
        return value.to_shorthand()
    if isinstance(value, Choice):
        return {"kind": value.kind, **encode(value.options)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value), include_extras=True)
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
    if get_origin(hint) is Annotated:
        part = part_of(hint)
        return (
            _decode_choice(part, data, where, problems) if part else _decode(get_args(hint)[0], data, where, problems)
        )
    if hint is Any:
        return data
    origin = get_origin(hint)
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
    return _decode_scalar(hint, data, where, problems)


def _decode_dataclass(cls: Any, data: Any, where: str, problems: list[str]) -> Any:
    if hasattr(cls, "from_shorthand") and not isinstance(data, (dict, cls, type(None))):
        try:
            data = cls.from_shorthand(data)  # a mapping or an instance
        except BraidError as error:
            advice = f". {error.todo}" if error.todo else ""
            problems.append(f"{_at(where)}{error.what.rstrip('.') if advice else error.what}{advice}")
            return None
    if isinstance(data, cls):
        return data
    data = {} if data is None else data
    if not isinstance(data, dict):
        problems.append(f"{_at(where)}expected a mapping, got {_show(data)}")
        return None
    before = len(problems)
    hints = get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in data:
        if key not in fields:
            problems.append(f"{_at(where)}unknown key '{key}'.{did_you_mean(key, fields)}")
    values = {}
    for name, declared in fields.items():
        path = f"{where}.{name}" if where else name
        if name in data:
            values[name] = _decode(hints[name], data[name], path, problems)
        elif declared.default is MISSING and declared.default_factory is MISSING:
            problems.append(f"{path}: missing; it has no default")
        elif (part := part_of(hints[name])) is not None and isinstance(declared.default, str):
            values[name] = _decode_choice(part, declared.default, path, problems)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except BraidError as error:  # from __post_init__, where a dataclass checks its values
        problems.extend(f"{_at(where)}{line}" for line in error.lines())
        return None


def _decode_choice(part: PartOf, data: Any, where: str, problems: list[str]) -> Any:
    if isinstance(data, Choice):
        return data
    kind, options = part.default, data
    if isinstance(data, str):
        kind, options = data, {}
    elif isinstance(data, dict) and part.by_key:
        if len(data) != 1:
            problems.append(f"{where}: expected one {part.registry.noun} name with its options, got {_show(data)}")
            return None
        kind, options = next(iter(data.items()))
    elif isinstance(data, dict):
        options = {k: v for k, v in data.items() if k != "kind"}
        kind = data.get("kind", part.default)
    elif data is None and part.default is not None:
        options = {}
    else:
        problems.append(f"{where}: expected a {part.registry.noun} name or a mapping, got {_show(data)}")
        return None
    if kind is None:
        problems.append(f"{where}: no kind of {part.registry.noun} is given.{did_you_mean('', part.registry)}")
        return None
    try:
        cls = part.registry[str(kind)]
    except BraidError as error:
        problem, *advice = error.lines()
        problems.append(f"{where}: {problem}")
        if "Did you mean" not in problem:  # the name is not merely misspelled
            problems.extend(line for line in advice if line not in problems)
        return None
    inside = f"{where}.{kind}" if part.by_key else where
    return Choice(str(kind), _decode_dataclass(cls.Config, options, inside, problems))


def _decode_union(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    arms = get_args(hint)
    if data is None and type(None) in arms:
        return None
    rest = [a for a in arms if a is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], data, where, problems)
    for arm in rest:
        trial: list[str] = []
        value = _decode(arm, data, where, trial)
        if not trial:
            return value
    problems.append(f"{_at(where)}expected {' or '.join(_name(a) for a in rest)}, got {_show(data)}")
    return None


def _decode_literal(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    allowed = get_args(hint)
    if data in allowed and type(data) in {type(a) for a in allowed}:
        return data
    hint_text = did_you_mean(data, [str(a) for a in allowed]) if isinstance(data, str) else ""
    problems.append(f"{_at(where)}{_show(data)} is not one of {', '.join(map(str, allowed))}.{hint_text}")
    return None


def _decode_sequence(hint: Any, origin: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, (list, tuple)):
        problems.append(f"{_at(where)}expected a list, got {_show(data)}")
        return None
    args = [a for a in get_args(hint) if a is not Ellipsis]
    if origin is tuple and len(args) > 1 and len(args) != len(data):
        problems.append(f"{_at(where)}expected {len(args)} values, got {len(data)}")
        return None
    inner = args if len(args) == len(data) and origin is tuple else args[:1] * len(data)
    return origin(_decode(a, d, f"{where}[{i}]", problems) for i, (a, d) in enumerate(zip(inner, data, strict=True)))


def _decode_mapping(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{_at(where)}expected a mapping, got {_show(data)}")
        return None
    inner = get_args(hint)[1]
    return {str(k): _decode(inner, v, f"{where}.{k}" if where else str(k), problems) for k, v in data.items()}


def _decode_scalar(hint: Any, data: Any, where: str, problems: list[str]) -> Any:
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if hint is float and isinstance(data, str):
        try:
            return float(data)  # YAML 1.1 reads 3e-4 as text
        except ValueError:
            pass
    if isinstance(data, hint) and not (hint is int and isinstance(data, bool)):
        return data
    problems.append(f"{_at(where)}expected {_name(hint)}, got {_show(data)}")
    return None


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _name(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    return words.get(hint, words.get(get_origin(hint), str(getattr(hint, "__name__", hint))))


def _show(value: Any) -> str:
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
