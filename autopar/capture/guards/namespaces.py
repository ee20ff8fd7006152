"""Note what functions read of classes, Python modules and functions, whose attributes cannot be recorded as they are read.

Each name that a function of the user's has is looked for in each of these that its model, its globals or its closures lead to:
``self.cfg.beta`` reads ``Cfg.beta`` where ``self.cfg`` is the class ``Cfg``, and so may ``getattr(self.cfg, "beta")``.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.capture.guards.places import GuardedPlace
from autopar.capture.guards.values import FOREIGN
from autopar.capture.provenance import is_users

LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Namespaces:
    """Classes, modules and functions of the user's own, and names.

    Args:
        note: is given each place and its value that one of them has under one of the names.
    """

    def __init__(self, note: Callable[[GuardedPlace, Any], None]) -> None:
        self._note = note
        self._names: set[str] = set()
        self._known: dict[int, tuple[Any, Mapping[str, Any], str]] = {}  # owners, what they hold, what they are called
        self._proxies: dict[int, tuple[type, Mapping[str, Any]]] = {}

    def attributes_of(self, owner: Any) -> Mapping[str, Any]:
        """``vars(owner)``, the same object each time."""
        if not isinstance(owner, type):
            return vars(owner)
        return self._proxies.setdefault(id(owner), (owner, vars(owner)))[1]

    def add(self, owner: Any) -> None:
        """A class, with its bases, a module or a function."""
        for one in owner.__mro__ if isinstance(owner, type) else (owner,):
            if id(one) in self._known:
                continue
            own = is_own(one)
            self._known[id(one)] = one, self.attributes_of(one) if own else {}, one.__qualname__ if not isinstance(one, types.ModuleType) else one.__name__
            if own:
                self._look_for(self._names, one)

    def add_names(self, code: types.CodeType) -> None:
        """The names that a function has."""
        new = set(names_of(code, strings=True)) - self._names
        self._names |= new
        for owner, _, _ in list(self._known.values()):
            self._look_for(new, owner)

    def _look_for(self, names: set[str], owner: Any) -> None:
        _, held, words = self._known[id(owner)]
        for name in sorted(names & held.keys()):
            if not name.startswith("__"):
                self._note(GuardedPlace(held, name, f"{words}.{name}"), held[name])


def names_of(code: types.CodeType, strings: bool = False) -> Iterable[str]:
    """The names of globals and of attributes that a function has, with those inside of it; ``strings``: that can be names, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant, strings)
        elif strings and isinstance(constant, str) and constant.isidentifier():
            yield constant


def is_users_file(filename: str) -> bool:
    """Whether code is the user's, that of a notebook or of a string included."""
    return bool(filename) and (is_users(filename) or (filename.startswith("<") and not filename.startswith(("<frozen", "<eval_with_key"))))


def is_own(owner: Any) -> bool:
    """Whether a class, a module or a function is of the user's program, and of no library that is installed."""
    if isinstance(owner, types.FunctionType):
        return _is_own_file(owner.__code__.co_filename)
    name = str(owner.__module__ if isinstance(owner, type) else owner.__name__)
    if name.partition(".")[0] in FOREIGN:
        return False
    module = owner if isinstance(owner, types.ModuleType) else sys.modules.get(name)
    return _is_own_file(getattr(module, "__file__", None) or "<string>")


def _is_own_file(filename: str) -> bool:
    return is_users_file(filename) and not any(part in filename for part in LIBRARIES)
