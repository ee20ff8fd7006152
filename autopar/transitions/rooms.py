"""Keep what is known of the parts of a value, whatever its bytes: rooms for axes, moves, and bounds of paths."""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.costs.exchanges import Exchange
from autopar.transitions.axis_prices import Numbers, Prices
from autopar.transitions.chain import Parts

Splits = tuple[Numbers, ...]  # the axes of each part, major first
# the axes of each part, the set of these axes, the set of pending axes, and whether the value has the goal's dtype
State = tuple[Splits, int, int, bool]
Move = tuple[str, int, int, int]  # a transfer, its part, its other part, and the set of its axes
# which of ``Moves.units``, times this, divided by this; the state at the other end, and the move
Unpriced = tuple[int, int, int, State, Move]


class Rooms:
    """Which parts of a value an axis may split too, and where the axes are; for parts of these sizes.

    Attributes:
        after, before: (context, state) → its moves, in each direction.
        bounds: ends of a path → whether it leaves a node, and nanoseconds a byte: of all ranks, and of the worst one.
        exchanges: ends of a redistribute → what it exchanges, if the value has no other parts; ``None`` if messages
            have to be listed.
        least_exchanges: ends of a redistribute → nanoseconds of its messages at least, and those of each byte.
    """

    def __init__(self, parts: Parts, axes: tuple[int, ...]) -> None:
        self.after: dict[object, list[Unpriced]] = {}
        self.before: dict[object, list[Unpriced]] = {}
        self.bounds: dict[object, tuple[bool, float, float]] = {}
        self.exchanges: dict[object, Exchange | None] = {}
        self.least_exchanges: dict[object, tuple[float, float]] = {}
        self._parts, self._sizes, self._axes = parts, [n for dim in parts for n in dim], axes
        self._rooms: dict[tuple[Splits, int], tuple[int, ...]] = {}
        self._places: dict[Splits, tuple[tuple[int, int] | None, ...]] = {}
        self._unions: dict[tuple[Splits, Splits], tuple[int, bool]] = {}

    def of(self, splits: Splits, n: int) -> tuple[int, ...]:
        """Return the parts that an axis of size ``n`` may split evenly, as the minor-most one.

        Those come first after which dims are split plainly: of two equal paths the first is found.
        """
        found = self._rooms.get((splits, n))
        if found is None:
            rows = zip(self._sizes, splits, strict=True)
            counts = [(size, n * math.prod([self._axes[k] for k in axes])) for size, axes in rows]
            places = [p for p, (size, count) in enumerate(counts) if not size % count]
            if len(counts) > len(self._parts):
                places.sort(key=lambda p: not self.is_plain((*splits[:p], (*splits[p], -1), *splits[p + 1 :])))
            found = self._rooms[splits, n] = tuple(places)
        return found

    def is_plain(self, splits: Splits) -> bool:
        """Return whether these are splits of plain dims: an axis splits a part if others fill the parts before it."""
        rest = iter(splits)
        for dim in self._parts:
            full = True
            for n in dim:
                axes = next(rest)
                if axes and not full:
                    return False
                full = full and (-1 in axes or math.prod([self._axes[k] for k in axes]) == n)
        return True

    def places(self, splits: Splits) -> tuple[tuple[int, int] | None, ...]:
        """Return for each axis the part that it splits, and the number of pieces that it splits further."""
        found = self._places.get(splits)
        if found is None:
            places: list[tuple[int, int] | None] = [None] * len(self._axes)
            for p, axes in enumerate(splits):
                before = 1
                for k in axes:
                    places[k] = p, before
                    before *= self._axes[k]
            found = self._places[splits] = tuple(places)
        return found

    def union(self, have: Splits, want: Splits) -> tuple[int, bool]:
        """Return into how many overlaps two splits divide a value, or fewer; and whether some rank keeps nothing."""
        found = self._unions.get((have, want))
        if found is None:
            count, moved = 1, False
            for a, b in zip(have, want, strict=True):
                if a != b:
                    short = min(len(a), len(b))
                    moved |= a[:short] != b[:short]
                count *= max(math.prod([self._axes[k] for k in a]), math.prod([self._axes[k] for k in b]))
            found = self._unions[have, want] = count, moved
        return found


@lru_cache(maxsize=4096)
def rooms_of(parts: Parts, prices: Prices) -> Rooms:
    return Rooms(parts, prices.sizes)
