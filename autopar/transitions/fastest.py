"""Choose the transfers that take a machine the fewest nanoseconds.

Where all pieces are even, the shortest path between two states is found, once for each class of pairs of states.
Otherwise all chains of ``drafts``, relayouts and precursors are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.costs.machine import Machine
from autopar.ir.record import TensorType
from autopar.transitions.axis_prices import Prices, prices_of
from autopar.transitions.by_levels import cheapest_way
from autopar.transitions.chain import TransferChain, TransferStep
from autopar.transitions.classes import alike, class_of, renamed
from autopar.transitions.even_parts import View, even_views
from autopar.transitions.path_search import Key, Path, Search
from autopar.transitions.states import Listed, Moves

FAR_OFF = 1 << 62
CLASSES = 1 << 16  # paths that are kept


def nanoseconds(start: TensorType, steps: Sequence[TransferStep], machine: Machine) -> int:
    """Return the price of a sequence of transfers, each rounded to nanoseconds, and in its cheapest way."""
    total, here = 0, start
    for step in steps:
        total += cheapest_way(step, here, machine)[0]
        here = step.type
    return total


def fastest_of_even(start: TensorType, goal: TensorType, linear: bool, machine: Machine) -> TransferChain | None:
    """Return the fastest transfers on one mesh; ``None`` if pieces are uneven, or the two have no common parts.

    Args:
        linear: whether a pending value may be cast.
    """
    found = fastest_path(start, goal, linear, machine)
    if found is None:
        return None
    moves = found.moves
    here, steps = moves.start, []
    for move, there in found.path:
        steps.append(moves.transfer(move, here, there))
        here = there
    return TransferChain(start).then(*steps)


class Fastest(NamedTuple):
    """A path, what its moves mean, and their prices in nanoseconds."""

    moves: Moves
    path: Path
    prices: tuple[int, ...]


def fastest_path(start: TensorType, goal: TensorType, linear: bool, machine: Machine) -> Fastest | None:
    """Return the moves of ``fastest_of_even``."""
    assert start.layout is not None
    mesh = start.layout.mesh
    prices = prices_of(mesh, machine)
    found: tuple[Key, Fastest] | None = None
    for view in even_views(start.attr.dims, goal.attr.dims, start.shape, prices):
        moves = Moves(
            start, goal, linear, prices, tuple([dim.sizes for dim in view]),
            tuple([axes for dim in view for axes in dim.have]), tuple([axes for dim in view for axes in dim.want]),
        )  # fmt: skip
        key, path, paid = _path_of_class(moves, view)
        if found is None or key < found[0]:
            found = key, Fastest(moves, path, paid)
    return found and found[1]


_Known = tuple[Key, Path, tuple[int, ...]]  # the key of a path, the path, and the prices of its moves


@lru_cache(maxsize=64)
def _classes(prices: Prices) -> dict[object, _Known | None]:
    """Return the paths that are known on a mesh: class → the path for its parts; ``None`` where pairs differ."""
    return {}


def _path_of_class(moves: Moves, view: View) -> _Known:
    """Return the fastest path, by the path of the class of the pair."""
    described, known = class_of(moves, view), _classes(moves.prices)
    if described.key not in known:
        if len(known) == CLASSES:
            known.clear()
        try:
            known[described.key] = _searched(alike(moves, described.order))
        except Listed:
            known[described.key] = None
    found = known[described.key]
    if found is None:
        return _searched(moves)
    return found[0], renamed(found[1], described.order, len(moves.sizes)), found[2]


def _searched(moves: Moves) -> _Known:
    search = Search(moves, (FAR_OFF, 0, 0))
    path = search.run()
    assert path is not None
    return search.best, path, search.prices
