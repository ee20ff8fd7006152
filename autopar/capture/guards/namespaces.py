"""Note which attributes of classes, Python modules and functions forward may read; Python cannot record these reads.

Each attribute in the code of the user's functions is looked up in each namespace that the model, its globals or its
closures lead to. ``self.cfg.beta`` reads ``Cfg.beta`` if ``self.cfg`` is the class ``Cfg``, and
``getattr(self.cfg, "beta")`` may too.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from autopar.capture.guards.bytecode import CodeNames
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.guards.values import FOREIGN
from autopar.capture.provenance import is_users

LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Namespaces:
    """The user's classes, modules and functions, and the names that the user's code contains.

    Args:
        note: called with the place and the value, for each of the names that one of these namespaces has.
    """

    def __init__(self, note: Callable[[GuardedPlace, Any], None]) -> None:
        self._note = note
        self._names: set[str] = set()
        self._known: dict[int, tuple[Any, Mapping[str, Any], str]] = {}  # id → (owner, its attributes, its name)
        self._proxies: dict[int, tuple[type, Mapping[str, Any]]] = {}

    def attributes_of(self, owner: Any) -> Mapping[str, Any]:
        """Return ``vars(owner)``, always the same object."""
        if not isinstance(owner, type):
            return vars(owner)
        return self._proxies.setdefault(id(owner), (owner, vars(owner)))[1]

    def add(self, owner: Any) -> None:
        """Add a class with its bases and its metaclass, a module, or a function."""
        meta: type = type(owner)
        for space in (*owner.__mro__, *meta.__mro__) if isinstance(owner, type) else (owner,):
            if id(space) in self._known:
                continue
            of_user = is_own(space)
            name = space.__name__ if isinstance(space, types.ModuleType) else space.__qualname__
            self._known[id(space)] = space, self.attributes_of(space) if of_user else {}, name
            if of_user:
                self._look_for(self._names, space)

    def add_names(self, found: CodeNames, of_module: bool) -> None:
        """Add the attributes that a function reads, and the texts that it contains.

        Args:
            of_module: whether the first argument is a module, whose attributes are recorded as they are read.
        """
        own = () if of_module else found.own
        new = {*found.attributes, *own, *filter(str.isidentifier, found.texts)} - self._names
        self._names |= new
        for owner, _, _ in list(self._known.values()):
            self._look_for(new, owner)

    def _look_for(self, names: set[str], owner: Any) -> None:
        _, attributes, words = self._known[id(owner)]
        for name in sorted(names & attributes.keys()):
            if not name.startswith("__"):
                self._note(GuardedPlace(attributes, name, f"{words}.{name}", owner=owner), attributes[name])


def is_users_file(filename: str) -> bool:
    """Return whether code is the user's; code of a notebook or of a string is."""
    return bool(filename) and (
        is_users(filename) or (filename.startswith("<") and not filename.startswith(("<frozen", "<eval_with_key")))
    )


def is_users_frame(frame: types.FrameType) -> bool:
    """Return whether a frame runs code of the user's; methods that other libraries generate have no file."""
    root = str(frame.f_globals.get("__name__")).partition(".")[0]
    return is_users_file(frame.f_code.co_filename) and root not in FOREIGN


def is_own(owner: Any) -> bool:
    """Return whether a class, a module or a function belongs to the user's program, and not to an installed library."""
    if isinstance(owner, types.FunctionType):
        return _is_own_file(owner.__code__.co_filename)
    name = str(owner.__module__ if isinstance(owner, type) else owner.__name__)
    if name.partition(".")[0] in FOREIGN:
        return False
    module = owner if isinstance(owner, types.ModuleType) else sys.modules.get(name)
    return _is_own_file(getattr(module, "__file__", None) or "<string>")


def _is_own_file(filename: str) -> bool:
    return is_users_file(filename) and not any(part in filename for part in LIBRARIES)
