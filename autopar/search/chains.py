"""Price the transfers between two attributes of a value, once for each class of pairs of attributes.

The layers of a model, and its values of different ranks, ask for the same few transitions: a split of one dim moves to
another, a sum is reduced to a split. Which dims these are does not matter to the price. So a pair is described by its
*class*: for each part that an axis splits, the axes before and after, and beside these the pending axes, the bytes and
the dtypes. The first pair of a class is planned, and the others cost as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autopar.costs.machine import Machine
from autopar.costs.op_prices import nanoseconds
from autopar.costs.prices import step_price
from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.layout import WHOLE, Axes, DistAttr, in_common, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.plan.shared_transfers import narrows
from autopar.transitions import transitions
from autopar.transitions.fastest import Fastest
from autopar.transitions.plan import even_path

State = tuple[DistAttr, torch.dtype]


class Hop(NamedTuple):
    """One transfer of a chain.

    Attributes:
        function: the transfer.
        state: the attribute and the dtype that it leads to.
        nanoseconds: its price.
        narrows: whether it is a cast to fewer bytes.
    """

    function: object
    state: State
    nanoseconds: int
    narrows: bool


Chain = tuple[Hop, ...]


@dataclass
class Chains:
    """The chains of transfers on a mesh of one machine.

    Attributes:
        classes: class → the chain of its first pair.
        impossible: the nanoseconds of a pair without transfers.
    """

    mesh: Mesh
    machine: Machine
    impossible: int = 2**33
    classes: dict[object, Chain] = field(default_factory=dict)
    _known: dict[object, Chain] = field(default_factory=dict)

    def chain(self, shape: tuple[int, ...], have: State, need: State) -> Chain:
        """Return the transfers from one state of a value to another; ``()`` if they are equal."""
        if have == need:
            return ()
        key = (shape, have, need)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._chain(shape, have, need)
        return found

    def nanoseconds(self, shape: tuple[int, ...], have: State, need: State) -> int:
        """Return what the transfers from one state of a value to another take."""
        if have == need:
            return 0
        described = self._class_of(shape, have, need)
        if described is None:
            return sum(hop.nanoseconds for hop in self.chain(shape, have, need))
        return sum(hop.nanoseconds for hop in self._first_of(described, shape, have, need))

    def _chain(self, shape: tuple[int, ...], have: State, need: State) -> Chain:
        described = self._class_of(shape, have, need)
        if described is not None:
            chain = self._first_of(described, shape, have, need)
            if len(chain) == 1:
                return (chain[0]._replace(state=need),)
        return self._planned(shape, have, need)

    def _first_of(self, key: object, shape: tuple[int, ...], have: State, need: State) -> Chain:
        chain = self.classes.get(key)
        if chain is None:
            chain = self.classes[key] = self._planned(shape, have, need)
        return chain

    def _planned(self, shape: tuple[int, ...], have: State, need: State) -> Chain:
        source = TensorType(shape, have[1], layout_of(self.mesh, have[0]))
        target = TensorType(shape, need[1], layout_of(self.mesh, need[0]))
        even = even_path(source, target, self.machine)
        if even is not None:
            return self._of_path(even, need)
        hops, type = [], source
        try:
            steps = transitions(source, target, self.machine)
        except TransitionError:  # as from a maximum of ranks to a sum of ranks
            return (Hop(None, need, self.impossible, False),)
        for step in steps:
            seconds = step_price(step.function, type, dict(step.arguments), step.type, self.machine)
            fewer = step.function is transfers.cast and narrows(type, step.type)
            hops.append(Hop(step.function, (step.type.attr, step.type.dtype), nanoseconds(seconds), fewer))
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

    def _class_of(self, shape: tuple[int, ...], have: State, need: State) -> object | None:
        """Return the class of a pair.

        ``None`` if the pair is priced by itself: pieces are uneven, there are no parts in common, or a sum becomes
        pending, for which the order of the parts matters.
        """
        if set(need[0].pending) - set(have[0].pending):
            return None
        rows: list[tuple[int, Axes, Axes]] = []
        involved = self.mesh.count({*have[0].axes, *need[0].axes})
        free = 1
        for n, a, b in zip(shape, have[0].dims, need[0].dims, strict=True):
            if a == b == WHOLE:
                free *= n
                continue
            common = in_common(a, b, n, self.mesh)
            if common is None:
                return None
            for size, before, after in common:
                if not before and not after:
                    free *= size
                elif size % self.mesh.count(before) or size % self.mesh.count(after):
                    return None
                else:
                    rows.append((size if size % involved else 0, before, after))
        return (
            tuple(sorted(rows)), have[0].pending, need[0].pending, math.prod(shape),
            free if free < self.mesh.size else 0, have[1], need[1],
        )  # fmt: skip
