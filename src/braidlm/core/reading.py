"""Reading files that somebody else may have written: bounded in size and depth, of the expected type, or a BraidError.

Every JSON and YAML file of a model folder, a run, a packed data set or a recipe is read here.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import yaml

from braidlm.core.errors import BraidError

FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML by libyaml, which reads ten times as fast as Python does. Its messages do not show the line they speak of: what
it refuses is read again by PyYAML's own loader."""
MAX_BYTES = 256 << 20
"""The largest tokenizers have 40 MB; a larger file is none of ours."""
BLOCK = 1 << 20
MAX_YAML_BYTES = 1 << 20
MAX_DEPTH = 100
"""Levels of nesting; what walks the values later may recurse."""
MAX_YAML_NODES = 100_000
"""Values of a YAML document with its aliases written out."""
KINDS = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}
REASONS = {
    errno.ENOENT: "this file does not exist",
    errno.ENOTDIR: "a file stands where a folder is expected",
    errno.EISDIR: "this is a folder, and a file is expected",
    errno.EACCES: "no permission to open this",
    errno.EPERM: "no permission to open this",
    errno.EROFS: "this disk is read-only",
    errno.ELOOP: "these links lead in a circle",
    errno.ENAMETOOLONG: "this name is too long",
}


def system_error(error: OSError | ValueError, path: Path | str) -> BraidError:
    """What the system said about a path, in words; a ValueError is its word for a name with a zero byte."""
    if not isinstance(error, OSError):
        return BraidError("this is not the name of a file or folder", ascii(str(path)))
    if error.errno == errno.ENOENT and os.path.islink(path):
        return BraidError("this link leads to nothing", str(path), "Restore what it pointed to, or remove it.")
    return BraidError(REASONS.get(error.errno or 0, f"the system says: {error.strerror or error}"), str(path))


@contextmanager
def explained_system_errors(path: Path | str) -> Iterator[None]:
    """Let a path that cannot be opened be a BraidError."""
    try:
        yield
    except BraidError:
        raise
    except (OSError, ValueError) as error:
        raise system_error(error, path) from error


def given_path(name: Path | str) -> Path:
    """A path as a user writes it, with `~`; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(name))


def existing_folder(path: Path | str) -> Path:
    """A folder that is there and may be listed, or an error that says what is in its place."""
    folder = given_path(path)
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        todo = "Rename it; safetensors and tokenizers cannot open another."
        raise BraidError("the name of this folder is not UTF-8", ascii(str(path)), todo) from None
    try:
        with os.scandir(folder):
            pass
    except (OSError, ValueError) as error:
        explained = system_error(error, path)
        what = "there is no such folder" if explained.what == REASONS[errno.ENOENT] else explained.what
        raise BraidError(what, explained.where, explained.todo) from error
    return folder


def open_plain(path: Path | str) -> BinaryIO:
    """A plain file, open to be read; a pipe or a device would let us wait, or never end."""
    with explained_system_errors(path):
        file = open(path, "rb", opener=_at_once)  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise BraidError("this is not a plain file", str(path))
        return file


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_openable(path: Path | str) -> None:
    """Say what keeps a file that is there from being read: its permissions, or a link in a circle."""
    with explained_system_errors(path):
        if os.path.islink(path) or os.path.exists(path):
            open_plain(path).close()


def read_bytes(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """A whole plain file."""
    with explained_system_errors(path), open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise BraidError(f"this file has {size:,} bytes; at most {max_bytes:,} are read", str(path))
        return read_bounded(file, path, max_bytes)


def read_bounded(file: IO[bytes], path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """All that an open file holds, of which nobody knows before how much it is: it may be packed."""
    blocks, size = [], 0
    while block := file.read(BLOCK):
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            raise BraidError(f"this file holds more than {max_bytes:,} bytes, and no more are read", str(path))
    return b"".join(blocks)


def read_text(path: Path | str, max_bytes: int = MAX_BYTES) -> str:
    """A whole file of UTF-8 text."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", str(path)) from None


def read_json(path: Path | str, expect: type = dict) -> Any:
    """The JSON value of a file, which must be of the expected type; nearly every file of ours holds an object."""
    return parse_json(read_text(path), str(path), expect)


def parse_json(text: str, where: str, expect: type = dict) -> Any:
    """A JSON value of the expected type."""
    try:
        value = _loads(text)
    except ValueError as error:
        raise BraidError(f"this is not valid JSON ({error})", where) from None
    if not isinstance(value, expect):
        raise BraidError(f"expected {KINDS[expect]}, found {_kind(value)}", where)
    return value


def parse_row(line: str, where: str | None = None, todo: str | None = None) -> dict[str, Any]:
    """The object that a line of JSONL holds."""
    try:
        row = _loads(line)
    except ValueError as error:
        reason = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BraidError(f"this line is not JSON ({reason})", where, todo) from None
    if not isinstance(row, dict):
        raise BraidError(f"this line is not an object but {json.dumps(row)[:40]}", where, todo)
    return row


def read_yaml(path: Path | str, expect: type = dict) -> Any:
    """The YAML value of a file, which must be of the expected type."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path), expect)


def parse_yaml(text: str, where: str, expect: type = dict) -> Any:
    """A YAML value of the expected type, made of plain data only."""
    check_yaml(text, where)
    try:
        try:
            value = yaml.load(text, Loader=FastLoader)
        except yaml.YAMLError:
            value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a date of month 13 is a ValueError
        raise BraidError(f"this is not valid YAML: {error}", where) from None
    if not isinstance(value, expect):
        raise BraidError(f"expected {KINDS[expect]}, found {_kind(value)}", where)
    return value


def check_yaml(text: str, where: str) -> None:
    """Refuse YAML that is not well formed, too deep, or too large once its aliases are written out.

    The events of the parser are counted, since building the values is what a hostile document makes expensive.
    """
    try:
        try:
            _check_events(yaml.parse(text, Loader=FastLoader), where)
        except yaml.YAMLError:
            _check_events(yaml.parse(text, Loader=yaml.SafeLoader), where)
    except (yaml.YAMLError, RecursionError) as error:
        raise BraidError(f"this is not valid YAML: {error}", where) from None


def _check_events(events: Iterator[yaml.Event], where: str) -> None:
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    nodes = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise BraidError(f"the alias '*{event.anchor}' stands for nothing complete", where)
            nodes += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes |= {anchor: nodes - before} if anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            sizes |= {event.anchor: 1} if event.anchor else {}
            nodes += 1
        if len(opened) > MAX_DEPTH:
            raise BraidError(f"this YAML is nested more than {MAX_DEPTH} levels deep", where)
        if nodes > MAX_YAML_NODES:
            raise BraidError(f"this YAML holds more than {MAX_YAML_NODES:,} values", where)


def _loads(text: str) -> Any:
    """A JSON value, or a ValueError that says why there is none: bad syntax, depth, a number of thousands of digits."""
    too_deep = f"it is nested more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [node for node in level if isinstance(node, (dict, list))]
        if not containers:
            return value
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    raise ValueError(too_deep)


def _kind(value: Any) -> str:
    return "nothing" if value is None else KINDS.get(type(value), f"a {type(value).__name__}")
