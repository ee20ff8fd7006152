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

EXTENDED = dis.opmap["EXTENDED_ARG"]
CONSTANTS, NAMES = frozenset(dis.hasconst), frozenset(dis.hasname)
# the bits below the number of the name: LOAD_GLOBAL has one from Python 3.11 on, the others from 3.12 on
FLAGS = {
    dis.opmap[op]: bits
    for op, bits, since in (("LOAD_GLOBAL", 1, (3, 11)), ("LOAD_ATTR", 1, (3, 12)), ("LOAD_SUPER_ATTR", 2, (3, 12)))
    if sys.version_info >= since
}
GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
PAIRS = frozenset({  # two local variables, of four bits each, the later one below
    "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST",
})  # fmt: skip
LOADING = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", *PAIRS} - {"STORE_FAST_STORE_FAST"})
STORING = frozenset({"STORE_FAST", "DELETE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"})
PASSED_OVER = frozenset({"CACHE", "EXTENDED_ARG"})

BY_NAME = frozenset({"import_module", "__import__", "modules"})  # what takes the name of a module as a string


@dataclass(frozen=True)
class CodeNames:
    """What code names.

    Attributes:
        names: all names of globals, attributes and modules.
        loaded: the globals that it reads.
        attributes: the attributes that it reads, without those of ``own``.
        own: the attributes that it reads, and of its first argument only.
        texts: the constants that are strings.
        imports: the imports: the name of the module, the level, and the names that follow ``import``.
    """

    names: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    imports: tuple[tuple[str, Any, Any], ...] = ()
    by_name: frozenset[str] = field(default=frozenset(), repr=False)  # texts that may name a module

    def around(self, inside: CodeNames) -> CodeNames:
        """Return what code with these names and a function inside of it name; that one has another first argument."""
        attributes = self.attributes | inside.attributes | inside.own
        return CodeNames(
            self.names | inside.names,
            self.loaded | inside.loaded,
            attributes,
            self.own - attributes,
            self.texts | inside.texts,
            (*self.imports, *(each for each in inside.imports if each not in self.imports)),
            self.by_name | inside.by_name,
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
    return functools.reduce(CodeNames.around, inside, own_names(code))


def _read(code: types.CodeType) -> CodeNames:
    loaded: set[str] = set()
    attributes: set[str] = set()
    own: set[str] = set()
    imports: list[tuple[str, Any, Any]] = []
    level: Any = 0  # the constants of the two latest instructions that load one
    names: Any = ()
    is_first = False  # whether the instruction before has loaded the first argument
    has_first = code.co_argcount > 0
    for op, value in instructions(code):
        if op in PASSED_OVER:
            continue
        if op in GLOBALS:
            loaded.add(value)
        elif op in ATTRIBUTES:
            (own if is_first else attributes).add(value)
        elif op == "LOAD_CONST" or op == "LOAD_SMALL_INT":
            level, names = names, value
        elif op == "IMPORT_NAME":  # behind the level, and the names that follow ``import``
            imports.append((value, level, names))
        elif op in STORING:  # the first argument may be another value from here on
            has_first &= 0 not in ((value >> 4, value & 15) if op in PAIRS else (value,))
        is_first = op in LOADING and (value & 15 if op in PAIRS else value) == 0
    if not has_first:
        attributes |= own
    texts = frozenset(constant for constant in code.co_consts if isinstance(constant, str))
    by_name = not BY_NAME.isdisjoint(code.co_names)
    modules = frozenset(text for text in texts if by_name and text.replace(".", "_").isidentifier())
    every = frozenset(code.co_names)
    read, of_first = frozenset(attributes), frozenset(own - attributes)
    return CodeNames(every, frozenset(loaded), read, of_first, texts, tuple(imports), modules)


def instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield each instruction of code, and its name or its constant; its number if it has neither."""
    words, high = code.co_code, 0
    for op, low in zip(words[::2], words[1::2], strict=True):
        number = high << 8 | low
        high = number if op == EXTENDED else 0
        name = dis.opname[op]
        if op in NAMES:
            yield name, code.co_names[number >> FLAGS.get(op, 0)]
        elif op in CONSTANTS:
            yield name, code.co_consts[number]
        else:
            yield name, number


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
