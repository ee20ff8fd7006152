"""Flatten what users pass and return into leaves, and rebuild it around other leaves.

torch's pytree knows containers, named tuples and registered classes (the outputs of Hugging Face among them). This
module also opens dataclasses and the caches of ``OPENED``, without registering the user's classes. Rebuilt objects are
made without ``__init__`` and ``__post_init__``, which have run already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.torch_private import pytree

Path = tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """How leaves are arranged. Two structures are equal if the leaves of one fit into the other.

    Attributes:
        kind: the class of this node; ``None`` for a leaf.
        keys: the names of the parts: fields, keys, positions.
        parts: the structures of the parts.
        fixed: everything that is not a part: pytree's own spec of this node alone, or attributes of a cache with their
            values.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    fixed: Any = field(default=(), hash=False)

    def paths(self) -> Iterator[Path]:
        """Iterate over the keys that lead to each leaf."""
        if self.kind is None:
            yield ()
        for key, part in zip(self.keys, self.parts, strict=True):
            for rest in part.paths():
                yield (str(key), *rest)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value, in order, and its structure. A value that cannot be opened is a leaf."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, ())


def flatten_with_path(value: Any) -> tuple[list[tuple[Path, Any]], Structure]:
    """Do what ``flatten`` does, and return each leaf with the keys that lead to it."""
    leaves, spec = flatten(value)
    return list(zip(spec.paths(), leaves, strict=True)), spec


def unflatten(leaves: Sequence[Any], spec: Structure) -> Any:
    """Return a new value of this structure around other leaves."""
    return _unflatten(iter(leaves), spec)


def path_to(value: Any, wanted: Any) -> tuple[int, ...] | None:
    """Return the positions that lead to the object ``wanted`` in a value; ``None`` if the value does not contain it."""
    if value is wanted:
        return ()
    opened = _open(value)
    for k, part in enumerate(opened[1] if opened else ()):
        if (rest := path_to(part, wanted)) is not None:
            return (k, *rest)
    return None


def part_at(value: Any, positions: Sequence[int]) -> Any:
    """Return the part of a value at the positions ``positions``.

    ``path_to`` found them in a value of the same structure.
    """
    for k in positions:
        opened = _open(value)
        assert opened is not None
        value = opened[1][k]
    return value


def take_over(cache: Any, other: Any) -> None:
    """Replace the contents of a cache by those of another cache of its class."""
    vars(cache).clear()
    vars(cache).update(vars(other))


def is_cache(value: Any) -> bool:
    """Return whether the class of a value is one of those that are opened by name."""
    return _by_name(type(value)) is not None


def _flatten(value: Any, leaves: list[Any], around: tuple[int, ...]) -> Structure:
    # an object that contains itself is a leaf, which the caller refuses
    opened = None if id(value) in around else _open(value)
    if opened is None:
        leaves.append(value)
        return Structure()
    keys, parts, fixed = opened
    return Structure(type(value), keys, tuple(_flatten(part, leaves, (*around, id(value))) for part in parts), fixed)


def _unflatten(leaves: Iterator[Any], spec: Structure) -> Any:
    if spec.kind is None:
        return next(leaves)
    parts = [_unflatten(leaves, part) for part in spec.parts]
    if isinstance(spec.fixed, pytree.TreeSpec):
        return pytree.tree_unflatten(parts, spec.fixed)
    new: Any = object.__new__(spec.kind)
    by_name = _by_name(spec.kind)
    for name, value in (*zip(spec.keys, parts, strict=True), *spec.fixed):
        object.__setattr__(new, name, value)  # also where the dataclass is frozen
    for name, make in by_name.derived.items() if by_name else ():
        object.__setattr__(new, name, make(new))
    return new


Opened = tuple[tuple[Any, ...], list[Any], Any]  # keys, parts, fixed


def _open(value: Any) -> Opened | None:
    """Open one level of a value; ``None`` for a leaf. Classes that the user has registered are opened as registered."""
    if value is None or isinstance(value, (torch.Tensor, torch.nn.Module, bool, int, float, str, type)):
        return None
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if not spec.is_leaf():
        return _keys(value, len(leaves)), leaves, spec
    by_name = _by_name(type(value))
    if by_name is not None:
        return _open_by_name(value, by_name)
    if dataclasses.is_dataclass(value) and _is_plain(type(value)):
        names = _attributes(value)
        return names, [getattr(value, name) for name in names], ()
    return None


def _keys(value: Any, count: int) -> tuple[Any, ...]:
    """Return pytree's names of the parts of a container, or positions if a registered class has no names."""
    try:
        pairs, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    except ValueError:
        return tuple(range(count))
    return tuple(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for (key,), _ in pairs)


def _is_plain(kind: type) -> bool:
    """Return whether an object of this class consists of its attributes alone, unlike a list or an exception."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _attributes(value: Any) -> tuple[str, ...]:
    """Return the names of the instance's attributes: first its fields, then others.

    ``__post_init__`` may set others.
    """
    attributes = set(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        attributes |= {name for name in ([slots] if isinstance(slots, str) else slots) if hasattr(value, name)}
    fields = [f.name for f in dataclasses.fields(value) if f.name in attributes]
    return (*fields, *sorted(name for name in attributes.difference(fields) if not name.startswith("__")))


# -- classes known by name, so that their library need not be installed -----------------------------------------------


@dataclass(frozen=True)
class ByName:
    """The attributes of a class that are parts, and those computed from others; all other attributes are fixed."""

    parts: tuple[str, ...]
    derived: dict[str, Callable[[Any], Any]] = field(default_factory=dict)


def _window(layer: Any) -> torch.Tensor:
    return torch.tensor(layer.sliding_window, dtype=torch.long, device=getattr(layer, "device", None))


OPENED: dict[str, ByName] = {  # tried on transformers 5.23
    "transformers.cache_utils.DynamicCache": ByName(("layers",)),
    "transformers.cache_utils.EncoderDecoderCache": ByName(
        ("self_attention_cache", "cross_attention_cache", "is_updated")
    ),
    "transformers.cache_utils.DynamicSlidingWindowLayer": ByName(
        ("keys", "values"), {"_sliding_window_tensor": _window}
    ),
    "transformers.cache_utils.DynamicLayer": ByName(("keys", "values")),
}
FIXED = (bool, int, float, str, type(None), type, torch.dtype, torch.device)


def _by_name(kind: type) -> ByName | None:
    return next(
        (OPENED[name] for base in kind.__mro__ if (name := f"{base.__module__}.{base.__qualname__}") in OPENED), None
    )


def _open_by_name(value: Any, by_name: ByName) -> Opened | None:
    """Open a cache, unless another of its attributes may be anything (a stream, a tensor of a subclass)."""
    attributes = vars(value)
    fixed = {
        name: attributes[name]
        for name in sorted(attributes)
        if name not in by_name.parts and name not in by_name.derived
    }
    if not attributes.keys() >= set(by_name.parts) or not all(isinstance(v, FIXED) for v in fixed.values()):
        return None
    return by_name.parts, [attributes[name] for name in by_name.parts], tuple(fixed.items())
