"""Describe the pairs of states of a value by what the price of the transfers between them depends on.

Which dims the axes split does not matter to the price. So a pair is described by the sorted *classes of its dims*: for
each part, the axes that there is room for, and those that split it before and after; and beside these by the bytes,
the pending axes and the dtypes. All pairs of a table are described at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from autopar.costs.machine import Machine
from autopar.ir.layout import Dim, DistAttr
from autopar.ir.mesh import Mesh
from autopar.transitions.even_parts import DimView, Row, covers, dim_views
from autopar.transitions.plan import has_room
from autopar.transitions.states import prices_of

State = tuple[DistAttr, torch.dtype]
ALONE = -1  # the class of a dim that makes a pair be priced by itself: pieces are uneven, or parts have nothing in common


class Described(NamedTuple):
    """The pairs of a table.

    Attributes:
        keys: of each pair, equal within a class: [pairs].
        classes: of the dims of each pair, sorted, and the number of what else matters: [1 + dims, pairs].
        elements: of the value.
    """

    keys: np.ndarray
    classes: np.ndarray
    elements: int

    def key(self, pair: int) -> object | None:
        """Return what describes a pair among all values; ``None`` if it is priced by itself."""
        numbers = tuple(self.classes[:, pair].tolist())
        return None if ALONE in numbers else (self.elements, numbers)


@dataclass
class Classes:
    """The classes of dims, and of what else matters, on a mesh of one machine."""

    mesh: Mesh
    machine: Machine
    _dims: dict[tuple[Dim, Dim, int], int] = field(default_factory=dict)
    _numbers: dict[object, int] = field(default_factory=dict)

    def of(self, shape: tuple[int, ...], haves: Sequence[State], needs: Sequence[State]) -> Described:
        """Return the description of all pairs of states of a value."""
        count = len(haves) * len(needs)
        if not has_room(shape, self.mesh):
            return Described(np.arange(count), np.full((1, count), ALONE), 0)
        rows = []
        for place, n in enumerate(shape):
            (before, a), (after, b) = (_numbered([attr.dims[place] for attr, _ in side]) for side in (haves, needs))
            table = np.array([[self._dim(x, y, n) for y in after] for x in before])
            rows.append(table[a[:, None], b].ravel())
        rows = np.sort(np.array(rows), axis=0)
        (before, a), (after, b) = (_numbered([(attr.pending, dtype) for attr, dtype in side]) for side in (haves, needs))
        table = np.array([[self._number((x, y)) for y in after] for x in before])
        classes = np.concatenate([table[a[:, None], b].reshape(1, -1), rows])
        alone = (classes == ALONE).any(axis=0)
        keys = np.zeros(count, dtype=np.int64)
        for row in classes:
            _, row = np.unique(row, return_inverse=True)
            _, keys = np.unique(keys * (int(row.max()) + 1) + row, return_inverse=True)
        return Described(np.where(alone, count + np.arange(count), keys), classes, math.prod(shape))

    def _dim(self, have: Dim, need: Dim, size: int) -> int:
        found = self._dims.get((have, need, size))
        if found is None:
            found = self._dims[have, need, size] = self._number_of_dim(have, need, size)
        return found

    def _number_of_dim(self, have: Dim, need: Dim, size: int) -> int:
        """Return the number of what the coarsest and the finest parts of a dim tell."""
        prices = prices_of(self.mesh, self.machine)
        views = dim_views(have, need, size, prices)
        if views is None or None in views:
            return ALONE
        coarse, fine = views
        if coarse == fine:
            return self._number(_rows(fine))
        return self._number((_rows(coarse), _rows(fine), covers((fine,), (coarse,), prices.sizes)))

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))


def _rows(view: DimView) -> tuple[Row, ...]:
    return tuple(sorted([row for row, _, _ in view.rows]))


def _numbered(things: Sequence) -> tuple[list, np.ndarray]:
    """Return the different things, and the number of each."""
    numbers: dict[object, int] = {}
    of_each = np.array([numbers.setdefault(thing, len(numbers)) for thing in things])
    return list(numbers), of_each
