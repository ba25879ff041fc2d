"""Triton's interpreter without work that it repeats, which is more than half of its time in the tests of kernels."""

import dataclasses
import functools
import math
from types import FunctionType
from typing import Any


def hasten() -> None:
    """The language is patched once for all kernels, and what follows from a type or a shape is found once.

    And integers are not computed twice to find overflows, which compiled kernels do not do either and small tensors do
    not have.
    """
    from triton.runtime.interpreter import interpreter_builder

    _patch_language_once()
    _find_types_once()
    _wrap_shapes_once()
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """A kernel that is started patches triton.language, so does every function that it calls, and each restores it;
    here the first that sees a module patches it for good, since all kernels of this process are interpreted."""
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set[tuple[bool, bool]]()

    class Lasting(interpreter._LangPatchScope):
        def restore(self) -> None:
            pass

    @functools.cache
    def modules_seen_by(fn: FunctionType) -> tuple[bool, bool]:
        seen = {id(value) for value in fn.__globals__.values()}
        return id(interpreter.tl) in seen, id(interpreter.tl.core) in seen

    def patch_once(fn: FunctionType) -> Any:
        if modules_seen_by(fn) in patched:
            return Lasting()
        patched.add(modules_seen_by(fn))
        return patch_lang(fn)

    interpreter._LangPatchScope = Lasting
    interpreter._patch_lang = patch_once


def _find_types_once() -> None:
    """The interpreter makes the whole table of types to find one."""
    from triton.runtime import interpreter

    np_dtype, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype_once


def _wrap_shapes_once() -> None:
    """Every tensor and every type of one wraps its few sizes anew, in objects that nobody changes."""
    from triton.language import core

    make_type = core.block_type.__init__

    @functools.cache
    def of_type(*sizes: int) -> tuple[Any, int, str]:
        checked = object.__new__(core.block_type)
        make_type(checked, core.int1, list(sizes))
        return checked.shape, checked.numel, str(checked.shape)

    @functools.cache
    def of_tensor(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        self.element_ty = element_ty
        self.shape, self.numel, text = of_type(*sizes)
        self.name = f"<{text}, {element_ty}>"

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*type.shape.values) if type.is_block() else of_tensor()

    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_tensor_once
