"""List the moves between states of an even value: which axes split which part, which are pending, and its dtype.

All pieces of a state have one size, which the set of its splits tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.costs.exchanges import Exchange, PartPair, counted_on_mesh
from autopar.costs.prices import exchange_on, exchange_price
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.transitions import chain
from autopar.transitions.axis_prices import Prices
from autopar.transitions.chain import Parts, op_argument, parts_argument
from autopar.transitions.rooms import Move, Splits, State, Unpriced, rooms_of

Edge = tuple[int, State, Move]  # nanoseconds, the state at the other end, and the move
SENT, BOTH = 2, 4  # the places in ``Moves.units`` of what is sent for a reduction, and of both dtypes


class Listed(Exception):
    """The messages of an exchange have to be listed, so its price may depend on which dims the axes split."""


class Moves:
    """The moves of one value between two ends.

    Attributes:
        parts: the part sizes, dim by dim; ``sizes`` are those of all parts.
        start, goal: the ends.
        reduced, renewed: axes that may be reduced, and those that may become pending.
        units: bytes of an element in both dtypes; those that a reduction sends of it; and of both dtypes together.
        context: what the moves of a state depend on, beside the parts.
        alike: whether these are the moves of a class of pairs, with some of the parts.
    """

    alike = False

    def __init__(self, start: TensorType, goal: TensorType, linear: bool, prices: Prices,
                 parts: Parts, have: Splits, want: Splits) -> None:  # fmt: skip
        self.prices, self.shape = prices, start.shape
        self.dtypes = start.dtype, goal.dtype
        casts = start.dtype != goal.dtype
        number = {name: k for k, name in enumerate(prices.names)}
        pending, wanted = (sum([1 << number[axis] for axis, _ in end.attr.pending]) for end in (start, goal))
        self.give(parts, (have, _set_of(have), pending, not casts), (want, _set_of(want), wanted, True))
        self.elements = math.prod(self.sizes)
        self.linear = linear
        self.reduced, self.renewed = pending, wanted
        self.kind = next((kind for _, kind in start.attr.pending), "sum")
        self.new_kind = next((kind for _, kind in goal.attr.pending), "sum")
        self.itemsizes = start.dtype.itemsize, goal.dtype.itemsize
        self.sent = tuple([transfers.reduced_as(self.kind, dtype).itemsize for dtype in self.dtypes])
        self.units = (*self.itemsizes, *self.sent, sum(self.itemsizes))
        kinds = self.kind == self.new_kind, self.new_kind in transfers.MERGES
        self.context = self.reduced, self.renewed, linear, casts, kinds

    def give(self, parts: Parts, start: State, goal: State) -> None:
        """Set the parts and the ends."""
        self.parts, self.sizes = parts, tuple([n for dim in parts for n in dim])
        self.rooms = rooms_of(parts, self.prices)
        self.start, self.goal = start, goal

    # -- moves -----------------------------------------------------------------------------------------------------

    def after(self, state: State) -> list[Edge]:
        """Return the moves from a state."""
        known, key = self.rooms.after, (self.context, state)
        if key not in known:
            known[key] = list(self._after(state))
        return self._priced(known[key], state[1])

    def before(self, state: State) -> list[Edge]:
        """Return the moves to a state."""
        known, key = self.rooms.before, (self.context, state)
        if key not in known:
            known[key] = list(self._before(state))
        return self._priced(known[key], state[1])

    def _priced(self, moves: list[Unpriced], used: int) -> list[Edge]:
        piece, units, price = self.elements // self.prices.counts[used], self.units, self.prices.nanoseconds
        return [
            (price(move[0], move[3], piece * units[unit] * more // less), state, move)
            for unit, more, less, state, move in moves
        ]

    def _after(self, state: State) -> Iterator[Unpriced]:
        splits, used, pending, cast = state
        reducible = pending & self.reduced if self.linear or not cast else 0
        new = self._new(pending, cast)
        taken = used | pending
        for k, n in enumerate(self.prices.sizes):
            axis = 1 << k
            if not taken & axis:
                for p in self.rooms.of(splits, n):
                    yield cast, 2, n, (_given(splits, p, k), used | axis, pending, cast), ("slice", p, p, axis)
                if new & axis:
                    yield cast, 1, 1, (splits, used, pending | axis, cast), ("pend", -1, -1, axis)
            elif reducible & axis:
                for p in self.rooms.of(splits, n):
                    there = _given(splits, p, k), used | axis, pending & ~axis, cast
                    yield SENT + cast, 1, 1, there, ("reduce_scatter", p, p, axis)
        for p, axes in enumerate(splits):
            if not axes:
                continue
            k = axes[-1]
            axis, n = 1 << k, self.prices.sizes[k]
            less = (*splits[:p], axes[:-1], *splits[p + 1 :])
            yield cast, n, 1, (less, used & ~axis, pending, cast), ("all_gather", p, p, axis)
            for q in self.rooms.of(splits, n):
                if q != p:
                    yield cast, 1, 1, (_given(less, q, k), used, pending, cast), ("all_to_all", p, q, axis)
            if new & axis and self.new_kind in transfers.MERGES:
                yield cast, n, 1, (less, used & ~axis, pending | axis, cast), ("pend", p, p, axis)
        some = reducible
        while some:
            yield SENT + cast, 1, 1, (splits, used, pending & ~some, cast), ("all_reduce", 0, 0, some)
            some = (some - 1) & reducible
        if not cast and (self.linear or not pending):
            yield BOTH, 1, 1, (splits, used, pending, True), ("cast", 0, 0, 0)

    def _before(self, state: State) -> Iterator[Unpriced]:
        splits, used, pending, cast = state
        reducible = self.reduced & ~used & ~pending if self.linear or not cast else 0
        for p, axes in enumerate(splits):
            if not axes:
                continue
            k = axes[-1]
            axis, n = 1 << k, self.prices.sizes[k]
            less = (*splits[:p], axes[:-1], *splits[p + 1 :])
            yield cast, 2, 1, (less, used & ~axis, pending, cast), ("slice", p, p, axis)
            if self.reduced & axis and (self.linear or not cast):
                there = less, used & ~axis, pending | axis, cast
                yield SENT + cast, n, 1, there, ("reduce_scatter", p, p, axis)
            for q in self.rooms.of(splits, n):
                if q != p:
                    yield cast, 1, 1, (_given(less, q, k), used, pending, cast), ("all_to_all", q, p, axis)
        for k, n in enumerate(self.prices.sizes):
            axis = 1 << k
            if not (used | pending) & axis:
                for p in self.rooms.of(splits, n):
                    yield cast, 1, 1, (_given(splits, p, k), used | axis, pending, cast), ("all_gather", p, p, axis)
            elif pending & self.renewed & axis and self._new(pending & ~axis, cast) & axis:
                yield cast, 1, 1, (splits, used, pending & ~axis, cast), ("pend", -1, -1, axis)
                if self.new_kind in transfers.MERGES:
                    for p in self.rooms.of(splits, n):
                        there = _given(splits, p, k), used | axis, pending & ~axis, cast
                        yield cast, 1, 1, there, ("pend", p, p, axis)
        some = reducible
        while some:
            yield SENT + cast, 1, 1, (splits, used, pending | some, cast), ("all_reduce", 0, 0, some)
            some = (some - 1) & reducible
        if cast and self.dtypes[0] != self.dtypes[1] and (self.linear or not pending):
            yield BOTH, 1, 1, (splits, used, pending, False), ("cast", 0, 0, 0)

    def _new(self, pending: int, cast: bool) -> int:
        """Return the axes that may become pending."""
        if not (self.linear or cast) or (pending & self.reduced and self.linear and self.kind != self.new_kind):
            return 0
        return self.renewed & ~pending

    def exchanges(self, here: State, there: State) -> bool:
        """Return whether a redistribute has messages; slices do better where it has none."""
        return self._exchange(here, there)[1] > 1

    def exchange(self, here: State, there: State) -> int:
        """Return the price of a redistribute."""
        itemsize, machine = self.itemsizes[here[3]], self.prices.machine
        return round(exchange_price("redistribute", self._exchange(here, there), itemsize, machine) * 1e9)

    def _exchange(self, here: State, there: State) -> Exchange:
        key = here[0], there[0], here[2]
        known = self.rooms.exchanges
        if key not in known:
            axes = self.prices.axes
            pairs = list(zip(self.sizes, self._names(here[0]), self._names(there[0]), strict=True))
            known[key] = self._counted(pairs, axes[here[2]])
        found = known[key]
        if found is not None:
            elements, count, far = found
            return elements * (self.elements // math.prod(self.sizes)), count, far
        if self.alike:
            raise Listed
        before, after = (Layout(self.prices.mesh, self.attr(state)) for state in (here, there))
        return exchange_on(before, after, self.shape, self.prices.machine)

    def _counted(self, pairs: list[PartPair], pending: tuple[str, ...]) -> Exchange | None:
        """Return ``exchange_on`` without a list of messages, if that is possible."""
        mesh, machine = self.prices.mesh, self.prices.machine
        found = counted_on_mesh(pairs, pending, mesh, machine.ranks_per_node)
        for k, level in enumerate(machine.levels if found is not None and found[2] else ()):
            further = counted_on_mesh(pairs, pending, mesh, level.ranks)
            if found is None or further is None:
                return None
            found = (*found[:2], k + 2 if further[2] else found[2])
        return found

    def attr(self, state: State) -> DistAttr:
        """Return the attribute of a state, in normal form."""
        kind = self.kind if state[2] & self.reduced else self.new_kind
        pending = tuple([(axis, kind) for axis in self.prices.axes[state[2]]])
        axes = iter(self._names(state[0]))
        split = [[next(axes) for _ in dim] for dim in self.parts]
        return transfers.join_parts(split, self.parts, pending, self.shape, self.prices.mesh)

    def _names(self, splits: Splits) -> list[tuple[str, ...]]:
        return [tuple([self.prices.names[k] for k in axes]) for axes in splits]

    def transfer(self, move: Move, here: State, there: State) -> chain.Move:
        """Return a move as a transfer with its arguments."""
        name, p, q, axes = move
        function = transfers.TRANSFERS[name].function
        names, parts = self.prices.axes[axes], parts_argument(self.parts)
        if parts and p >= 0 and self.rooms.is_plain(here[0]) and self.rooms.is_plain(there[0]):
            dims = [d for d, dim in enumerate(self.parts) for _ in dim]
            p, q, parts = dims[p], dims[q], {}
        if name == "cast":
            return function, {"dtype": self.dtypes[1]}
        if name == "redistribute":
            splits, sizes = transfers.flat_splits(self.attr(there), self.shape)
            return function, {"splits": splits, **({} if sizes is None else {"parts": sizes})}
        if name == "all_reduce":
            return function, {"axis": names[0] if len(names) == 1 else names, **op_argument(self.kind)}
        if name == "all_to_all":
            return function, {"source": p, "target": q, "axis": names[0], **parts}
        if name == "pend":
            place = {} if p < 0 else {"dim": p, **parts}
            return function, {"axis": names[0], **op_argument(self.new_kind), **place}
        op = op_argument(self.kind) if name == "reduce_scatter" else {}
        return function, {"dim": p, "axis": names[0], **op, **parts}


def _given(splits: Splits, p: int, k: int) -> Splits:
    return (*splits[:p], (*splits[p], k), *splits[p + 1 :])


def _set_of(splits: Splits) -> int:
    return sum([1 << k for axes in splits for k in axes])
