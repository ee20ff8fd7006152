"""Find what functions read outside of Python's values: environment variables, files, clocks, Python's generators.

Variables whose names stand in the code are compared in another process. Everything else has no value to compare, so a
capture that ran such a function is not kept.
"""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

from autopar.cache.refused import NotCached

ENVIRONMENT = frozenset({"environ", "getenv"})
FILES = frozenset({"open", "read_text", "read_bytes", "urandom", "input"})
MODULES = frozenset({"random", "time", "datetime", "secrets", "socket", "subprocess"})
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
        names.update(dict.fromkeys(_variables(code)))
        if read := _outside(code, space):
            raise _refused(code, read)
    return sorted(names)


def values_of(names: Sequence[str]) -> list[str | None]:
    """Return the values of environment variables in this process; ``None`` for one that is not set."""
    return [os.environ.get(name) for name in names]


def _outside(code: types.CodeType, space: Mapping[str, object]) -> str:
    """Return a name by which code reads a file, a clock or a generator; "" if there is none."""
    if read := sorted(FILES.intersection(code.co_names)):
        return read[0]
    for name in code.co_names:
        value = space.get(name)
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(value, CALLABLE) and module in MODULES:
            return name
    if MODULES.intersection(code.co_names):
        imported = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
        return next(iter(sorted(imported & MODULES)), "")
    return ""


def _variables(code: types.CodeType) -> Iterator[str]:
    """Yield the environment variables that code names."""
    if not ENVIRONMENT.intersection(code.co_names):
        return
    instructions = [each for each in dis.get_instructions(code) if each.opname not in SKIPPED]
    for at, instruction in enumerate(instructions):
        if instruction.argval not in ENVIRONMENT or instruction.opname.startswith(("STORE_", "DELETE_")):
            continue
        behind = at + 1
        while behind < len(instructions) and instructions[behind].argval in BETWEEN:
            behind += 1
        named = instructions[behind] if behind < len(instructions) else instruction
        if named.opname != "LOAD_CONST" or not isinstance(named.argval, str):
            raise _refused(code, str(instruction.argval))
        yield named.argval


def _refused(code: types.CodeType, name: str) -> NotCached:
    return NotCached(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) uses {name}, and nothing can tell "
                     f"whether that is the same in another process")  # fmt: skip
