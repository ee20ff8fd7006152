"""Copy changes of the user's model into the copy of it that a process runs.

``model.beta = 2.0`` sets an attribute of the user's model, but on processes forward reads the copy, whose parameters
are DTensors. Before each call, plain values that changed in the model are set in the copy too. A change of anything
else, such as a hook or a module, is an error that says where to make it. The model is referenced weakly, so the user
can free it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.capture.guards.reads import HOOKS
from autopar.capture.guards.values import (
    CONTAINERS,
    FUNCTIONS,
    frozen,
    is_container,
    is_fixed,
    is_scalar,
    is_users_object,
)

SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "training"})


class Original:
    """A user's model, and its copy on the mesh."""

    def __init__(self, model: torch.nn.Module, copy: torch.nn.Module) -> None:
        self._followed: weakref.WeakKeyDictionary[torch.nn.Module, list[_Followed]] = weakref.WeakKeyDictionary()
        self._followed[model] = list(_pairs(model, copy))
        self._model = weakref.ref(model)

    def take_over(self) -> None:
        """Set in the copy what has changed in the model since the last call.

        Raises:
            RuntimeError: a hook, a module or another object has changed.
        """
        model = self._model()
        for followed in self._followed[model] if model is not None else ():
            followed.take_over()


class _Followed:
    """The attributes of one module or object of the model, and of its copy."""

    def __init__(self, words: str, source: dict[str, Any], target: dict[str, Any]) -> None:
        self.words, self.source, self.target = words, source, target
        self._hooks = [source[name] for name in HOOKS if name in source]
        self._remember()

    def _remember(self) -> None:
        self.names = [
            name
            for name, value in self.source.items()
            if name not in SKIPPED and name not in HOOKS and not isinstance(value, torch.Tensor)
        ]
        self.count = len(self.source)
        self.values = [self.source[name] for name in self.names]
        names = self.names if len(self.names) > 1 else self.names * 2 or ["_modules"] * 2
        self.read: Callable[[Any], Any] = operator.itemgetter(*names)
        self.last_values = self.read(self.source) if names[0] in self.source else ()
        self.written = {
            name: frozen(value) for name, value in zip(self.names, self.values, strict=True) if not is_fixed(value)
        }
        # the same objects, as long as no attribute is another one; most are empty, and an empty one costs little
        containers = [(name, self.source[name]) for name in self.written]
        self.empty = [value for _, value in containers if isinstance(value, CONTAINERS) and not value]
        self.full = [(name, value) for name, value in containers if not isinstance(value, CONTAINERS) or value]
        self.hooked = [list(hooks.values()) for hooks in self._hooks]

    def take_over(self) -> None:
        if (
            len(self.source) == self.count
            and (self.last_values == () or self._is_unchanged())
            and not any(self.empty)
            and all(frozen(value) == self.written[name] for name, value in self.full)
            and not any(self._hooks)
        ):
            return
        changed = [
            name
            for name in dict.fromkeys((*self.names, *self.source))
            if name not in SKIPPED and name not in HOOKS and self._is_changed(name)
        ]
        for name in changed:
            self._set(name)
        for name, hooks, before in zip(HOOKS, self._hooks, self.hooked, strict=False):
            if list(hooks.values()) != before:
                raise self._refused(name.strip("_"))
        if changed:
            self._remember()

    def _is_unchanged(self) -> bool:
        try:
            return all(map(operator.is_, self.read(self.source), self.last_values))
        except KeyError:
            return False

    def _is_changed(self, name: str) -> bool:
        if name not in self.names:
            return not isinstance(self.source[name], torch.Tensor)
        value = self.values[self.names.index(name)]
        now = self.source.get(name, value)
        return name not in self.source or frozen(now) != self.written.get(name, frozen(value))

    def _set(self, name: str) -> None:
        if name not in self.source:
            self.target.pop(name, None)
            return
        value = self.source[name]
        if is_scalar(value) or isinstance(value, FUNCTIONS) or (is_container(value) and _is_plain(value)):
            self.target[name] = value
        elif name in self.names and is_users_object(value):
            raise self._refused(name)

    def _refused(self, name: str) -> RuntimeError:
        where = f"{self.words}.{name}".lstrip(".")
        return RuntimeError(
            f"{where} was changed in the model that was parallelized, but each process runs a copy of it\n"
            f"  change it in what parallelize has returned: parallel.{where}; or before parallelize"
        )


def _is_plain(value: Any) -> bool:
    inside = (
        value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else value
    )
    return all(is_scalar(member) or (is_container(member) and _is_plain(member)) for member in inside)


def _pairs(model: torch.nn.Module, copy: torch.nn.Module) -> Iterator[_Followed]:
    """Pair the modules of a model with their copies, and the objects that they hold."""
    visited: set[int] = set()
    copies = dict(copy.named_modules())
    open_: list[tuple[str, Any, Any]] = [(path, module, copies[path]) for path, module in model.named_modules()]
    while open_:
        words, source, target = open_.pop()
        if id(source) in visited or source is target or not hasattr(source, "__dict__"):
            continue
        visited.add(id(source))
        yield _Followed(words, vars(source), vars(target))
        for name, value in vars(source).items():
            if is_users_object(value) and name in vars(target):
                open_.append((f"{words}.{name}".lstrip("."), value, vars(target)[name]))
