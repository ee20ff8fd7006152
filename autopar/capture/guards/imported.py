"""Find the modules that code imports while it runs, or names in a string, as ``importlib.import_module`` does."""

from __future__ import annotations

import dis
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

EXTENDED, IMPORT = dis.opmap["EXTENDED_ARG"], dis.opmap["IMPORT_NAME"]
CONSTANT, SMALL = dis.opmap["LOAD_CONST"], dis.opmap.get("LOAD_SMALL_INT")  # the latter from Python 3.14 on

BY_NAME = {"import_module", "__import__", "modules"}  # what takes the name of a module as a string


def modules_named(code: types.CodeType, package: str) -> Iterator[str]:
    """Yield the names of modules that code, and functions inside of it, may import.

    It reads the bytecode itself. ``dis.get_instructions`` runs generated functions, which a capture that watches the
    functions that run would take for the user's.

    Args:
        package: the package of the code's module, for relative imports.
    """
    by_name = not BY_NAME.isdisjoint(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from modules_named(constant, package)
        elif by_name and isinstance(constant, str) and constant.replace(".", "_").isidentifier():
            yield constant
    words = code.co_code
    if IMPORT not in words[::2]:
        return
    level: Any = 0  # the constants of the two latest instructions that load one
    names: Any = ()
    high = 0
    for op, low in zip(words[::2], words[1::2], strict=True):
        number = high << 8 | low
        high = number if op == EXTENDED else 0
        if op == CONSTANT:
            level, names = names, code.co_consts[number]
        elif op == SMALL:
            level, names = names, number
        elif op == IMPORT:  # behind the level, and the names that follow ``import``
            yield from _modules(code.co_names[number], level, names, package)


def _modules(name: str, level: Any, names: Any, package: str) -> Iterator[str]:
    if level:
        try:
            name = importlib.util.resolve_name("." * level + name, package)
        except ImportError:  # it runs in no package, or goes beyond the outermost: Python refuses it, too
            return
    parts = name.split(".")
    yield from (".".join(parts[: k + 1]) for k in range(len(parts)))
    yield from (f"{name}.{each}" for each in names or ())  # a module of a package, or a value of a module
