"""Find what functions read outside of Python's values: environment variables, files, clocks, Python's generators.

Variables whose names stand in the code are compared in another process. Everything else has no value to compare, so a
capture that ran such a function is not kept.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

from autopar.cache.refused import NotCached
from autopar.capture.guards.bytecode import instructions, modules_named, names_in, own_names

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
