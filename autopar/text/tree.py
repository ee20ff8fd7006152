"""How returned values are arranged, as text around the leaves: ``{'loss': ‧, 'logits': ‧}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.torch_private import pytree

_LEAF = "\0"


def tree_fragments(spec: Any, constants: Mapping[int, Any]) -> tuple[str, ...]:
    """The fragments around the tensor leaves of a pytree spec; leaves that are constants are written in.

    ``constants`` maps the position of a leaf to its value.
    """
    counter = iter(range(spec.num_leaves))
    return tuple(_write(spec, counter, constants).split(_LEAF))


def _write(spec: Any, counter: Any, constants: Mapping[int, Any]) -> str:
    if spec.is_leaf():
        position = next(counter)
        return repr(constants[position]) if position in constants else _LEAF
    inner = [_write(child, counter, constants) for child in spec.children()]
    if spec.type is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(inner)}]"
    if spec.type is dict:
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(spec.context, inner, strict=True)) + "}"
    names = _fields(spec, len(inner))
    return f"{spec.type.__name__}({', '.join(f'{name}={text}' for name, text in zip(names, inner, strict=True))})"


def _fields(spec: Any, count: int) -> list[str]:
    """Field names of a registered class, by the paths pytree gives its leaves; positions where it gives none."""
    whole = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(whole)
    names: list[str] = []
    for path, _ in paths:
        name = str(getattr(path[0], "key", getattr(path[0], "name", getattr(path[0], "idx", "")))) if path else ""
        if not names or names[-1] != name:
            names.append(name)
    return names if len(names) == count and all(n.isidentifier() for n in names) else [f"_{k}" for k in range(count)]
