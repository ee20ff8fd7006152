"""Compare the values that a forward reads: numbers and strings by value and type, the rest by identity.

Containers are compared by their contents.
"""

from __future__ import annotations

import argparse
import array
import collections
import enum
import itertools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autopar.errors import class_of
from autopar.torch_private import OpOverload, OpOverloadPacket, version_of

NUMBERS = (bool, int, float, complex)
PLAIN = (
    *NUMBERS,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
    type(...),
)
BUILTINS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# classes of the standard library in which users keep options
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
ARRAYS = (array.array, bytearray)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque, types.MappingProxyType)
# classes of the standard library that hold a container in an attribute
HOLDERS = (collections.UserDict, collections.UserList, collections.ChainMap)
LARGEST = 1024  # entries of a container that are compared; a larger one is compared by identity and length
DEEPEST = 8

FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "sympy", "mpmath", "autopar"} - {"__main__"}
_HEAP = 1 << 9  # the flag of classes that are made by a class statement


def is_scalar(value: Any) -> bool:
    """Return whether a value is compared by value and type; NumPy's numbers are too."""
    return isinstance(value, PLAIN) or (
        type(value).__module__ == "numpy" and not hasattr(value, "__len__") and hasattr(value, "dtype")
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a float that can be the value of an input."""
    return type(value) is float and math.isfinite(value)


def is_container(value: Any) -> bool:
    return isinstance(value, (*CONTAINERS, *NAMESPACES)) and not isinstance(value, torch.Size)


def is_users_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, such as a config.

    Its class is the user's or a library's; it may derive from dict.
    """
    cls = type(value)
    if cls in HOLDERS:
        return True
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, enum.Enum, BaseException, *NUMBERS, str, bytes)):
        return False
    if (
        not cls.__flags__ & _HEAP
        or isinstance(value, torch.ScriptObject)
        or (isinstance(value, CONTAINERS) and not hasattr(value, "__dict__"))
    ):
        return False
    root = cls.__module__.partition(".")[0]
    return root == "builtins" or root not in FOREIGN


def is_named(value: Any) -> bool:
    """Return whether a value is a function, a class or a Python module, which names tell in another process, too."""
    owner = getattr(value, "__self__", None) if isinstance(value, types.BuiltinFunctionType) else None
    return isinstance(value, (types.FunctionType, type, types.ModuleType, OpOverload, OpOverloadPacket)) or (
        isinstance(value, BUILTINS) and (owner is None or isinstance(owner, (types.ModuleType, type)))
    )


def is_small_array(value: Any) -> bool:
    """Return whether a value is an array, of NumPy's or Python's, that is compared by its elements."""
    if isinstance(value, ARRAYS):
        return len(value) <= LARGEST
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and value.size <= LARGEST


def elements_of(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, the shape and the bytes of a small array."""
    if isinstance(value, ARRAYS):
        return getattr(value, "typecode", "B"), (len(value),), bytes(value)
    return str(value.dtype), value.shape, value.tobytes()


def members(value: Any) -> Iterator[Any]:
    """Yield the members of a container."""
    if isinstance(value, NAMESPACES):
        value = vars(value)
    yield from value.values() if isinstance(value, Mapping) else value


def is_fixed(value: Any) -> bool:
    """Return whether the same object always has the same value: it is no tensor, and cannot be written to."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_fixed, value))
    return not isinstance(value, torch.Tensor) and not is_container(value) and not is_small_array(value)


class Contents:
    """A container and the containers inside of it, as they are now, to check by identity that no member has changed."""

    def __init__(self, value: Any) -> None:
        self._contents: list[tuple[Any, list[Any]]] = []
        self.fixed = True  # False: it has members that can be written in place
        self._open(value, 0)

    def hold(self) -> bool:
        return all(
            len(members) == len(before) and all(map(operator.is_, members, before))
            for members, before in self._contents
        )

    def _open(self, value: Any, depth: int) -> None:
        if not is_container(value):
            self.fixed &= not isinstance(value, torch.Tensor) and not is_small_array(value)
            return
        inside = vars(value) if isinstance(value, NAMESPACES) else value
        self.fixed &= not isinstance(value, threading.local)  # each thread has another dict
        if len(inside) > LARGEST or depth > DEEPEST:
            return
        self._contents.append((inside, list(inside)))
        if isinstance(inside, Mapping):
            self._contents.append((inside.values(), list(inside.values())))
        for member in members(value):
            self._open(member, depth + 1)


def frozen(value: Any, skipped: Callable[[Any], bool] = lambda value: False, depth: int = 0) -> Any:
    """Return a form of a value to compare by ``==``: numbers and strings with their types, NaN equal to itself.

    Args:
        skipped: whether a value is left out, such as a parameter of the model in a list.
    """
    if skipped(value):
        return None
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # distinguishes 0.0 and -0.0; nan equals nan
    if is_scalar(value):
        return type(value), value if isinstance(value, PLAIN) and not isinstance(value, slice) else repr(value)
    if isinstance(value, torch.Tensor):
        return _Same(value), version_of(value)
    if is_small_array(value):
        return type(value), *elements_of(value)
    if not is_container(value):
        return _Same(value)
    if len(vars(value) if isinstance(value, NAMESPACES) else value) > LARGEST or depth > DEEPEST:
        return _Same(value), len(value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(frozen(member, skipped, depth + 1) for member in value)
    content = tuple(frozen(member, skipped, depth + 1) for member in members(value))
    keys = (
        tuple(vars(value) if isinstance(value, NAMESPACES) else value)
        if isinstance(value, (Mapping, *NAMESPACES))
        else ()
    )
    return type(value), keys, content


class _Same:
    """Equal only to a wrapper of the same object, or of the same method of the same object."""

    __slots__ = ("owner", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.owner = value, None
        if isinstance(value, types.MethodType):
            self.value, self.owner = value.__func__, value.__self__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value and self.owner is other.owner

    def __hash__(self) -> int:
        return id(self.value)


def shown(value: Any, depth: int = 0) -> str:
    """Return a value as text for an error or a report, the same on every rank."""
    if is_container(value) and depth <= DEEPEST:
        inside = vars(value) if isinstance(value, NAMESPACES) else value
        texts = [shown(member, depth + 1) for member in itertools.islice(members(value), LARGEST)]
        texts = (
            [f"{key!r}: {text}" for key, text in zip(inside, texts, strict=False)]
            if isinstance(inside, Mapping)
            else texts
        )
        left, right = (
            "{}" if isinstance(inside, (Mapping, set, frozenset)) else "()" if isinstance(value, tuple) else "[]"
        )
        return _short(f"{left}{', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)}{right}")
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, FUNCTIONS):
        return f"the function {value.__name__ if isinstance(value, types.BuiltinFunctionType) else value.__qualname__}"
    if not is_scalar(value) and repr(value) != "missing":
        return class_of(value)
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
