"""The fenced blocks of a Markdown page that are marked to be run or written.

    <!-- test -->            the bash or python block below is run
    <!-- file mine.yaml -->  the block below becomes that file first
    <!-- test; 5000 => 50 -->  the same with texts replaced, so that a test is quick; any number of them

The blocks of a page are one story: they share a folder and run in order.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_MARKED = re.compile(
    r"^<!-- (?P<mark>test|file)(?P<file> \S+)?(?P<changes>(?:; [^;]+? => [^;]*?)*) -->\n+"
    r"^```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^<!-- (test|file)\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One marked block."""

    language: str
    body: str
    file: str | None
    """The file it is the content of; None for a block to run."""
    line: int


def marked_blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, with their replacements made."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _MARKED.finditer(text):
        body = match["body"]
        for change in filter(None, match["changes"].split("; ")):
            old, new = change.split(" => ")
            assert old in body, f"{page}: '{old}' is to be replaced and does not occur"
            body = body.replace(old, new)
        file = match["file"].strip() if match["file"] else None
        assert (file is not None) == (match["mark"] == "file"), f"{page}: a file needs a name, a test has none"
        found.append(Block(match["language"], body, file, text.count("\n", 0, match.start("body"))))
    assert len(found) == len(_MARK.findall(text)), f"{page}: a mark has no fenced block below it, or is misspelled"
    return found
