"""List the states from which the transfers of a value to its uses begin: its homes, and what pending homes reduce to.

A pending value is reduced once (``once``), and what several uses share then begins at the reduced value. So a home that
is pending leads to *heads*, each at the price of a reduction; and from a head on, transfers are shared as from a home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.search.transfer_prices.chains import Chain, State
from autopar.search.transfer_prices.once import Find, reduction, ways_of


class Head(NamedTuple):
    """A home, or what one or several homes reduce to.

    Attributes:
        waits: the states for which the homes need not be reduced, with the nanoseconds of what leads to them.
    """

    state: State
    waits: dict[State, float]


@dataclass
class Heads:
    """The heads of a value, the homes first, and the nanoseconds of the ways to them: home, head → nanoseconds."""

    homes: int
    heads: list[Head]
    ways: dict[tuple[int, int], int] = field(default_factory=dict)

    def table(self, kept: float, penalty: float) -> np.ndarray:
        """Return the nanoseconds of the ways from each home to each head, of which a fraction counts."""
        table = np.where(np.eye(self.homes, len(self.heads), dtype=bool), 0.0, penalty)
        for place, nanoseconds in self.ways.items():
            table[place] = np.floor(nanoseconds * kept * 2**20) / 2**20
        return table

    def chains(self, find: Find, states: Sequence[State]) -> list[list[Chain]]:
        """Return the transfers from each head to some states; none to those that need not be reduced."""
        known = {state: [find(state, need) for need in states] for state in dict.fromkeys(h.state for h in self.heads)}
        return [
            [() if state in head.waits else chain for state, chain in zip(states, known[head.state], strict=True)]
            if head.waits
            else known[head.state]
            for head in self.heads
        ]


def heads_of(
    find: Find, homes: Sequence[State], uses: Sequence[Sequence[State]], others: Sequence[Sequence[State]]
) -> Heads:
    """Return the heads of a value.

    Args:
        find: from one state to another, the cheapest transfers.
        uses: the states that each of a few uses may need.
        others: those of all uses, where there are more.
    """
    needed = list(dict.fromkeys(state for states in uses for state in states))
    every = list(dict.fromkeys(state for states in others for state in states)) if others else needed
    waiting = len(uses) > 2 or bool(others and len(uses) > 1)
    apart = max(1, len(uses) - 1) if others else 1
    found = Heads(len(homes), [Head(home, {}) for home in homes])
    numbers: dict[object, int] = {(home, ()): number for number, home in enumerate(homes)}
    for number, home in enumerate(homes):
        if not home[0].pending:
            continue
        direct = [find(home, state) for state in every]
        if len({way for chain in direct if (way := reduction(chain))}) < 2:
            continue
        unreduced = [(s, chain) for s in needed if not reduction(chain := find(home, s))] if waiting else []
        for way in ways_of(find, home, every, direct):
            waits = tuple([(state, _beside(chain, way) / apart) for state, chain in unreduced])
            head = numbers.setdefault((way[-1].state, waits), len(found.heads))
            if head == len(found.heads):
                found.heads.append(Head(way[-1].state, dict(waits)))
            if head != number:
                found.ways[number, head] = sum(hop.nanoseconds for hop in way)
    return found


def _beside(chain: Chain, other: Chain) -> int:
    """Return the nanoseconds of a chain without the beginning that it has in common with another one."""
    same = 0
    while same < min(len(chain), len(other)) and chain[same] == other[same]:
        same += 1
    return sum(hop.nanoseconds for hop in chain[same:])
