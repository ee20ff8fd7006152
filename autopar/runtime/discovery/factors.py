"""Write discovered factors as a pattern in the notation of rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.rules.notation import ELLIPSIS

Dim = tuple[int, int]  # (tensor, dim): operands by slot of the schema, results by position
Shapes = Sequence[Sequence[int] | None]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Factor:
    """Dims of operands, and of results that are not pending, along which an op can be split."""

    operands: tuple[Dim, ...]
    results: tuple[Dim, ...] = ()


def pattern_of(factors: Sequence[Factor], operands: Shapes, results: Shapes, kind: str = "sum") -> str:
    """Return a pattern such as ``... c! -> ... c!``.

    Dims that belong to no factor stay whole, and share a name if they have the same size.
    """
    letters = iter([*LETTERS, *(f"{letter}{number}" for number in range(2, 100) for letter in LETTERS)])
    names: dict[object, str] = {}

    def row(tensor: int, shape: Sequence[int], side: str) -> list[str]:
        dims, met = [], dict.fromkeys(shape, 0)
        for d, n in enumerate(shape):
            index = next((k for k, factor in enumerate(factors) if (tensor, d) in getattr(factor, side)), None)
            key: object = ("whole", n, met[n]) if index is None else index
            met[n] += index is None
            if n != 1 and key not in names:
                names[key] = next(letters) + "!" * (index is None)
            dims.append("1" if n == 1 else names[key])
        return dims

    left = [row(k, shape or (), "operands") for k, shape in enumerate(operands)]
    right = [row(k, shape or (), "results") for k, shape in enumerate(results)]
    rows = [dims for dims in (*left, *right) if dims]
    leading = _leading(rows)
    for dims in rows if leading else ():
        dims[:leading] = [ELLIPSIS]
    text = " -> ".join(", ".join(" ".join(dims) or "()" for dims in side) for side in (left, right))
    return text if kind == "sum" else f"{text} by {kind}"


def _leading(rows: Sequence[Sequence[str]]) -> int:
    """Return how many leading dims are factors of all tensors, so that ``...`` can stand for them."""
    alike = itertools.takewhile(
        lambda names: len(set(names)) == 1 and names[0] != "1" and not names[0].endswith("!"), zip(*rows, strict=False)
    )
    return len(list(alike))
