"""Count what the busiest rank of an exchange among many ranks moves, from the list of messages of a few of them.

``messages`` lists what each rank sends to each other one. Most of it says the same thing many times: along an axis that
splits a dim first, before and afterwards, all coordinates exchange data among themselves alone, and the first one has
the largest pieces; along an axis that splits nothing, all coordinates do the same. So the ranks at the first coordinate
of such axes stand for all. Where more ranks are left than can be listed, the busiest rank gets what the worst rank
lacks, sends its share of its piece to all that need it, and has as many partners as pieces may overlap with its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.boxes import most_lacked
from autopar.ir.layout import Axes, Dim, DistAttr, Layout, largest
from autopar.ir.mesh import Mesh, positions_by_group
from autopar.ir.messages import messages

MOST_LISTED = 64  # ranks, of which each may send a message to each other one

# elements that the busiest rank sends or receives; its partners and itself; whether a message leaves its node
Exchange = tuple[int, int, bool]


@dataclass(frozen=True)
class FewerRanks:
    """The exchange at the first coordinate of the axes that were left out.

    Attributes:
        source, target, shape: the exchange among these ranks.
        shapes: that shape, and those at other coordinates, whose smaller pieces may be on more ranks.
        alone: axes along which no message travels.
        alike: axes along which there are copies of all pieces.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    alone: Axes
    alike: Axes

    @staticmethod
    def of(source: Layout, target: Layout, shape: tuple[int, ...]) -> FewerRanks:
        """Return the exchange without the axes that repeat it; both Layouts are on one mesh, with the same pending."""
        mesh = source.mesh
        alone = [axis for axis, _ in source.attr.pending]
        dims: list[tuple[Dim, Dim]] = []
        sizes = list(shape)
        others = [{size} for size in shape]
        for d, (old, new) in enumerate(zip(source.attr.dims, target.attr.dims, strict=True)):
            if len(old) == len(new) == 1:
                (n, before), (m, after) = old[0], new[0]
                while before and after and before[0] == after[0]:
                    alone.append(before[0])
                    count = mesh.sizes[before[0]]
                    sizes[d] = -(-sizes[d] // count)  # the first piece is a largest one
                    others[d] = {piece for size in others[d] for piece in _pieces(size, count)}
                    before, after = before[1:], after[1:]
                size = None if n is None and m is None else sizes[d]
                others[d] = others[d] if size is None else {size}
                old, new = ((size, before),), ((size, after),)
            dims.append((old, new))
        used = {axis for pair in dims for dim in pair for _, axes in dim for axis in axes}
        left = [axis for axis in mesh.names if axis in used]
        alike = tuple(axis for axis, size in mesh.axes if size > 1 and axis not in used and axis not in alone)
        grid = np.asarray(mesh.ranks).reshape(mesh.shape)
        ranks = grid[tuple(slice(None) if axis in used else 0 for axis in mesh.names)].ravel().tolist()
        small = Mesh({axis: mesh.sizes[axis] for axis in left}, ranks=ranks)
        have, want = (Layout(small, DistAttr(tuple(pair[k] for pair in dims))) for k in (0, 1))
        return FewerRanks(have, want, tuple(sizes), tuple(itertools.product(*others)), tuple(alone), alike)


def _pieces(size: int, count: int) -> set[int]:
    """Return the different sizes of the pieces that are not empty: ``{2, 1}`` of 5 on 3 ranks."""
    piece = -(-size // count)
    return {piece, size % piece} - {0} if size else set()


def busiest_of_many(source: Layout, target: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Exchange:
    """Return the most elements that a rank sends or receives in an exchange on one mesh, and with how many ranks.

    The number of ranks counts itself. The last value is whether a message leaves its node; where coordinates lie on the
    nodes in different ways, it says so of messages that may, too.
    """
    few = FewerRanks.of(source, target, shape)
    moving = few.source.mesh.names
    if few.source.mesh.size > MOST_LISTED:
        elements, partners = _estimated(few)
        return elements, partners + 1, elements > 0 and _on_nodes(source.mesh, moving + few.alike, ranks_per_node)[1]
    counts = [_listed(few.source, few.target, shape, ranks_per_node) for shape in few.shapes]
    elements, sends, partners, far = (max(column) for column in zip(*counts, strict=True))
    if not elements:
        return 0, 1, False
    # where a rank has several messages to send, one with the same piece at another coordinate may send some of them
    axes = moving + few.alike if sends > 1 else moving
    lie_alike, meet_others = _on_nodes(source.mesh, axes, ranks_per_node)
    return elements, partners + 1, far if lie_alike and axes == moving else meet_others


@lru_cache(maxsize=4096)
def _listed(source: Layout, target: Layout, shape: tuple[int, ...], ranks_per_node: int) -> tuple[int, int, int, bool]:
    """Return the most elements of a rank, the most messages that one sends, the most partners, and as above."""
    sent: dict[int, tuple[int, int]] = {}
    received: dict[int, tuple[int, int]] = {}
    far = False
    for message in messages(source, target, shape):
        far |= message.sender // ranks_per_node != message.receiver // ranks_per_node
        for end, rank in ((sent, message.sender), (received, message.receiver)):
            elements, count = end.get(rank, (0, 0))
            end[rank] = elements + message.elements, count + 1
    ends = [*sent.values(), *received.values()] or [(0, 0)]
    sends = max([count for _, count in sent.values()], default=0)
    return max(elements for elements, _ in ends), sends, max(count for _, count in ends), far


@lru_cache(maxsize=4096)
def _on_nodes(mesh: Mesh, axes: Axes, ranks_per_node: int) -> tuple[bool, bool]:
    """Return whether all groups over ``axes`` lie on nodes in one way, and whether one of them is on several nodes."""
    along = tuple(axis for axis in mesh.names if axis in axes)
    nodes = np.asarray(mesh.ranks)[positions_by_group(mesh, along)] // ranks_per_node
    apart = nodes - nodes[:, :1]
    return bool((apart == apart[0]).all()), bool(apart.any())


def _estimated(few: FewerRanks) -> tuple[int, int]:
    """Return the most elements that a rank sends or receives, and the most partners, without a list."""
    mesh, shape = few.source.mesh, few.shape
    lacked = most_lacked(few.source, few.target, shape)
    held, needed = (mesh.count(layout.attr.axes) for layout in (few.source, few.target))
    # of each element there are ``size / held`` copies before, and ``size / needed`` ranks that need it
    sent = largest(few.source.attr, shape, mesh) * -(-held // needed)
    return (max(lacked, sent), min(mesh.size - 1, max(held, needed))) if lacked else (0, 0)
