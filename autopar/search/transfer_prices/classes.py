"""Describe the pairs of states of a value by what the price of the transfers between them depends on.

Which dims the axes split does not matter to the price. So a pair is described by its sorted parts: for each, the axes
that there is room for, and those that split it before and after; and beside these by the number of elements, the
pending axes and the dtypes, as for paths (``autopar.transitions.classes``). All pairs of a table are described at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from autopar.costs.machine import Machine
from autopar.ir.layout import Dim, DistAttr
from autopar.ir.mesh import Mesh
from autopar.transitions.axis_prices import prices_of
from autopar.transitions.even_parts import DimView, covers, dim_views
from autopar.transitions.plan import has_room

State = tuple[DistAttr, torch.dtype]
UNREAD = DistAttr((), (("", "unread"),))  # of an operand that an op does not read: it needs no transfer
_Told = tuple[
    tuple[int, ...], tuple[int, ...], bool
]  # numbers of the fine and of the coarse parts; whether one suffices


class Described(NamedTuple):
    """The pairs of a table.

    Attributes:
        keys: of each pair, equal within a class: [pairs].
        others, fine, coarse: what describes a pair among values with as many elements: [rows, pairs].
        alone: the pairs that are priced by themselves: pieces are uneven, or parts have nothing in common.
    """

    keys: np.ndarray
    others: np.ndarray
    fine: np.ndarray
    coarse: np.ndarray
    alone: np.ndarray

    def key(self, pair: int) -> object | None:
        """Return what describes a pair; ``None`` if it is priced by itself."""
        if self.alone[pair]:
            return None
        others, fine, coarse = (rows[:, pair] for rows in (self.others, self.fine, self.coarse))
        return others.tobytes(), fine[fine > 0].tobytes(), coarse[coarse > 0].tobytes()


@dataclass
class Classes:
    """The classes of parts, and of what else matters, on a mesh of one machine."""

    mesh: Mesh
    machine: Machine
    _dims: dict[tuple[Dim, Dim, int], _Told | None] = field(default_factory=dict)
    _numbers: dict[object, int] = field(default_factory=dict)
    _free: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._number(NOTHING)

    def of(self, shape: tuple[int, ...], haves: Sequence[State], needs: Sequence[State]) -> Described:
        """Return the description of all pairs of states of a value."""
        count = len(haves) * len(needs)
        if not has_room(shape, self.mesh):
            none = np.zeros((0, count), dtype=np.int64)
            return Described(np.arange(count), none, none, none, np.ones(count, dtype=bool))
        alone, enough = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        fine: list[np.ndarray] = []
        coarse: list[np.ndarray] = []
        for place, n in enumerate(shape):
            (before, a), (after, b) = (_numbered([attr.dims[place] for attr, _ in side]) for side in (haves, needs))
            told = [self._told(x, y, n) for x in before for y in after]
            pairs = (a[:, None] * len(after) + b).ravel()
            alone |= np.array([row is None for row in told])[pairs]
            enough &= np.array([row is None or row[2] for row in told])[pairs]
            fine += list(_padded([row[0] if row else () for row in told])[:, pairs])
            coarse += list(_padded([row[1] if row else () for row in told])[:, pairs])
        (before, a), (after, b) = (
            _numbered([(attr.pending, dtype) for attr, dtype in side]) for side in (haves, needs)
        )
        others = np.array([[self._number((x, y)) for y in after] for x in before])[a[:, None], b].reshape(1, -1)
        first, second = self._sorted(fine, count), self._sorted(coarse, count) * ~enough
        _, keys = np.unique(_numbers_of(np.concatenate([others, first, second])), return_inverse=True)
        return Described(np.where(alone, count + np.arange(count), keys), others, first, second, alone)

    def _sorted(self, rows: list[np.ndarray], count: int) -> np.ndarray:
        """Return the parts of each pair in order; as many that are free and alike as there are axes."""
        table = np.sort(np.array(rows, dtype=np.int64).reshape(len(rows), count), axis=0)
        most = len(self.mesh.names)
        if len(table) > most:
            again = (table[most:] == table[:-most]) & np.array(self._free)[table[most:]]
            table[most:][again] = 0
            table.sort(axis=0)
        return table

    def _told(self, have: Dim, need: Dim, size: int) -> _Told | None:
        """Return the numbers of the parts of a dim."""
        key = have, need, size
        if key not in self._dims:
            prices = prices_of(self.mesh, self.machine)
            coarse, fine = dim_views(have, need, size, prices) or (None, None)
            if coarse is None or fine is None:
                self._dims[key] = None
            else:
                enough = coarse == fine or covers((fine,), (coarse,), prices.sizes)
                self._dims[key] = self._numbers_of_rows(fine), self._numbers_of_rows(coarse), enough
        return self._dims[key]

    def _numbers_of_rows(self, view: DimView) -> tuple[int, ...]:
        return tuple([self._number(row) for row, _, _ in view.rows])

    def _number(self, what: object) -> int:
        number = self._numbers.setdefault(what, len(self._numbers))
        if number == len(self._free):
            self._free.append(isinstance(what, tuple) and len(what) == 3 and not what[1] and not what[2])
        return number


NOTHING = None  # has the number 0, which fills tables


def _padded(rows: list[tuple[int, ...]]) -> np.ndarray:
    """Return rows of numbers as columns, with zeros at the end."""
    table = np.zeros((max(map(len, rows)), len(rows)), dtype=np.int64)
    for place, row in enumerate(rows):
        table[: len(row), place] = row
    return table


def _numbers_of(rows: np.ndarray) -> np.ndarray:
    """Return a number for each column, equal for equal ones."""
    base = int(rows.max()) + 1
    keys, size = np.zeros(rows.shape[1], dtype=np.int64), 1
    for row in rows:
        if size > 2**62 // base:
            different, keys = np.unique(keys, return_inverse=True)
            size = len(different)
        keys, size = keys * base + row, size * base
    return keys


def _numbered(things: Sequence) -> tuple[list, np.ndarray]:
    """Return the different things, and the number of each."""
    numbers: dict[object, int] = {}
    of_each = np.array([numbers.setdefault(thing, len(numbers)) for thing in things])
    return list(numbers), of_each
