"""What `torch.compile` leaves alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep a function out of compiled graphs. `torch.compiler.disable` as a decorator would import the compiler, which
    takes over a second, with the file; this imports nothing where nothing is compiled."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        return torch.compiler.disable(function)(*args, **options)

    return cast(Function, run)
