"""The base class of formats whose data is a list of items."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class TaskItems(Generic[T]):
    """The items of a task, read and checked."""

    items: list[T]
    sha256: str

    @property
    def count(self) -> int:
        return len(self.items)
