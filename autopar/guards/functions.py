"""Find the globals and closures that functions of the user's read, those of the functions that they call included."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from autopar.guards.places import Place
from autopar.guards.values import FUNCTIONS, frozen, is_container, is_scalar, is_users_object, members
from autopar.provenance import is_users

SPECIAL = ("__call__", "__getitem__", "__len__", "__iter__", "__contains__", "__bool__", "__getattr__")  # methods that are called without being read


class Functions:
    """Looks into functions, each once.

    Attributes:
        places: of globals, of attributes of modules and classes that are globals, of numbers in closures.
        first: what was in each of these places, frozen, before forward read it.

    Args:
        follow: is given objects of the user's, with what they are called, before a function reads their attributes.
    """

    def __init__(self, follow: Callable[[Any, str], None], skipped: Collection[tuple[int, str]] = ()) -> None:
        self._skipped = skipped
        self.places: dict[tuple[int, str], Place] = {}
        self.first: dict[tuple[int, str], Any] = {}
        self._follow = follow
        self._seen: dict[int, Any] = {}

    @property
    def seen(self) -> list[types.FunctionType]:
        """The user's functions that were looked into."""
        return [function for function in self._seen.values() if isinstance(function, types.FunctionType) and is_users_file(function.__code__.co_filename)]

    def look_into(self, function: Any, cls: type | None = None) -> None:
        """``cls``: of which it is a method."""
        open_ = [(function, cls)]
        while open_:
            function, cls = open_.pop()
            if isinstance(function, property):
                function = function.fget
            while isinstance(function, (types.MethodType, functools.partial, staticmethod, classmethod)):
                function = function.func if isinstance(function, functools.partial) else function.__func__
            if id(function) in self._seen or not isinstance(function, types.FunctionType):
                continue
            self._seen[id(function)] = function
            open_ += self._read_by(function, cls)

    def look_into_class(self, cls: type) -> None:
        """The methods of a class that are called without being read."""
        if id(cls) not in self._seen:
            self._seen[id(cls)] = cls
            for base in cls.__mro__:
                for name in SPECIAL:
                    if isinstance(vars(base).get(name), types.FunctionType):
                        self.look_into(vars(base)[name], cls)

    def _read_by(self, function: types.FunctionType, cls: type | None) -> Iterator[tuple[Any, type | None]]:
        """Note what a function reads; the functions that it may call."""
        code = function.__code__
        users = is_users_file(code.co_filename)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if users:
                yield from self._note(Place(cell, name, f"{name} of the closure {function.__qualname__}"), value)
            elif isinstance(value, FUNCTIONS):  # one that is decorated
                yield value, cls
        if not users:
            return
        names = set(_names(code))
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            module = function.__globals__.get("__name__", "the program")
            yield from self._note(Place(function.__globals__, name, f"the global {name} of {module}"), value)
            if (isinstance(value, types.ModuleType) and is_users_file(getattr(value, "__file__", None) or "")) or isinstance(value, type):
                yield from self._attributes(value, names)
        for base in cls.__mro__ if cls is not None else ():
            for name in sorted(names & vars(base).keys()):
                if isinstance(vars(base)[name], (*FUNCTIONS, property, staticmethod, classmethod)):
                    yield vars(base)[name], cls

    def _attributes(self, owner: Any, names: set[str]) -> Iterator[tuple[Any, type | None]]:
        """Numbers of a module or a class that a function can read by these names."""
        for base in owner.__mro__ if isinstance(owner, type) else (owner,):
            root = base.__module__ if isinstance(base, type) else base.__name__
            if root.partition(".")[0] in ("torch", "typing", "abc", "enum"):
                continue
            for name in sorted(names & vars(base).keys()):
                value = vars(base)[name]
                if not name.startswith("__") and (is_scalar(value) or is_container(value) or (not isinstance(base, type) and is_users_object(value))):
                    yield from self._note(Place(vars(base), name, f"{owner.__name__}.{name}"), value)

    def _note(self, place: Place, value: Any) -> Iterator[tuple[Any, type | None]]:
        if is_scalar(value) or is_container(value) or is_users_object(value):
            self._keep(place, value)
            self._follow(value, place.words)
            for member in members(value) if is_container(value) else ():
                if isinstance(member, FUNCTIONS):
                    yield member, None
        elif isinstance(value, FUNCTIONS):
            if isinstance(value, types.FunctionType) and is_users_file(value.__code__.co_filename):
                self._keep(place, value)
            yield value, None

    def _keep(self, place: Place, value: Any) -> None:
        if place.identity not in self.places and place.identity not in self._skipped:
            self.places[place.identity] = place
            self.first[place.identity] = frozen(value)


def is_users_file(filename: str) -> bool:
    """Whether code is the user's, that of a notebook or of a string included."""
    return bool(filename) and (is_users(filename) or (filename.startswith("<") and not filename.startswith(("<frozen", "<eval_with_key"))))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
