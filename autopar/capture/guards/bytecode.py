"""Read what code names: globals, attributes, texts, and the modules that it imports.

Guards and the cache ask here. The bytecode is read itself, because ``dis.get_instructions`` runs generated functions,
which a capture that watches the functions that run would take for the user's.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

EXTENDED, SMALL = dis.opmap["EXTENDED_ARG"], dis.opmap.get("LOAD_SMALL_INT")  # the latter from Python 3.14 on
CONSTANTS, NAMES = frozenset(dis.hasconst), frozenset(dis.hasname)
# the bits below the number of the name: LOAD_GLOBAL has one from Python 3.11 on, the others from 3.12 on
FLAGS = {
    dis.opmap[op]: bits
    for op, bits, since in (("LOAD_GLOBAL", 1, (3, 11)), ("LOAD_ATTR", 1, (3, 12)), ("LOAD_SUPER_ATTR", 2, (3, 12)))
    if sys.version_info >= since
}

BY_NAME = frozenset({"import_module", "__import__", "modules"})  # what takes the name of a module as a string


@dataclass(frozen=True)
class CodeNames:
    """What one code object names.

    Attributes:
        names: all names of globals, attributes and modules.
        texts: the constants that are strings.
        imports: the imports: the name of the module, the level, and the names that follow ``import``.
    """

    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    imports: tuple[tuple[str, Any, Any], ...] = ()
    by_name: frozenset[str] = field(default=frozenset(), repr=False)  # texts that may name a module

    def __or__(self, other: CodeNames) -> CodeNames:
        return CodeNames(
            self.names | other.names,
            self.texts | other.texts,
            (*self.imports, *(each for each in other.imports if each not in self.imports)),
            self.by_name | other.by_name,
        )


_OWN: weakref.WeakKeyDictionary[types.CodeType, CodeNames] = weakref.WeakKeyDictionary()


def own_names(code: types.CodeType) -> CodeNames:
    """Return what code names, without the functions inside of it."""
    known = _OWN.get(code)
    if known is None:
        known = _OWN[code] = _read(code)
    return known


def names_in(code: types.CodeType) -> CodeNames:
    """Return what code and the functions inside of it name."""
    inside = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return functools.reduce(CodeNames.__or__, inside, own_names(code))


def _read(code: types.CodeType) -> CodeNames:
    imports: list[tuple[str, Any, Any]] = []
    level: Any = 0  # the constants of the two latest instructions that load one
    names: Any = ()
    for op, value in instructions(code):
        if op == "LOAD_CONST" or op == "LOAD_SMALL_INT":
            level, names = names, value
        elif op == "IMPORT_NAME":  # behind the level, and the names that follow ``import``
            imports.append((value, level, names))
    texts = frozenset(constant for constant in code.co_consts if isinstance(constant, str))
    by_name = not BY_NAME.isdisjoint(code.co_names)
    modules = frozenset(text for text in texts if by_name and text.replace(".", "_").isidentifier())
    return CodeNames(frozenset(code.co_names), texts, tuple(imports), modules)


def instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield each instruction of code, and the name or the constant that it has; ``None`` if it has neither."""
    words, high = code.co_code, 0
    for op, low in zip(words[::2], words[1::2], strict=True):
        number = high << 8 | low
        high = number if op == EXTENDED else 0
        if op in NAMES:
            yield dis.opname[op], code.co_names[number >> FLAGS.get(op, 0)]
        elif op in CONSTANTS:
            yield dis.opname[op], code.co_consts[number]
        else:
            yield dis.opname[op], number if op == SMALL else None


def modules_named(names: CodeNames, package: str) -> Iterator[str]:
    """Yield the modules that code may import: as it runs, or by a string, as ``importlib.import_module`` does.

    Args:
        package: the package of the code's module, for relative imports.
    """
    yield from names.by_name
    for name, level, after in names.imports:
        yield from _modules(name, level, after, package)


def _modules(name: str, level: Any, names: Any, package: str) -> Iterator[str]:
    if level:
        try:
            name = importlib.util.resolve_name("." * level + name, package)
        except ImportError:  # it runs in no package, or goes beyond the outermost: Python refuses it, too
            return
    parts = name.split(".")
    yield from (".".join(parts[: k + 1]) for k in range(len(parts)))
    yield from (f"{name}.{each}" for each in names or ())  # a module of a package, or a value of a module
