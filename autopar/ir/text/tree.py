"""Write the structure of returned values as text around the leaves: ``{'loss': ‧, 'logits': ‧}``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.ir.structure import Structure
from autopar.ir.text.tokens import legal_name

_LEAF = "\0"


def tree_fragments(spec: Structure, constants: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the fragments around the tensor leaves of a structure; constant leaves are part of the fragments.

    ``constants`` maps the position of a leaf to its value.
    """
    return tuple(_write(spec, itertools.count(), constants).split(_LEAF))


def _write(spec: Structure, counter: Iterator[int], constants: Mapping[int, Any]) -> str:
    if spec.kind is None:
        position = next(counter)
        return _text(constants[position]) if position in constants else _LEAF
    inner = [_write(part, counter, constants) for part in spec.parts]
    if spec.kind is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if spec.kind is list:
        return f"[{', '.join(inner)}]"
    if spec.kind is dict:
        return "{" + ", ".join(f"{_text(key)}: {text}" for key, text in zip(spec.keys, inner, strict=True)) + "}"
    names = [str(key) for key in spec.keys]
    if not all(name.isidentifier() for name in names):
        names = [f"_{k}" for k in range(len(inner))]
    kind = spec.kind.__name__ if spec.kind.__name__.isidentifier() else legal_name(spec.kind.__name__)
    return f"{kind}({', '.join(f'{name}={text}' for name, text in zip(names, inner, strict=True))})"


def _text(value: Any) -> str:
    """Write a constant as the grammar reads it: a member of an enum as its base value, other objects as strings."""
    base: Any = next((base for base in (bool, int, float, str, type(None)) if isinstance(value, base)), None)
    return repr(str(value)) if base is None else base.__repr__(value)
