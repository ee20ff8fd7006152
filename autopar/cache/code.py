"""Digest the code of functions and classes, and find the code of a function again in another process.

A digest has the bytecode and everything beside it: names, constants, defaults of nested functions, file and lines. So a
function that has moved by a line is another one, because programs quote lines.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from autopar.capture.guards.namespaces import is_users_file

DEEPEST = 6  # functions in closures of functions in closures …
_DIGESTS: dict[int, tuple[types.CodeType, str]] = {}


def code_digest(code: types.CodeType) -> str:
    """Return the digest of a code object and of those inside of it."""
    known = _DIGESTS.get(id(code))
    if known is None:
        known = code, hashlib.blake2b(repr(_facts(code)).encode(), digest_size=16).hexdigest()
        _DIGESTS[id(code)] = known  # the code is kept, so that its id stays its own
    return known[1]


def _facts(code: types.CodeType) -> tuple[Any, ...]:
    return (
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_name, code.co_filename,
        code.co_firstlineno, tuple(code.co_lines()), getattr(code, "co_exceptiontable", b""),
        tuple(map(_constant, code.co_consts)),
    )  # fmt: skip


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _facts(value)
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, map(_constant, value)))  # their order differs from process to process
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return type(value).__name__, repr(value)


def functions_in(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield the functions that a value is made of: wrapped ones, those in closures, and the parts of a property."""
    if depth > DEEPEST:
        return
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            try:
                yield from functions_in(cell.cell_contents, depth + 1)
            except ValueError:  # an empty cell
                continue
        if hasattr(value, "__wrapped__"):
            yield from functions_in(value.__wrapped__, depth + 1)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from functions_in(value.__func__, depth + 1)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_in(part, depth + 1)
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from functions_in(value.func, depth + 1)
    elif isinstance(wrapped := _wrapped(value), types.FunctionType):
        yield from functions_in(wrapped, depth + 1)


def _wrapped(value: Any) -> Any:
    try:
        return vars(value).get("__wrapped__")  # of functools.lru_cache
    except TypeError:
        return None


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


_CLASSES: dict[type, str] = {}


def class_digest(cls: type) -> str:
    """Return the digest of a class: the names of its bases, and the code of the methods that are not a library's."""
    known = _CLASSES.get(cls)
    if known is None:
        rows = [(base.__module__, base.__qualname__, _own(base)) for base in cls.__mro__]
        known = _CLASSES[cls] = hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
    return known


def forget_classes() -> None:
    """Forget the digests of classes, whose methods may have been replaced."""
    _CLASSES.clear()


def _own(cls: type) -> list[Any]:
    rows = []
    for name, value in vars(cls).items():
        codes = [code_digest(f.__code__) for f in functions_in(value) if is_users_file(f.__code__.co_filename)]
        if codes:
            rows.append((name, type(value).__name__, codes))
    return rows


def codes_of_class(cls: type) -> Iterator[types.CodeType]:
    """Yield the code objects that ``class_digest`` has looked at."""
    for base in cls.__mro__:
        for value in vars(base).values():
            for function in functions_in(value):
                yield from codes_in(function.__code__)


Place = tuple[str, str, int]  # of a code object: file, name, first line


class Codes:
    """The code objects that can be found by the names of a Python module."""

    def __init__(self, module: types.ModuleType) -> None:
        self.by_place: dict[Place, list[types.CodeType]] = {}
        seen: set[int] = set()
        for value in list(vars(module).values()):
            self._add(value, module.__name__, seen)

    def _add(self, value: Any, name: str, seen: set[int]) -> None:
        if isinstance(value, type):
            if value.__module__ == name and id(value) not in seen:
                seen.add(id(value))
                for own in list(vars(value).values()):
                    self._add(own, name, seen)
            return
        if isinstance(value, (dict, list, tuple)) and len(value) <= 1024:
            inside = value.values() if isinstance(value, dict) else value
            functions = [f for part in inside if callable(part) for f in functions_in(part)]
        else:
            functions = list(functions_in(value))
        for function in functions:
            for code in codes_in(function.__code__):
                if id(code) not in seen:
                    seen.add(id(code))
                    self.by_place.setdefault(place_of(code), []).append(code)

    def digests(self, place: Place) -> list[str]:
        """Return the digests of the code objects at a place."""
        return sorted({code_digest(code) for code in self.by_place.get(place, ())})


def place_of(code: types.CodeType) -> Place:
    return code.co_filename, code.co_name, code.co_firstlineno


def modules_by_file() -> dict[str, str]:
    """Return file → the name of the Python module that was loaded from it."""
    names: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and isinstance(module, types.ModuleType):
            names.setdefault(file, name)
    return names
