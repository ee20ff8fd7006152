"""Price the transfers between two states of a value, once for each class of pairs of states.

The layers of a model, and its values of different ranks, ask for the same few transitions: a split of one dim moves to
another, a sum is reduced to a split. The first pair of a class is planned, and the others cost as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.costs.machine import Machine
from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.layout import layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.plan.shared_transfers import narrows
from autopar.search.transfer_prices.classes import UNREAD, Classes, State
from autopar.transitions import transitions
from autopar.transitions.by_levels import cheapest_way
from autopar.transitions.fastest import Fastest
from autopar.transitions.plan import even_path


class Hop(NamedTuple):
    """One transfer of a chain.

    Attributes:
        function: the transfer.
        state: the attribute and the dtype that it leads to; or the type, in a program.
        nanoseconds: its price.
        narrows: whether it is a cast to fewer bytes.
    """

    function: object
    state: Any
    nanoseconds: int
    narrows: bool


Chain = tuple[Hop, ...]


# mesh, machine, nanoseconds of a pair without transfers → the prices of classes, and the chains
Tables = dict[object, tuple[dict[object, int], dict[object, Chain]]]


class OutOfTime(Exception):
    """The deadline has passed."""


@dataclass
class Chains:
    """The chains of transfers on a mesh of one machine.

    Attributes:
        impossible: the nanoseconds of a pair without transfers.
        classes: class of pairs → the price of its first one.
        deadline: of ``time.monotonic``, after which no further pair is planned.
    """

    mesh: Mesh
    machine: Machine
    impossible: int = 2**33
    deadline: float = math.inf
    classes: dict[object, int] = field(default_factory=dict)
    _known: dict[object, Chain] = field(default_factory=dict)
    _classes: Classes = field(init=False)

    def __post_init__(self) -> None:
        self._classes = Classes(self.mesh, self.machine)

    def share(self, tables: Tables) -> None:
        """Take the prices that other programs on the mesh and machine have found, and leave the own ones to them."""
        self.classes, self._known = tables.setdefault((self.mesh, self.machine, self.impossible), ({}, {}))

    def chain(self, shape: tuple[int, ...], have: State, need: State) -> Chain:
        """Return the transfers from one state of a value to another; ``()`` if they are equal, or if it is not read."""
        if have == need or need[0] == UNREAD:
            return ()
        key = (shape, have, need)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._planned(shape, have, need)
        return found

    def nanoseconds(self, shape: tuple[int, ...], have: State, need: State) -> int:
        """Return what the transfers from one state of a value to another take."""
        return int(self.prices(shape, [have], [need])[0, 0])

    def prices(self, shape: tuple[int, ...], haves: Sequence[State], needs: Sequence[State]) -> np.ndarray:
        """Return what the transfers from some states of a value to others take: [haves, needs], in nanoseconds."""
        if any(attr == UNREAD for attr, _ in needs):
            every, read = np.zeros((len(haves), len(needs)), dtype=np.int64), [a != UNREAD for a, _ in needs]
            if any(read):
                every[:, read] = self.prices(shape, haves, [need for need in needs if need[0] != UNREAD])
            return every
        described, elements = self._classes.of(shape, haves, needs), math.prod(shape)
        keys, first, inverse = np.unique(described.keys, return_index=True, return_inverse=True)
        found = np.zeros(len(keys), dtype=np.int64)
        for number, place in enumerate(first.tolist()):
            have, need = haves[place // len(needs)], needs[place % len(needs)]
            key = described.key(place)
            price = self.classes.get((elements, key)) if key else None
            if price is None:
                price = sum(hop.nanoseconds for hop in self.chain(shape, have, need))
                if key:
                    self.classes[elements, key] = price
            found[number] = price
        return found[inverse.reshape(len(haves), len(needs))]

    def _planned(self, shape: tuple[int, ...], have: State, need: State) -> Chain:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        source = TensorType(shape, have[1], layout_of(self.mesh, have[0]))
        target = TensorType(shape, need[1], layout_of(self.mesh, need[0]))
        hops, type = [], source
        try:
            even = even_path(source, target, self.machine)
            if even is not None:
                return self._of_path(even, need)
            steps = transitions(source, target, self.machine)
        except TransitionError:  # as from a maximum of ranks to a sum of ranks
            return (Hop(None, need, self.impossible, False),)
        for step in steps:
            paid, _ = cheapest_way(step, type, self.machine)
            fewer = step.function is transfers.cast and narrows(type, step.type)
            hops.append(Hop(step.function, (step.type.attr, step.type.dtype), paid, fewer))
            type = step.type
        return tuple(hops)

    def _of_path(self, found: Fastest, need: State) -> Chain:
        """Return the transfers of a path, without building them."""
        moves, last = found.moves, len(found.path) - 1
        hops = []
        for k, (((name, *_), state), price) in enumerate(zip(found.path, found.prices, strict=True)):
            there = need if k == last else (moves.attr(state), moves.dtypes[state[3]])
            fewer = name == "cast" and moves.itemsizes[1] < moves.itemsizes[0]
            hops.append(Hop(transfers.TRANSFERS[name].function, there, price, fewer))
        return tuple(hops)
