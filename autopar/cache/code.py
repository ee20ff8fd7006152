"""Digest the code of functions and classes, and find the code of a function again in another process.

A digest has the bytecode and everything beside it: names, constants, defaults of nested functions, file and lines. So a
function that has moved by a line is another one, because programs quote lines.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.cache.folder import NotCached
from autopar.capture.guards.bytecode import instructions, modules_named, names_in, own_names
from autopar.capture.guards.namespaces import is_users_file

# -- outside -----------------------------------------------------------------------------------------------------------
#
# Find what functions read outside of Python's values: environment variables, files, clocks, Python's generators.
#
# Variables whose names stand in the code are compared in another process. Everything else has no value to compare, so a
# capture that ran such a function is not kept.


ENVIRONMENT = frozenset({"environ", "getenv"})
OUTSIDE = frozenset({  # names of functions and values of the standard library, NumPy and torch
    "open", "read_text", "read_bytes", "urandom", "input", "environb", "expandvars", "expanduser", "argv", "getcwd",
    "listdir", "scandir", "iterdir", "exists", "isfile", "isdir", "stat", "fromfile", "loadtxt", "genfromtxt", "memmap",
    "load", "load_file", "safe_open", "urlopen", "getpid", "gethostname", "globals", "get_num_threads",
})  # fmt: skip
MODULES = frozenset({"random", "time", "datetime", "secrets", "socket", "subprocess"})
OF_FILES = frozenset({
    "os", "posix", "nt", "posixpath", "ntpath", "genericpath", "io", "_io", "glob", "shutil", "tempfile", "pathlib",
    "platform", "locale",
})  # fmt: skip
ALLOWED = frozenset({"environ", "getenv", "get", "path", "join", "basename", "dirname", "split", "splitext", "sep"})
BETWEEN = frozenset({"get", "__getitem__", "setdefault"})  # from the environment to the name of a variable
SKIPPED = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG", "COPY", "SWAP"})
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)


def variables_of(codes: Sequence[types.CodeType], files: Mapping[str, str]) -> list[str]:
    """Return the names of the environment variables that functions may read.

    Args:
        files: file → the Python module that was loaded from it.

    Raises:
        NotCached: a function reads something that has no value to compare.
    """
    names: dict[str, None] = {}
    for code in codes:
        space = vars(sys.modules.get(files.get(code.co_filename, "__main__"), types.ModuleType("")))
        names.update(dict.fromkeys(_variables(code, space)))
        if read := _outside(code, space):
            raise _refused(code, read)
    return sorted(names)


def values_of(names: Sequence[str]) -> list[str | None]:
    """Return the values of environment variables in this process; ``None`` for one that is not set."""
    return [os.environ.get(name) for name in names]


def _outside(code: types.CodeType, space: Mapping[str, object]) -> str:
    """Return a name by which code reads a file, a clock, a generator or the like; "" if there is none."""
    names = own_names(code)
    if read := sorted(OUTSIDE & names.names):
        return read[0]
    if "getattr" in names.names and (read := sorted((OUTSIDE | ENVIRONMENT) & names.texts)):
        return read[0]
    for name in sorted(names.loaded):
        value = space.get(name)
        if value is sys.argv or value is getattr(os, "environb", sys.argv):
            return name
        if not isinstance(value, CALLABLE) or value is os.getenv:
            continue
        if value is os or value is os.path:
            if read := sorted((set(dir(value)) - ALLOWED) & names.names):
                return f"{name}.{read[0]}"
            continue
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        of_files = module in OF_FILES and not isinstance(value, types.ModuleType)
        if module in MODULES or of_files or getattr(value, "__name__", "") in OUTSIDE:
            return name
    return next(iter(sorted(MODULES.intersection(modules_named(names_in(code), "")))), "")


def _variables(code: types.CodeType, space: Mapping[str, object]) -> Iterator[str]:
    """Yield the environment variables that code names, also where ``environ`` or ``getenv`` has another name."""
    names = own_names(code)
    environment = {name for name in names.loaded if space.get(name) is os.environ or space.get(name) is os.getenv}
    environment |= ENVIRONMENT & names.names
    if not environment:
        return
    named = [(op, value) for op, value in instructions(code) if op not in SKIPPED]
    for at, (op, value) in enumerate(named):
        if value not in environment or op.startswith(("STORE_", "DELETE_")):
            continue
        behind = at + 1
        while behind < len(named) and named[behind][1] in BETWEEN:
            behind += 1
        op, name = named[behind] if behind < len(named) else (op, value)
        if op != "LOAD_CONST" or not isinstance(name, str):
            raise _refused(code, str(value))
        yield name


def _refused(code: types.CodeType, name: str) -> NotCached:
    return NotCached(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) uses {name}, and nothing can tell "
                     f"whether that is the same in another process")  # fmt: skip


# -- code --------------------------------------------------------------------------------------------------------------


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
