"""Triton's interpreter without work that it repeats, which is half of its time in the tests of kernels."""

import dataclasses
from types import FunctionType
from typing import Any


def hasten() -> None:
    """A kernel that is started patches triton.language, and so does every function that it calls, each time anew: here
    only the first that sees each module. And integers are not computed twice to find
    overflows, which compiled kernels do not do either and small tensors do not have.
    """
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set[frozenset[str]]()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(fn: FunctionType) -> Any:
        seen = frozenset(
            module.__name__
            for module in (interpreter.tl, interpreter.tl.core)
            if any(value is module for value in fn.__globals__.values())
        )
        if seen in patched:
            return Scope()
        patched.add(seen)
        return patch_lang(fn)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
