"""Say where the axes are in states of a value, for lower bounds of the prices of transfers between them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir.layout import DistAttr, sized
from autopar.transitions.axis_prices import Prices
from autopar.transitions.least_prices import FREE, OTHER, OWN, PENDING

FIRST = 2  # the number of the first part; smaller ones are FREE and PENDING


class Placed(NamedTuple):
    """Where the axes are in some states.

    Attributes:
        places: of each axis: FREE, PENDING, or the number of the part that it begins to split: [states, axes].
        spots: the same, where each number is that of a part and the pieces of the dim before the axis.
        spans: the dim that an axis splits, its pieces before the axis, and those with it: [states, axes, 3].
        cuts: which of the cuts of dims in parts each state has: [states, cuts].
        crossed: which of them are inside the span of an axis: [states, cuts].
        uneven: the states whose pieces differ in size.
        loose: the states for which there are no bounds: ranks are idle, or parts begin where no others can.
    """

    places: np.ndarray
    spots: np.ndarray
    spans: np.ndarray
    cuts: np.ndarray
    crossed: np.ndarray
    uneven: np.ndarray
    loose: np.ndarray


class Places:
    """The places of axes in all states of one value.

    Two states whose axes are in other parts differ in what ranks hold. Those whose axes are in the same parts may
    differ too, in their order.

    Attributes:
        count: the number of different places.
    """

    def __init__(self, shape: Sequence[int], attrs: Sequence[DistAttr], prices: Prices) -> None:
        self._shape, self._prices = shape, prices
        self._axes = {name: k for k, name in enumerate(prices.names)}
        cuts: dict[tuple[int, int], None] = {}
        for attr in attrs:
            for d, dim in enumerate(attr.dims):
                cuts.update(dict.fromkeys((d, cut) for cut in itertools.accumulate(
                    [size or 1 for size, _ in dim[:-1]], lambda a, b: a * b)))  # fmt: skip
        self._cuts = sorted(cuts)
        self._ends = [[1, *(cut for own, cut in self._cuts if own == d and cut > 1)] for d in range(len(shape))]
        firsts = np.cumsum([FIRST, *map(len, self._ends)]).tolist()
        self._firsts, self.count = firsts[:-1], firsts[-1]

    def of(self, attrs: Sequence[DistAttr]) -> Placed:
        """Return where the axes are."""
        shape = len(attrs), len(self._axes)
        places, spans = np.full(shape, FREE), np.zeros((*shape, 3), dtype=np.int64)
        cuts, crossed = (np.zeros((len(attrs), len(self._cuts)), dtype=bool) for _ in range(2))
        uneven, idle = (np.zeros(len(attrs), dtype=bool) for _ in range(2))
        number = {cut: k for k, cut in enumerate(self._cuts)}
        for row, attr in enumerate(attrs):
            for axis, _ in attr.pending:
                if axis in self._axes:
                    places[row, self._axes[axis]] = PENDING
            for d, (dim, size) in enumerate(zip(attr.dims, self._shape, strict=True)):
                before = 1
                for n, axes in sized(dim, size):
                    at = before
                    for axis in axes:
                        if axis in self._axes:
                            k = self._axes[axis]
                            places[row, k] = self._firsts[d] + bisect_right(self._ends[d], at) - 1
                            spans[row, k] = d, at, at * self._prices.sizes[k]
                            at *= self._prices.sizes[k]
                            crossed[row] |= self._inside(d, at // self._prices.sizes[k], at)
                    uneven[row] |= not n or n % (at // before) != 0
                    idle[row] |= (-(-n // (at // before)) * (at // before - 1) >= n) if n and at > before else False
                    before *= n
                    if (d, before) in number and len(dim) > 1:
                        cuts[row, number[d, before]] = True
        spots = np.where(places >= FIRST, FIRST + spans[..., 0] + len(self._shape) * spans[..., 1], places)
        return Placed(places, spots, spans, cuts, crossed, uneven, idle | self._strange(cuts, spans))

    def _strange(self, cuts: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """Return the states with a cut that neither divides where an axis of another begins or ends, nor is divided."""
        strange = np.zeros(len(cuts), dtype=bool)
        for k, (d, cut) in enumerate(self._cuts):
            ends = {int(end) for end in spans[spans[..., 0] == d][:, 1:].ravel() if end}
            ends |= {other for own, other in self._cuts if own == d}
            if any(cut % end and end % cut for end in ends if end and cut):
                strange |= cuts[:, k]
        return strange

    def _inside(self, d: int, first: int, last: int) -> np.ndarray:
        return np.array([own == d and first < cut < last for own, cut in self._cuts], dtype=bool)


def numbers_of(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the states of ``LeastPrices`` that pairs of states are: [haves, needs] each.

    Args:
        a, b: the places of axes: [haves, axes] and [needs, axes].
    """
    steps = 4 ** np.arange(a.shape[1])
    before = (np.minimum(a, OWN) * steps).sum(axis=1)
    moved = (a[:, None] >= FIRST) & (b[None] >= FIRST) & (a[:, None] != b[None])
    after = (np.where(moved, OTHER, np.minimum(b, OWN)[None]) * steps).sum(axis=2)
    return np.broadcast_to(before[:, None], after.shape), after


def odd_pairs(haves: Placed, needs: Placed) -> np.ndarray:
    """Return which pairs have uneven pieces, or no parts in common: [haves, needs]."""
    odd = haves.uneven[:, None] | needs.uneven[None]
    odd |= (haves.cuts.astype(int) @ needs.crossed.T.astype(int) + haves.crossed.astype(int) @ needs.cuts.T) > 0
    for i, j in itertools.product(range(haves.spans.shape[1]), repeat=2):
        (dim, low, high), (goal, first, last) = haves.spans[:, i].T, needs.spans[:, j].T
        same = (low[:, None] == first[None]) & (high[:, None] == last[None])
        meets = (dim[:, None] == goal[None]) & (low[:, None] < last[None]) & (first[None] < high[:, None])
        odd |= meets & ~same
    return odd
