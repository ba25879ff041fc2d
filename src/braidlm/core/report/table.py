"""A table as files: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.files import write_text


@dataclass
class Table:
    """A named table."""

    name: str
    """Of its files."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [[*self.columns], ["---"] * len(self.columns), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)

    def csv(self) -> str:
        return csv_text(self.columns, self.rows)

    def write(self, folder: Path) -> None:
        """NAME.md and NAME.csv."""
        write_text(folder / f"{self.name}.md", f"# {self.title}\n\n{self.markdown()}")
        write_text(folder / f"{self.name}.csv", self.csv())


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Comma-separated values with every digit; nothing for None."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
