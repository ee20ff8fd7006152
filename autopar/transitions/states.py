"""List the moves between states of an even value: which axes split which part, which are pending, and its dtype.

Axes are numbered in the order of the mesh, and sets of axes are bits of an integer. All pieces of a state have one
size, which the set of its splits tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from autopar.costs.exchanges import Exchange, busiest, counted_on_mesh, digits_of, node_digits
from autopar.costs.machine import Machine
from autopar.costs.prices import exchange_price, fastest_rates, group_price
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.transitions import chain
from autopar.transitions.chain import op_argument, parts_argument
from autopar.transitions.draft import Parts

Numbers = tuple[int, ...]  # of axes, in order
Splits = tuple[Numbers, ...]  # the axes of each part, major first


# the axes of each part, the set of these axes, the set of pending axes, and whether the value has the goal's dtype
State = tuple[Splits, int, int, bool]
Move = tuple[str, int, int, int]  # a transfer, its part, its other part, and the set of its axes
Room = tuple[int, int]
Unpriced = tuple[int, int, int, State, Move]  # which of ``Moves.units``, times this, divided by this; as ``Edge``
Edge = tuple[int, State, Move]  # nanoseconds, the state at the other end, and the move


SENT, BOTH = 2, 4  # the places in ``Moves.units`` of what is sent for a reduction, and of both dtypes


class Prices:
    """Prices of one machine on one mesh, in nanoseconds.

    Attributes:
        names, sizes: the axes that have more than one rank.
        counts, axes: the number of pieces of a part that a set of axes splits, and their names.
        nodes: for each axis, between how many nodes its ranks are; 1 for the axes inside a node.
        far: between how many nodes the ranks of a set of axes are.
        inside: the number of ranks on a node.
        rates: nanoseconds a received byte that no transfer is faster than: inside a node, and between nodes.
        latencies: nanoseconds of an empty exchange inside a node and between nodes; 0 if it was measured.
    """

    def __init__(self, mesh: Mesh, machine: Machine) -> None:
        self.mesh, self.machine = mesh, machine
        self.names = tuple([axis for axis, size in mesh.axes if size > 1])
        self.sizes = tuple([mesh.sizes[axis] for axis in self.names])
        sets = range(1 << len(self.names))
        self.axes = tuple([tuple([name for k, name in enumerate(self.names) if chosen >> k & 1]) for chosen in sets])
        self.counts = tuple([mesh.count(axes) for axes in self.axes])
        nodes = set(node_digits(mesh, machine.ranks_per_node) or ())
        digits = [[size for digit, size in digits_of((name,), mesh) if digit in nodes] for name in self.names]
        self.nodes = tuple(map(math.prod, digits))
        self.far = tuple([math.prod([n for k, n in enumerate(self.nodes) if chosen >> k & 1]) for chosen in sets])
        near, far = (rate * 1e9 for rate in fastest_rates(machine))
        self.rates = near, far
        inside, outside = machine.inside.latency * 1e9, machine.outside.latency * 1e9
        self.inside = self.counts[-1] // self.far[-1]
        self.latencies = 0.0 if machine.measured else inside, max(inside, outside)
        self._known: dict[tuple[str, int, int], int] = {}
        self._rooms: dict[int, Room] = {}
        self._digits = len({prime for name in self.names for _, prime in digits_of((name,), mesh)}) > 1

    def room(self, n: int) -> Room:
        """Return what tells how axes may split a part of this size: the sets that may, and where digits differ, it."""
        found = self._rooms.get(n)
        if found is None:
            sets = sum([1 << k for k, count in enumerate(self.counts) if n % count == 0])
            found = self._rooms[n] = sets, n if self._digits else 0
        return found

    def least(self, n: int) -> int:
        """Return the least size with the same room."""
        sets, size = self.room(n)
        return size or max([count for k, count in enumerate(self.counts) if sets >> k & 1])

    def count(self, axes: tuple[int, ...]) -> int:
        """Return the number of pieces of a part that some axes split."""
        return self.counts[sum([1 << k for k in axes])]

    def nanoseconds(self, name: str, axes: int, size: int) -> int:
        """Return the price of a transfer over a set of axes; ``size`` is ``n`` of ``costs.prices``.

        Of a cast it is the bytes that are read and written.
        """
        key = name, axes, size
        found = self._known.get(key)
        if found is None:
            if name == "cast":
                seconds = exchange_price(name, (size, 1, False), 1, self.machine)
            else:
                seconds = group_price(name, size, self.axes[axes], self.mesh, self.machine)
            found = round(seconds * 1e9)
            self._known[key] = found
        return found


@lru_cache(maxsize=64)
def prices_of(mesh: Mesh, machine: Machine) -> Prices:
    return Prices(mesh, machine)


class Listed(Exception):
    """The messages of an exchange have to be listed, so its price may depend on which dims the axes split."""


class Rooms:
    """Which parts of a value an axis may split too, and where the axes are; for parts of these sizes."""

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


@lru_cache(maxsize=1024)
def rooms_of(parts: Parts, prices: Prices) -> Rooms:
    return Rooms(parts, prices.sizes)


class Moves:
    """The moves of one value between two ends.

    Attributes:
        parts: the part sizes, dim by dim; ``sizes`` are those of all parts.
        start, goal: the ends.
        reduced, renewed: axes that may be reduced, and those that may become pending.
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
        known = self.rooms.after
        return self._priced(known[self.context, state] if (self.context, state) in known else
                            known.setdefault((self.context, state), list(self._after(state))), state[1])  # fmt: skip

    def before(self, state: State) -> list[Edge]:
        """Return the moves to a state."""
        known = self.rooms.before
        return self._priced(known[self.context, state] if (self.context, state) in known else
                            known.setdefault((self.context, state), list(self._before(state))), state[1])  # fmt: skip

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
                        yield cast, 1, 1, (_given(splits, p, k), used | axis, pending & ~axis, cast), ("pend", p, p, axis)
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
            axes, mesh, per_node = self.prices.axes, self.prices.mesh, self.prices.machine.ranks_per_node
            pairs = list(zip(self.sizes, self._names(here[0]), self._names(there[0]), strict=True))
            known[key] = counted_on_mesh(pairs, axes[here[2]], mesh, per_node)
        found = known[key]
        if found is not None:
            elements, count, far = found
            return elements * (self.elements // math.prod(self.sizes)), count, far
        if self.alike:
            raise Listed
        ends = [Layout(self.prices.mesh, self.attr(state)) for state in (here, there)]
        return busiest(*ends, self.shape, self.prices.machine.ranks_per_node)

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
