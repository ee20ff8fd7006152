"""Factors that were found, as a pattern in the notation of rules."""

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
    """Dims of operands, and of those results that are not pending, along which an op comes apart."""

    operands: tuple[Dim, ...]
    results: tuple[Dim, ...] = ()


def pattern_of(factors: Sequence[Factor], operands: Shapes, results: Shapes, kind: str = "sum") -> str:
    """``... c! -> ... c!``: dims that belong to no factor stay whole; those of one size share a name."""
    letters = iter([*LETTERS, *(f"{letter}{number}" for number in range(2, 100) for letter in LETTERS)])
    names: dict[object, str] = {}

    def row(tensor: int, shape: Sequence[int], side: str) -> list[str]:
        found, met = [], dict.fromkeys(shape, 0)
        for d, n in enumerate(shape):
            of = next((k for k, factor in enumerate(factors) if (tensor, d) in getattr(factor, side)), None)
            key: object = ("whole", n, met[n]) if of is None else of
            met[n] += of is None
            if n != 1 and key not in names:
                names[key] = next(letters) + "!" * (of is None)
            found.append("1" if n == 1 else names[key])
        return found

    given = [row(k, shape or (), "operands") for k, shape in enumerate(operands)]
    made = [row(k, shape or (), "results") for k, shape in enumerate(results)]
    rows = [one for one in (*given, *made) if one]
    leading = _leading(rows)
    for one in rows if leading else ():
        one[:leading] = [ELLIPSIS]
    text = " -> ".join(", ".join(" ".join(one) or "()" for one in side) for side in (given, made))
    return text if kind == "sum" else f"{text} by {kind}"


def _leading(rows: Sequence[Sequence[str]]) -> int:
    """How many leading dims are factors of all tensors, as those of ``...`` are."""
    alike = itertools.takewhile(lambda names: len(set(names)) == 1 and names[0] != "1" and not names[0].endswith("!"), zip(*rows, strict=False))
    return len(list(alike))
