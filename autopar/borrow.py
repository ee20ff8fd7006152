"""Borrowing a model for a trace: its tensors are replaced by stand-ins, and everything is put back afterwards.

``torch.func.functional_call`` does this for parameters and buffers alone, and leaves its stand-ins in a module that has
two names. Here every attribute of every module is put back, whatever forward did to it, and what forward *would* have
changed is found out: a buffer that was given a new tensor becomes state; a tensor kept anywhere else is refused.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autopar.errors import CaptureError

CONTAINERS = (list, dict, set, collections.deque)

ONE_AT_A_TIME = threading.RLock()  # a model that is lent, and hooks on all modules, are seen by every thread


class Borrower:
    """Borrows one model, several times. Made outside of the trace, so that the clones it makes are no part of it.

    Attributes:
        reassigned: after a loan, buffer → the tensor that forward put in its place.
        changed: attributes that hold no tensors and that forward changed, as ``module.attribute``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.reassigned: dict[torch.Tensor, torch.Tensor] = {}
        self.changed: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._registered: dict[int, torch.Tensor] = {}  # while lent: stand-in → what it stands in for
        self._lent: dict[torch.nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}  # attributes, and what is in them
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._clones: dict[int, tuple[str, torch.Tensor, torch.Tensor, int]] = {}  # of the tensors that are neither
        for module, name in self._names.items():
            for key, value in vars(module).items():
                for tensor in _members(value):
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in own:
                        clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                        self._clones[id(tensor)] = (f"{name}.{key}".lstrip("."), tensor, clone, clone._version)

    @contextlib.contextmanager
    def borrowed(self, stand_ins: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Run the model on stand-ins for its parameters and buffers; it is as it was when the block ends.

        Raises:
            CaptureError: forward writes into, or keeps, a tensor that is neither an output nor a buffer.
        """
        self._registered = {id(stand_in): tensor for tensor, stand_in in stand_ins.items()}
        kept = [(module, dict(vars(module)), _copies(vars(module))) for module in self._names]
        swaps = {id(tensor): stand_in for tensor, stand_in in stand_ins.items()}
        swaps.update({key: clone for key, (_, _, clone, _) in self._clones.items()})
        try:
            for module in self._names:
                for key, value in list(vars(module).items()):
                    vars(module)[key] = _replaced(value, swaps)
            self._lent = {module: (dict(vars(module)), _copies(vars(module))) for module in self._names}
            yield
            self.reassigned, self.changed = {}, []
            self.inspect()
        finally:
            self._lent, self._registered = {}, {}
            for module, attributes, contents in kept:
                vars(module).clear()
                vars(module).update(attributes)
                for key, content in contents.items():
                    _refill(attributes[key], content)

    def inspect(self) -> None:
        """Find what forward changed; ``CaptureError`` for a tensor it keeps where a capture cannot follow."""
        for name, _, clone, version in self._clones.values():
            if clone._version != version:
                raise CaptureError(
                    f"forward writes into the tensor {name}, which is neither a parameter nor a buffer\n"
                    f"  make it a buffer: register_buffer({name.rpartition('.')[2]!r}, …)"
                )
        for module, (attributes, contents) in self._lent.items():
            self._inspect_buffers(module, contents["_buffers"])
            for key, value in vars(module).items():
                if key == "_buffers":
                    continue
                name = f"{self._names[module]}.{key}".lstrip(".")
                before = contents.get(key)
                same = value is attributes.get(key, _MISSING) and (before is None or _same(value, before))
                if same:
                    continue
                if any(isinstance(v, torch.Tensor) and not _among(v, before) for v in _members(value)):
                    raise CaptureError(
                        f"forward keeps a tensor in {name}, which a captured step cannot do\n"
                        f"  return it, or register a buffer of its shape and assign to that"
                    )
                self.changed.append(name)

    def _inspect_buffers(self, module: torch.nn.Module, before: Mapping[str, Any]) -> None:
        for key, value in module._buffers.items():
            old = before.get(key)
            if value is old:
                continue
            name = f"{self._names[module]}.{key}".lstrip(".")
            if not isinstance(value, torch.Tensor) or old is None or (value.shape, value.dtype) != (old.shape, old.dtype):
                raise CaptureError(f"forward gives the buffer {name} another shape or dtype\n  keep both, from the start")
            self.reassigned[self._registered[id(old)]] = value


_MISSING = object()


def _replaced(value: Any, swaps: Mapping[int, torch.Tensor]) -> Any:
    """A tensor's stand-in; lists and dicts keep their identity."""
    if isinstance(value, torch.Tensor):
        return swaps[id(value)]
    if isinstance(value, list):
        value[:] = [swaps.get(id(v), v) for v in value]
    elif isinstance(value, dict):
        value.update({key: swaps[id(v)] for key, v in value.items() if id(v) in swaps})
    elif type(value) is tuple:
        return tuple(swaps.get(id(v), v) for v in value) if any(id(v) in swaps for v in value) else value
    return value


def _copies(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) for key, value in attributes.items() if isinstance(value, CONTAINERS)}


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (*CONTAINERS, tuple)) else [value]


def _same(value: Any, before: Any) -> bool:
    """Whether a container holds the very same things, in the same order."""
    keys = list(value) == list(before) if isinstance(value, dict) else True
    now, then = _members(value), _members(before)
    return keys and len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _among(value: Any, before: Any) -> bool:
    return before is not None and any(value is one for one in _members(before))


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    container.clear()
    container.extend(content) if isinstance(container, collections.deque) else container.update(content)
