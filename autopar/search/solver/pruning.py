"""Restrict a factor graph to the states that can be part of an answer within the slack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.message_passing import MessagePassing


class Restricted(NamedTuple):
    """A factor graph of some states of another one, reparametrised.

    Attributes:
        constant: the nanoseconds that all its assignments have in common.
        kept: for each variable of the passing, its states.
        variables: variable of this graph → place in the passing; those with one state are left out.
    """

    graph: FactorGraph
    constant: float
    kept: list[Array]
    variables: list[int]

    def expanded(self, states: Sequence[int] | Array) -> Array:
        """Return the states of all variables of the passing, from those of this graph."""
        full = np.array([kept[0] for kept in self.kept])
        for own, place in enumerate(self.variables):
            full[place] = self.kept[place][states[own]]
        return full


def affordable(passing: MessagePassing, slack: float) -> list[Array]:
    """Return the states of each variable that some assignment within ``slack`` of the bound may have."""
    kept = []
    for place in range(len(passing.costs)):
        total = passing.collected(place)
        kept.append(np.nonzero(total <= total.min() + passing.lost + slack)[0])
    return kept


def restricted(passing: MessagePassing, kept: list[Array]) -> Restricted:
    """Return the graph of the kept states, with the messages moved into its costs."""
    graph, constant = FactorGraph(passing.graph.intern), 0.0
    own = [passing.reparametrised(place)[states] for place, states in enumerate(kept)]
    single = [len(states) == 1 for states in kept]
    pairs = []
    for link in passing.links:
        table, lower, upper = link.rest(), link.lower, link.upper
        left, right = link.left[kept[lower]], link.right[kept[upper]]
        if single[lower] and single[upper]:
            constant += float(table[left[0], right[0]])
        elif single[lower]:
            own[upper] = own[upper] + table[left[0]][right]
        elif single[upper]:
            own[lower] = own[lower] + table[:, right[0]][left]
        else:
            pairs.append((link, left, right, table))
    variables = [place for place in range(len(kept)) if not single[place]]
    number = {place: graph.add_variable(passing.name(place), own[place]) for place in variables}
    constant += sum(float(own[place][0]) for place in range(len(kept)) if single[place])
    for link, left, right, table in pairs:
        used_left, left = np.unique(left, return_inverse=True)
        used_right, right = np.unique(right, return_inverse=True)
        graph.add_edge(number[link.lower], number[link.upper], left, right, table[np.ix_(used_left, used_right)])
    return Restricted(graph, constant, kept, variables)
