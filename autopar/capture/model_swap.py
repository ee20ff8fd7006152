"""Swap a model's tensors for stand-ins during a trace, and restore everything afterwards.

``torch.func.functional_call`` does this only for parameters and buffers, and it leaves its stand-ins in a module that
has two names. ``ModelSwap`` restores every attribute of every module, whatever forward did to it, and detects what
forward *would* have changed. A buffer that forward assigns a new tensor becomes state. A tensor that forward keeps
anywhere else is refused. (Only the attributes of modules and the containers in them are checked, not the insides of
other objects.)
"""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autopar.capture.guards.values import frozen, is_scalar
from autopar.errors import CaptureError

CONTAINERS = (list, dict, set, collections.deque)

ONE_AT_A_TIME = threading.RLock()  # every thread sees the stand-ins, and the hooks on all modules


class ModelSwap:
    """Swaps the tensors of one model, as often as needed.

    Attributes:
        reassigned: after a swap, buffer → the tensor that forward put in its place.
        changed: attributes that hold no tensors and that forward changed, as ``module.attribute``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.reassigned: dict[torch.Tensor, torch.Tensor] = {}
        self.changed: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._homes = collections.Counter(id(b) for module in self._names for b in module._buffers.values())

    @contextlib.contextmanager
    def swapped(self, stand_ins: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Put stand-ins in the place of the parameters and buffers; the model is restored when the ``with`` block ends.

        Raises:
            CaptureError: forward keeps a tensor that is neither an output nor a buffer.
        """
        swaps = {id(tensor): stand_in for tensor, stand_in in stand_ins.items()}
        owners = {id(stand_in): tensor for tensor, stand_in in stand_ins.items()}
        attributes = {module: dict(vars(module)) for module in self._names}
        # every list, dict, … that an attribute leads to, at any depth: id → (container, name of the attribute, content)
        containers = {}
        for module, name in self._names.items():
            for key, value in vars(module).items():
                for container in _containers(value):
                    containers[id(container)] = (container, f"{name}.{key}".lstrip("."), copy.copy(container))
        try:
            for module in self._names:
                for key, value in attributes[module].items():
                    vars(module)[key] = _swapped(value, swaps)
            for container, _, _ in containers.values():
                _swap_content(container, swaps)
            stand_in_attributes = {module: dict(vars(module)) for module in self._names}
            content = {key: copy.copy(container) for key, (container, _, _) in containers.items()}
            yield
            self.reassigned, self.changed = {}, []
            for module, name in self._names.items():
                self._take_buffers(module, content[id(module._buffers)], owners)
                for key, value in vars(module).items():
                    before = stand_in_attributes[module].get(key, _MISSING)
                    if value is not before and not _is_equal(value, before):
                        self._note_changed(f"{name}.{key}".lstrip("."), [value], owners)
            for key, (container, name, _) in containers.items():
                if not name.endswith("_buffers") and not _same(container, content[key]):
                    old = {id(member) for member in _members(content[key])}
                    self._note_changed(
                        name, [member for member in _members(container) if id(member) not in old], owners
                    )
        finally:
            for module in self._names:
                vars(module).clear()
                vars(module).update(attributes[module])
            for container, _, kept in containers.values():
                _refill(container, kept)

    def _note_changed(self, name: str, new: list[Any], owners: Mapping[int, torch.Tensor]) -> None:
        """Refuse a new tensor that forward has put into an attribute, and note any other new value.

        A list of the module's own parameters, or of references to them, is allowed: a recurrent layer makes one when
        its parameters have been swapped.
        """
        tensors = [v for value in new for v in _tensors([value])]
        if tensors and all(id(tensor) in owners for tensor in tensors):
            return
        if tensors:
            raise CaptureError(
                f"forward keeps a tensor in {name}, which a captured step cannot do\n"
                f"  return it, or register a buffer of its shape and assign to that; make a tensor that never changes "
                f"before the call"
            )
        self.changed.append(name)

    def _take_buffers(
        self, module: torch.nn.Module, before: Mapping[str, Any], owners: Mapping[int, torch.Tensor]
    ) -> None:
        for key, value in module._buffers.items():
            old = before.get(key)
            if value is old:
                continue
            name = f"{self._names[module]}.{key}".lstrip(".")
            if (
                not isinstance(value, torch.Tensor)
                or old is None
                or (value.shape, value.dtype) != (old.shape, old.dtype)
            ):
                raise CaptureError(
                    f"forward gives the buffer {name} another shape or dtype\n  keep both, from the start"
                )
            owner = owners[id(old)]
            if self._homes[id(owner)] > 1:
                raise CaptureError(
                    f"forward gives the buffer {name} a new tensor, and others share the old one\n"
                    f"  write into it (copy_), so that all see it, or give each its own"
                )
            self.reassigned[owner] = value


_MISSING = object()


def _is_equal(value: Any, before: Any) -> bool:
    """Return whether a value is a number or a text that equals the one before."""
    return is_scalar(value) and is_scalar(before) and bool(frozen(value) == frozen(before))


def _containers(value: Any, containers: dict[int, Any] | None = None) -> list[Any]:
    """Return the containers among ``value`` and its members, at any depth, also inside of tuples."""
    containers = {} if containers is None else containers
    if id(value) in containers or not isinstance(value, (*CONTAINERS, tuple)):
        return list(containers.values())
    if isinstance(value, CONTAINERS):
        containers[id(value)] = value
    for member in _members(value):
        _containers(member, containers)
    return list(containers.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a container holds or refers to weakly, at any depth."""
    contents = [member for container in _containers(value) for member in _members(container)]
    contents += _members(value) if isinstance(value, tuple) else []
    contents = [member() if isinstance(member, weakref.ref) else member for member in contents]
    return [member for member in contents if isinstance(member, torch.Tensor)]


def _swapped(value: Any, swaps: Mapping[int, torch.Tensor]) -> Any:
    """Return the stand-in of a tensor, also inside tuples."""
    if isinstance(value, torch.Tensor):
        return swaps.get(id(value), value)
    if type(value) is tuple:
        new = tuple(_swapped(v, swaps) for v in value)
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


def _swap_content(container: Any, swaps: Mapping[int, torch.Tensor]) -> None:
    new = [_swapped(member, swaps) for member in _members(container)]
    if all(a is b for a, b in zip(new, _members(container), strict=True)):
        return
    _refill(container, dict(zip(container, new, strict=True)) if isinstance(container, dict) else new)


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (*CONTAINERS, tuple)) else [value]


def _same(value: Any, before: Any) -> bool:
    """Return whether a container holds the same objects as before, in the same order."""
    keys = list(value) == list(before) if isinstance(value, dict) else True
    now, then = _members(value), _members(before)
    return keys and len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    container.clear()
    container.extend(content) if isinstance(container, collections.deque) else container.update(content)
