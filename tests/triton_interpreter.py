"""Triton's interpreter without work that it repeats, which is more than half of its time in the tests of kernels."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any


def hasten() -> None:
    """The language is patched once for all kernels, and what follows from a type or a shape is found once.

    And integers are not computed twice to find overflows, which compiled kernels do not do either and small tensors do
    not have.
    """
    from triton.runtime.interpreter import interpreter_builder

    _patch_language_once()
    _call_builtins_directly()
    _find_types_once()
    _wrap_shapes_once()
    _compute_directly()
    _reach_memory_directly()
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


def _call_builtins_directly() -> None:
    """Every operation of a kernel is called through two functions that sort its options; here through one."""
    from triton.runtime import interpreter

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = getattr(member, "__wrapped__", member)

        def new_member(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return called(*args, **kwargs)

        scope.set_attr(obj, name, new_member)

    interpreter._patch_attr = patch_attr


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
    """Every tensor and every type of one wraps its few sizes anew, in objects that nobody changes; here equal shapes
    are one object, and tensors that have it need no broadcasting."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

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

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed
    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_tensor_once


def _make_tensors_directly() -> Callable[[Any, Any, bool], Any]:
    """A function that makes a tensor from its values, its plain type and whether it is a block; types of blocks are
    made once."""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    blocks: dict[tuple[tuple[int, ...], str], Any] = {}

    def made(data: Any, scalar: Any, is_block: bool) -> Any:
        handle = object.__new__(TensorHandle)
        handle.data, handle.dtype, handle.attr = data, scalar, {}
        if not is_block:
            return core.tensor(handle, scalar)
        kind = (data.shape, scalar.name)
        if kind not in blocks:
            blocks[kind] = core.block_type(scalar, data.shape)
        return core.tensor(handle, blocks[kind])

    return made


