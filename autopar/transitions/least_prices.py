"""Bound the prices of all transfers of a value at once: by what each axis does, whatever the parts have room for.

Where an axis is, counts as one of four places: nowhere, pending, in the part where the source has it, and in another
part. Each transfer between splits of a value is a move between such states that costs no more, so the shortest paths
between these few states are no dearer than those of ``path_search``, also where pieces are uneven.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import torch

from autopar.costs.prices import exchange_price
from autopar.ir import transfers
from autopar.transitions.axis_prices import Prices

FREE, PENDING, OWN, OTHER = range(4)  # where an axis is
FAR_OFF = 2.0**50  # nanoseconds of what cannot be


class LeastPrices:
    """Lower bounds of the prices of transfers between any two layouts of values of one size and dtype.

    A state is a place of each axis and whether the value is cast; its number is ``sum(place[k] * 4 ** k)``, and as much
    as there are places more after the cast.

    Attributes:
        table: nanoseconds, from each state before the cast to each of the goal's dtype: [4 ** axes, 4 ** axes]. In the
            source an axis that splits a part is in ``OWN``.
        kept: the same over transfers that all phases share, at the beginning of a path: all up to a reduction.
    """

    def __init__(
        self, prices: Prices, elements: int, dtypes: tuple[torch.dtype, torch.dtype], kind: str, *,
        renews: bool, narrows: bool, gathers: bool, odd: bool,
    ) -> None:  # fmt: skip
        """Find the shortest paths.

        Args:
            dtypes: of the source and of the goal.
            kind: of the reduction of pending axes.
            renews: whether axes may become pending.
            narrows: whether all phases share a cast to fewer bytes.
            gathers: whether all phases share a gather at the beginning.
            odd: whether pieces may be uneven, or parts have nothing in common: then a redistribute may slice for free.
        """
        self._prices, self._elements = prices, elements
        self._itemsizes = [dtype.itemsize for dtype in dtypes]
        self._sent = [transfers.reduced_as(kind, dtype).itemsize for dtype in dtypes]
        self._casts = dtypes[0] != dtypes[1]
        self._linear = not self._casts or (
            dtypes[0].is_floating_point and dtypes[1].is_floating_point and dtypes[0].itemsize < dtypes[1].itemsize
        )
        self._odd, self._renews, self._narrows = odd, renews, narrows and dtypes[1].itemsize < dtypes[0].itemsize
        axes = len(prices.sizes)
        self._places = np.array(list(itertools.product(range(4), repeat=axes)), dtype=np.int64)[:, ::-1]
        self._pieces = [elements // math.prod(self._split(places)) for places in self._places.tolist()]
        count = len(self._places)
        moves, kept, first = self._moves()
        last = slice(count, None) if self._casts else slice(0, count)
        direct = _closed(moves)
        best = direct
        for flag in range(1 + self._casts):
            rows = slice(flag * count, (flag + 1) * count)
            exchanges = self._exchanges(self._itemsizes[flag])
            waiting = flag * count + np.nonzero((self._places == PENDING).any(axis=1))[0]
            kept[waiting, rows] = np.minimum(kept[waiting, rows], exchanges[waiting - flag * count])
            over = _joined(direct[:count, rows], exchanges)
            best = np.minimum(best, np.pad(_joined(over, direct[rows]), ((0, len(best) - count), (0, 0)),
                                           constant_values=FAR_OFF))  # fmt: skip
        self.table = best[:count, last]
        shared = _closed(kept)
        if gathers:
            shared = np.minimum(shared, _joined(first, shared))
        self.kept = shared[:count]

    def _split(self, places: list[int]) -> list[int]:
        return [n for n, place in zip(self._prices.sizes, places, strict=True) if place >= OWN]

    def _moves(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the prices of single moves between states: all, those that phases share, and gathers."""
        count = len(self._places)
        size = count * (1 + self._casts)
        moves, kept, first = (np.full((size, size), FAR_OFF) for _ in range(3))
        for table in (moves, kept):
            np.fill_diagonal(table, 0.0)
        price = self._prices.nanoseconds
        for state, places in enumerate(self._places.tolist()):
            piece = self._pieces[state]
            for flag in range(1 + self._casts):
                here, bytes = state + flag * count, piece * self._itemsizes[flag]
                for k, (n, place) in enumerate(zip(self._prices.sizes, places, strict=True)):
                    axis, step = 1 << k, 4**k
                    splits = [here + (there - place) * step for there in (OWN, OTHER)]
                    if place == FREE:
                        moves[here, splits] = price("slice", axis, 2 * bytes // n)
                        if self._renews:
                            moves[here, here + PENDING * step] = price("pend", axis, bytes)
                    elif place == PENDING:
                        if self._linear or not flag:
                            sent = price("reduce_scatter", axis, piece * self._sent[flag])
                            moves[here, splits] = kept[here, splits] = sent
                    else:
                        free = here - place * step
                        moves[here, free] = first[here, free] = price("all_gather", axis, bytes * n)
                        moves[here, splits[place == OWN]] = price("all_to_all", axis, bytes)
                        if self._renews:
                            moves[here, free + PENDING * step] = price("pend", axis, bytes * n)
                if self._linear or not flag:
                    self._add_sums(moves, kept, here, places, piece * self._sent[flag])
            if self._casts and (self._linear or PENDING not in places):
                cast = price("cast", 0, piece * sum(self._itemsizes))
                moves[state, state + count] = cast
                if self._narrows:
                    kept[state, state + count] = cast
            if PENDING in places:
                kept[state::count] = moves[state::count]
        return moves, kept, first

    def _add_sums(self, moves: np.ndarray, kept: np.ndarray, here: int, places: list[int], sent: int) -> None:
        waiting = [k for k, place in enumerate(places) if place == PENDING]
        for some in (some for r in range(len(waiting)) for some in itertools.combinations(waiting, r + 1)):
            there = here - sum(PENDING * 4**k for k in some)
            price = self._prices.nanoseconds("all_reduce", sum(1 << k for k in some), sent)
            moves[here, there] = kept[here, there] = price

    def _exchanges(self, itemsize: int) -> np.ndarray:
        """Return what a redistribute from each state to each takes at least: [states, states].

        An axis that goes to a part may take the place of one that leaves it: then a rank has fewer partners. And an
        axis that stays in its part may change its place there.
        """
        sizes, nodes = np.array(self._prices.sizes), np.array(self._prices.nodes)
        here, there = self._places[:, None], self._places[None]
        leaves = (here >= OWN) & (there != here)
        comes = (there >= OWN) & (there != here)
        stays = (here >= OWN) & (there == here)
        possible = ((here == PENDING) == (there == PENDING)).all(axis=2)
        left, came = (np.where(some, sizes, 1).prod(axis=2) for some in (leaves, comes))
        moves_one = (leaves.sum(axis=2) == 1) & (comes == leaves).all(axis=2) & ~stays.any(axis=2)
        partners = np.where((came == 1) | moves_one, left - 1, np.maximum(1, left // came))
        far = (leaves & (nodes > 1)).any(axis=2)
        wanted = np.broadcast_to(np.array(self._pieces)[None], left.shape)
        inside = (left == 1) & stays.any(axis=2)
        partners, lacked = np.where(inside, 1, partners), np.where(inside, wanted // 2, wanted - -(-wanted // left))
        found = np.full(left.shape, FAR_OFF)
        known: dict[tuple[int, int, bool], float] = {}
        machine = self._prices.machine
        for i, j in zip(*np.nonzero(possible & ((left > 1) | inside)), strict=True):
            what = int(lacked[i, j]), int(partners[i, j]) + 1, bool(far[i, j])
            if what not in known:
                known[what] = round(exchange_price("redistribute", what, itemsize, machine) * 1e9)
            found[i, j] = known[what]
        if self._odd:
            found[possible & (left == 1)] = 0.0
        return found


def _closed(moves: np.ndarray) -> np.ndarray:
    """Return the shortest paths of any number of moves."""
    found = moves.copy()
    for k in range(len(found)):
        np.minimum(found, found[:, k, None] + found[k], out=found)
    return np.minimum(found, FAR_OFF)


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the shortest paths that consist of one of ``a`` and one of ``b``."""
    found = np.full((len(a), b.shape[1]), FAR_OFF)
    for k in range(len(b)):
        np.minimum(found, a[:, k, None] + b[k], out=found)
    return found


@lru_cache(maxsize=1024)
def least_prices(
    prices: Prices, elements: int, dtypes: tuple[torch.dtype, torch.dtype], kind: str = "sum", *,
    renews: bool = False, narrows: bool = False, gathers: bool = False, odd: bool = False,
) -> LeastPrices:  # fmt: skip
    """Return ``LeastPrices``; equal ones are found once."""
    return LeastPrices(prices, elements, dtypes, kind, renews=renews, narrows=narrows, gathers=gathers, odd=odd)
