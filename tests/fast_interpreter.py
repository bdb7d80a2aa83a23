"""Replacements for slow functions of Triton's interpreter, which return the same values in less than half of the time.

Most of the time of a kernel there goes to descriptions of types, which it builds again for every operation."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter


def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # without it the interpreter computes checks for overflows and ignores the results
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_get_np_dtype", _make_dtype_lookup())
    patch.setattr(core, "_unwrap_if_constexpr", _unwrap)
    patch.setattr(core.tuple, "__init__", _init_tuple)
    patch.setattr(core.tuple, "type", property(_tuple_type, _set_tuple_type), raising=False)
    patch.setattr(core.tensor, "__init__", _init_tensor)
    patch.setattr(core.block_type, "with_element_ty", _make_type_cache())
    patch.setattr(core.block_type, "to_ir", _cached_ir(core.block_type.to_ir))


def _make_dtype_lookup() -> Any:
    lookup = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)

    def find(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return pointer if isinstance(scalar, core.pointer_type) else lookup(scalar)

    return find


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    if kind is int or kind is core.tensor or value is None:
        return value
    if isinstance(value, list):
        return [_unwrap(each) for each in value]
    if isinstance(value, builtins.tuple):
        return builtins.tuple([_unwrap(each) for each in value])
    if isinstance(value, core.tuple):
        return core.tuple([_unwrap(each) for each in value])
    return value.value if isinstance(value, core.constexpr) else value


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    self._known_type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)


def _tuple_type(self: Any) -> Any:
    """Return the type of a tuple, which is only computed here, when it is needed."""
    if self._known_type is None:
        self._known_type = core._type_for_tuple_values(self.values)
    return self._known_type


def _set_tuple_type(self: Any, value: Any) -> None:
    self._known_type = value


@functools.cache
def _describe_shape(shape: builtins.tuple[int, ...]) -> Any:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _describe_shape(builtins.tuple(type.shape) if type.is_block() else ())


def _make_type_cache() -> Any:
    @functools.cache
    def make(element: Any, shape: builtins.tuple[int, ...]) -> Any:
        return core.block_type(element, list(shape))

    def with_element(self: Any, element: Any) -> Any:
        return core.block_type(element, self.shape) if element.is_ptr() else make(element, builtins.tuple(self.shape))

    return with_element


def _cached_ir(to_ir: Any) -> Any:
    def cached(self: Any, builder: Any) -> Any:
        if "_ir" not in self.__dict__:
            self._ir = to_ir(self, builder)
        return self._ir

    return cached
