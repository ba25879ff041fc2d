"""Triton's interpreter without work that it repeats, which is more than half of its time in the tests of kernels."""

import dataclasses
import functools
from types import FunctionType
from typing import Any


def hasten() -> None:
    """A kernel that is started patches triton.language, and so does every function that it calls, each time anew: here
    only the first that sees each module. The table of types is made once. And integers are not computed twice to find
    overflows, which compiled kernels do not do either and small tensors do not have.
    """
    from triton.runtime import interpreter

    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    patched, np_dtypes = set[tuple[bool, bool]](), dict[str, Any]()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    @functools.cache
    def modules_seen_by(fn: FunctionType) -> tuple[bool, bool]:
        seen = {id(value) for value in fn.__globals__.values()}
        return id(interpreter.tl) in seen, id(interpreter.tl.core) in seen

    def patch_once(fn: FunctionType) -> Any:
        if modules_seen_by(fn) in patched:
            return Scope()
        patched.add(modules_seen_by(fn))
        return patch_lang(fn)

    def np_dtype_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype_once
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
