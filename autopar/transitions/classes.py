"""Describe the two ends of a path by all that the path depends on, so that pairs of states that are alike share one.

Which dims the axes split does not matter to the fastest transfers, only which axes a part still has room for. So the
parts are sorted, those without room are left out, and of parts that are alike and that no axis splits at either end as
many are kept as there are axes. A path is found once for a *class* of pairs, and for others its parts are renamed.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from autopar.transitions.even_parts import Row, View
from autopar.transitions.path_search import Path
from autopar.transitions.rooms import Move, State
from autopar.transitions.states import Moves


class Class(NamedTuple):
    """A class of pairs.

    Attributes:
        key: equal for all pairs of the class.
        order: of each part of the class, its number among the parts of the pair.
    """

    key: object
    order: tuple[int, ...]


def class_of(moves: Moves, view: View) -> Class:
    """Return the class of the ends of the moves of a view."""
    most, first = len(moves.prices.sizes), 0
    rows: list[tuple[Row, int, int]] = []
    for dim in view:
        rows += [(row, late, first + p) for row, late, p in dim.rows]
        first += len(dim.sizes)
    rows.sort()
    kept: list[tuple[Row, int]] = []
    before, count = None, 0
    for row, _, p in rows:
        count = count + 1 if row == before else 1
        before = row
        if row[1] or row[2] or count <= most:
            kept.append((row, p))
    ends = moves.start[1:], moves.goal[1:], moves.units, moves.context
    return Class((tuple([row for row, _ in kept]), ends, moves.elements), tuple([p for _, p in kept]))


def alike(moves: Moves, order: tuple[int, ...]) -> Moves:
    """Return moves between the same ends for the parts of a class only."""
    other = copy(moves)
    other.alike = True
    have, want = (tuple([splits[p] for p in order]) for splits in (moves.start[0], moves.goal[0]))
    sizes = tuple([(moves.prices.least(moves.sizes[p]),) for p in order])
    other.give(sizes, (have, *moves.start[1:]), (want, *moves.goal[1:]))
    return other


def renamed(path: Path, order: tuple[int, ...], count: int) -> Path:
    """Return the path of a class for a pair with so many parts."""
    found: list[tuple[Move, State]] = []
    for (name, p, q, axes), (splits, used, pending, cast) in path:
        row: list[tuple[int, ...]] = [()] * count
        for place, split in zip(order, splits, strict=True):
            row[place] = split
        if name in PLACED and p >= 0:
            p, q = order[p], order[q]
        found.append(((name, p, q, axes), (tuple(row), used, pending, cast)))
    return tuple(found)


PLACED = ("slice", "pend", "reduce_scatter", "all_gather", "all_to_all")  # transfers of parts
