"""The error for mistakes of a user: it says what happened, where, and what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches


class BraidError(ValueError):
    """Raised for anything that a user can correct; the command line prints it without a traceback and exits with 2."""

    def __init__(self, what: str, where: str | None = None, todo: str | None = None):
        self.what, self.where, self.todo = what, where, todo
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The lines of the message."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return [head, self.todo] if self.todo else [head]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest known name, or the names that exist, if they are not a page full."""
    names = sorted(str(n) for n in known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" There are: {', '.join(names)}." if 0 < len(names) <= 60 else ""
