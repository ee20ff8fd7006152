"""Bound the prices of the transfers of an update, of which homes are the ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.costs.machine import Machine
from autopar.ir.mesh import Mesh
from autopar.search.transfer_prices.chains import Chains, State
from autopar.search.transfer_prices.places import Places, numbers_of, odd_pairs
from autopar.transitions.axis_prices import prices_of
from autopar.transitions.least_prices import least_prices
from autopar.transitions.plan import has_room


@dataclass
class LeastChains:
    """Gives bounds where ``Chains`` gives prices."""

    mesh: Mesh
    machine: Machine
    _known: dict[object, int] = field(default_factory=dict)

    def nanoseconds(self, shape: tuple[int, ...], have: State, need: State) -> int:
        """Return what the transfers from one state of a value to another take at least."""
        key = shape, have, need
        if key not in self._known:
            prices = prices_of(self.mesh, self.machine)
            places = Places(shape, [have[0], need[0]], prices)
            here, there = places.of([have[0]]), places.of([need[0]])
            before, after = numbers_of(here.spots, there.spots)
            odd = bool(odd_pairs(here, there)[0, 0]) or not has_room(shape, self.mesh)
            kind = next((kind for _, kind in have[0].pending), "sum")
            dtypes = have[1], need[1]
            renews = bool(need[0].pending)
            bounds = least_prices(prices, math.prod(shape), dtypes, kind, renews=renews, odd=odd)
            loose = bool(here.loose[0] or there.loose[0])
            self._known[key] = 0 if loose else int(bounds.table[before[0, 0], after[0, 0]])
        return self._known[key]

    def prices(self, shape: tuple[int, ...], haves: Sequence[State], needs: Sequence[State]) -> np.ndarray:
        """Return what the transfers from some states to others take at least: [haves, needs], in nanoseconds."""
        return np.array([[self.nanoseconds(shape, have, need) for need in needs] for have in haves])


AnyChains = Chains | LeastChains
