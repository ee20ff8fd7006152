"""Price the transfers over axes of one mesh on one machine, and say which axes may split a part.

Axes are numbered in the order of the mesh, and sets of axes are bits of an integer.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.costs.exchanges import digits_of, node_digits
from autopar.costs.machine import Machine
from autopar.costs.prices import exchange_price, fastest_rates
from autopar.costs.ways import collective_nanoseconds
from autopar.ir.mesh import Mesh

Numbers = tuple[int, ...]  # of axes, in order
Room = tuple[int, int]  # the sets of axes that may split a part evenly, as bits; its size, where that matters too


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
        """Return the price of a transfer over a set of axes, at once or level by level.

        ``size`` is ``n`` of ``costs.prices``.

        Of a cast it is the bytes that are read and written.
        """
        key = name, axes, size
        found = self._known.get(key)
        if found is None:
            if name == "cast":
                found = round(exchange_price(name, (size, 1, 0), 1, self.machine) * 1e9)
            else:
                found = collective_nanoseconds(name, size, self.axes[axes], self.mesh, self.machine)
            self._known[key] = found
        return found


@lru_cache(maxsize=64)
def prices_of(mesh: Mesh, machine: Machine) -> Prices:
    return Prices(mesh, machine)
