"""What separates the documents of text files: one rule for all of them, or one for each pattern of file names."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from braidlm.core.errors import BraidError

Separator = str | dict[str, str]
"""`blank` (lines), `lines`, `file` or any other text; or these by patterns of file names, of which the first counts."""
DEFAULT = "blank"


def separator_of(path: Path | str, separator: Separator) -> str:
    """The rule for one file."""
    if isinstance(separator, str):
        return separator
    return next((rule for pattern, rule in separator.items() if _matches(path, pattern)), DEFAULT)


def parse_separators(items: Sequence[str]) -> Separator:
    """From `S` or several `PATTERN=S`, as options of a command; \\n and \\t stand for what a shell cannot easily pass.

    A pattern has a dot or a star in it, so that `===` is a text and `*.txt====` that text for some files.
    """
    rules: dict[str, str] = {}
    for item in items:
        pattern, equals, rule = item.partition("=")
        named = equals and ("." in pattern or "*" in pattern)
        rules[pattern if named else "*"] = unescaped(rule if named else item)
    # A rule for all files comes last, wherever it was given.
    every = rules.pop("*", None)
    if not rules:
        return DEFAULT if every is None else every
    return rules | ({} if every is None else {"*": every})


def check_separator(separator: Separator) -> None:
    """Refuse a separator that is empty."""
    for rule in [separator] if isinstance(separator, str) else separator.values():
        if not rule:
            raise BraidError("the separator is empty", todo="Choose blank, lines, file, or any text.")


def unmatched_patterns(separator: Separator, paths: Sequence[str]) -> list[str]:
    """The patterns that no file has, which are most probably misspelled."""
    patterns = [] if isinstance(separator, str) else [pattern for pattern in separator if pattern != "*"]
    return [pattern for pattern in patterns if not any(_matches(path, pattern) for path in paths)]


def unescaped(text: str) -> str:
    """A text with \\n and \\t replaced."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _matches(path: Path | str, pattern: str) -> bool:
    """By the file's name, or the end of its path if the pattern has folders; with or without a last suffix (`.gz`)."""
    path = Path(path)
    names = (path.as_posix(), path.with_suffix("").as_posix())
    return any(fnmatch(name, f"*/{pattern}") or name == pattern for name in names)
