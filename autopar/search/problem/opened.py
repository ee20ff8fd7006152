"""List the strategies of an op that only its expansion has: the *opened* splits, each with the price of its expansion.

    logits : f32[65536 128256/tp]                  the needs and gives are those of the strategy, and inside, each op
    y : f32[65536 128256/tp] = _log_softmax(…)     of the expansion has its own: the maximum is reduced over tp, …

For given layouts of operands and results, the cheapest layouts inside are searched as those of a program are. All ops
inside read an operand in the layout that the strategy needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.capture.decompose.expanded import expansion_of
from autopar.capture.decompose.expansions import EXPANSIONS, opened_factors
from autopar.costs.machine import Machine
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.plan.boundary import required_dtypes
from autopar.rules.strategies import Bound, axes_of
from autopar.search.problem.index_places import price_of_places
from autopar.search.problem.inside import Call, Expanded
from autopar.search.problem.problem import Problem
from autopar.search.problem.strategies import Placed, Places, strategies

AXES = 3  # of a mesh, from which on all ops inside split what the strategy splits
CACHED = 1024  # the most solved expansions that are kept


class OpenedStrategies(NamedTuple):
    """The opened strategies of an op.

    Attributes:
        placed: the strategies.
        prices: the nanoseconds of each without its ``places``.
        places: of each, what its expansion shares with others.
    """

    placed: tuple[Placed, ...]
    prices: np.ndarray
    places: tuple[tuple[Places, ...], ...]


class Opened:
    """The opened strategies of ops on the mesh of a machine."""

    def __init__(self, mesh: Mesh, machine: Machine) -> None:
        self.mesh, self.machine = mesh, machine

    def of(self, node: fx.Node, bound: Bound, parts: Mapping[str, tuple[int, ...]]) -> OpenedStrategies | None:
        """Return the opened strategies of an op; ``None`` if it has none."""
        if node.target not in EXPANSIONS:
            return None
        opened = frozenset(factor for factor, least in opened_factors(node) if bound.sizes.get(factor, 0) >= least > 0)
        opened &= bound.whole
        if not opened:
            return None
        record, read = record_of(node), [tensor_type(operand) for operand in operands(node)]
        types = [replace(type, dtype=dtype, layout=None)
                 for type, dtype in zip(read, required_dtypes(record, read), strict=True)]  # fmt: skip
        expansion = expansion_of(node)
        key = (node.target, id(expansion), tuple(types), tuple(sorted(parts.items())))
        found = _strategies(Call(key, bound, opened, expansion, types), self.mesh, self.machine)
        return found if found.placed else None


def charge_pair(problem: Problem, phase: str, size: int, pair: Sequence[int]) -> None:
    """Add to a problem what two ops pay for the places that they may share.

    Args:
        pair: the variables of the ops.
    """
    used = [
        [tuple(p for p in (each.inside.places if each.inside else ()) if p.size == size) for each in problem.placed[v]]
        for v in pair
    ]
    rows, columns = (list(dict.fromkeys(own)) for own in used)
    price = lambda places: price_of_places(problem.chains, [(phase, each) for each in places])  # noqa: E731
    table = np.array([[price((*a, *b)) for b in columns] for a in rows], dtype=np.float64)
    left, right = np.array([rows.index(own) for own in used[0]]), np.array([columns.index(own) for own in used[1]])
    problem.graph.add_edge(pair[0], pair[1], left, right, table)


@lru_cache(maxsize=CACHED)
def _strategies(call: Call, mesh: Mesh, machine: Machine) -> OpenedStrategies:
    bound = call.bound
    pattern = replace(bound.pattern, whole=bound.whole - call.opened)
    wanted = [
        placed
        for placed in strategies(replace(bound, pattern=pattern), mesh, dict(call.key[-1]))
        if any(factor in call.opened and axes_of(dim) for factor, dim in placed.split)
    ]
    wide = sum(size > 1 for _, size in mesh.axes) >= AXES
    expanded = None if wide else Expanded(call, mesh, machine, wanted)
    found: dict[object, tuple[Placed, int]] = {}
    for placed in wanted:
        for solved, price in (expanded or Expanded(call, mesh, machine, [placed], aligned=True)).solved(placed):
            key = solved.needs, solved.gives
            if key not in found or price < found[key][1]:
                found[key] = solved, price
    rows = list(found.values())
    prices = np.array([price for _, price in rows], dtype=np.float64)
    places = tuple(placed.inside.places if placed.inside else () for placed, _ in rows)
    return OpenedStrategies(tuple(placed for placed, _ in rows), prices, places)