def _compute_directly() -> None:
    """numpy computes the plain operations at once: of two tensors of one plain type, of integers of two sizes or of a
    tensor and a number of its type, where numpy broadcasts as Triton does, and of a pointer and integers. It gives
    tensors their new axes, and a tensor that has the type it is cast to is left alone. All others go Triton's way."""
    import numpy as np
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    float_type, int_types, bool_name = core.float32.name, {"int32": np.int32, "int64": np.int64}, core.int1.name
    smallest, largest = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    made, cast, full = _make_tensors_directly(), TritonSemantic.cast, TritonSemantic.full

    def as_operand(other: Any, wanted: str) -> Any:
        """The array of the second operand, if it is a tensor of this type or a number that this type holds."""
        if type(other) is core.tensor:
            name = other.dtype.name
            return other.handle.data if name == wanted or (name in int_types and wanted in int_types) else None
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is float and wanted == float_type:
            size = abs(other)
            return np.float32(other) if size == 0 or size == math.inf or smallest <= size <= largest else None
        if type(other) is int and wanted != bool_name and -(2**31) <= other < 2**31:
            return np.float32(other) if wanted == float_type else int_types[wanted](other)
        return None

    def direct(name: str, compute: Callable[[Any, Any], Any], types: set[str], scalar: Any = None) -> None:
        usual = getattr(core.tensor, name).__wrapped__
        swapped = name.startswith("__r")

        def computed(self: Any, other: Any, _semantic: Any = None) -> Any:
            own = self.dtype
            if own.name in types:
                theirs = as_operand(other, own.name)
                if theirs is not None:
                    ours = self.handle.data
                    data = compute(theirs, ours) if swapped else compute(ours, theirs)
                    is_block = self.type.is_block() or (type(other) is core.tensor and other.type.is_block())
                    return made(data, scalar or (own if data.dtype == ours.dtype else other.dtype), is_block)
            elif name == "__add__" and own.is_ptr():
                theirs = as_operand(other, "int64")
                if theirs is not None:
                    size = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
                    data = self.handle.data + np.uint64(size) * theirs.astype(np.uint64)
                    return made(
                        data, own, self.type.is_block() or (type(other) is core.tensor and other.type.is_block())
                    )
            return usual(self, other, _semantic=_semantic)

        setattr(core.tensor, name, core.builtin(functools.wraps(usual)(computed)))

    numbers = {float_type, *int_types}
    for name, compute in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        direct(f"__{name}__", compute, numbers)
        direct(f"__r{name}__", compute, numbers)
    direct("__truediv__", np.divide, {float_type})
    direct("__rtruediv__", np.divide, {float_type})
    direct("__floordiv__", lambda a, b: (a - np.fmod(a, b)) // b, set(int_types))  # towards zero, as compiled kernels
    direct("__mod__", np.fmod, set(int_types))
    direct("__and__", np.bitwise_and, {bool_name})
    for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
        short = {"less": "lt", "greater": "gt", "equal": "eq", "not_equal": "ne"}.get(name, name[0] + "e")
        direct(f"__{short}__", getattr(np, name), numbers, core.int1)

    getitem, whole = core.tensor.__getitem__.__wrapped__, slice(None)

    def with_new_axes(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if type(slices) is tuple and self.type.is_block() and all(part is None or part == whole for part in slices):
            return made(self.handle.data[slices], self.dtype, True)
        return getitem(self, slices, _semantic=_semantic)

    def cast_if_needed(self: Any, value: Any, wanted: Any, rounding: Any = None) -> Any:
        return value if value.dtype is wanted or value.dtype == wanted.scalar else cast(self, value, wanted, rounding)

    def full_of_numbers(self: Any, shape: Any, value: Any, dtype: Any) -> Any:
        if len(shape) and type(value) in (int, float) and dtype.name in numbers:
            sizes = [core._unwrap_if_constexpr(size) for size in shape]
            return made(np.full(sizes, value, interpreter._get_np_dtype(dtype)), dtype, True)
        return full(self, shape, value, dtype)

    core.tensor.__getitem__ = core.builtin(functools.wraps(getitem)(with_new_axes))
    TritonSemantic.cast, TritonSemantic.full = cast_if_needed, full_of_numbers


def _reach_memory_directly() -> None:
    """Blocks of pointers to plain numbers are read and written at once, with a mask of their shape or of one that
    numpy broadcasts to it; all other pointers go Triton's way."""
    import numpy as np
    from triton._C.libtriton import interpreter as memory
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    load, store, made = TritonSemantic.load, TritonSemantic.store, _make_tensors_directly()
    plain = {"fp32", "int32", "int64", "uint8"}

    @functools.cache
    def everywhere(shape: tuple[int, ...]) -> Any:
        return np.ones(shape, dtype=bool)

    @functools.cache
    def nothing(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.zeros(shape, dtype)

    def is_plain(pointer: Any) -> bool:
        return bool(pointer.type.is_block() and pointer.dtype.is_ptr() and pointer.dtype.element_ty.name in plain)

    def as_shaped(value: Any, shape: tuple[int, ...]) -> Any:
        """A tensor's array with the dimensions and sizes of another; None where Triton has to find them."""
        data = value.handle.data
        if data.shape == shape:
            return data
        return np.broadcast_to(data, shape) if data.ndim == len(shape) or not value.type.is_block() else None

    def load_directly(self: Any, pointer: Any, mask: Any, other: Any, *options: Any) -> Any:
        if is_plain(pointer) and not options[0]:
            addresses, kind = pointer.handle.data, pointer.dtype.element_ty
            wanted = everywhere(addresses.shape) if mask is None else as_shaped(mask, addresses.shape)
            dtype = interpreter._get_np_dtype(kind)
            if other is None:
                rest = nothing(addresses.shape, dtype)
            else:
                rest = as_shaped(self.cast(other, kind), addresses.shape)
            if wanted is not None and rest is not None:
                return made(memory.load(addresses, wanted, rest, dtype), kind, True)
        return load(self, pointer, mask, other, *options)

    def store_directly(self: Any, pointer: Any, value: Any, mask: Any, *options: Any) -> Any:
        if is_plain(pointer) and not options[0]:
            addresses = pointer.handle.data
            wanted = everywhere(addresses.shape) if mask is None else as_shaped(mask, addresses.shape)
            data = as_shaped(self.cast(value, pointer.dtype.element_ty), addresses.shape)
            if wanted is not None and data is not None:
                return self.tensor(memory.store(addresses, data, wanted), core.void)
        return store(self, pointer, value, mask, *options)

    TritonSemantic.load, TritonSemantic.store = load_directly, store_directly
