"""Count what the busiest rank of a ``redistribute`` or a ``recv`` exchanges, without listing the messages.

Axes are divided into *digits*, one for each prime factor of their size, so that a rank is a row of digits. An even
split puts digits at the positions of a part, major first. Rank r needs something of the piece of rank s exactly if
``s[h] == r[w]`` at each position that has a digit ``h`` before and a digit ``w`` afterwards. All overlaps have equal
size, so ``messages`` balances their number, and to count them is to multiply the sizes of digits: the time does not
depend on the number of ranks. Where pieces are uneven, or digits do not meet, the messages are listed: those of a few
ranks, if there are many (``fewer_ranks``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from autopar.costs.fewer_ranks import MOST_LISTED, busiest_of_many
from autopar.ir.layout import Axes, Layout, in_common
from autopar.ir.mesh import Mesh
from autopar.ir.messages import LEAST, messages
from autopar.ir.subaxes import is_sub_axis

# elements that the busiest rank sends or receives; its partners and itself; how many borders a message crosses: of its
# node, and of what is around it
Exchange = tuple[int, int, int]
PartPair = tuple[int, Axes, Axes]  # size of a part, and the axes that split it before and afterwards
Digit = tuple[str, int]  # an axis, and the number of one of its prime factors

NOTHING: Exchange = (0, 1, 0)


@lru_cache(maxsize=65536)
def busiest(source: Layout, target: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Exchange:
    """Return the most elements that a rank sends or receives in an exchange, and with how many ranks.

    The number of ranks counts itself. The last value is whether a message leaves its node.
    """
    parts = part_pairs(source, target, shape)
    counted = None
    if parts is not None:
        if source.mesh == target.mesh:
            pending = tuple([axis for axis, _ in source.attr.pending])
            counted = counted_on_mesh(parts, pending, source.mesh, ranks_per_node)
        else:
            counted = counted_between(parts, len(shape), source.mesh, target.mesh, ranks_per_node)
    if counted is not None:
        return counted
    sub_axes = any(is_sub_axis(axis) for layout in (source, target) for axis in layout.attr.axes)
    if source.mesh == target.mesh and source.mesh.size > MOST_LISTED and not sub_axes:
        return busiest_of_many(source, target, shape, ranks_per_node)
    return listed(source, target, shape, ranks_per_node)


def listed(source: Layout, target: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Exchange:
    """Return ``busiest`` from the list of all messages."""
    pending = tuple(axis for axis, _ in source.attr.pending)
    elements: dict[tuple[str, int], int] = {}
    partners: dict[tuple[str, int], int] = {}
    far = 0
    for message in messages(source, target, shape, pending):
        far |= message.sender // ranks_per_node != message.receiver // ranks_per_node
        for end in (("out", message.sender), ("in", message.receiver)):
            elements[end] = elements.get(end, 0) + message.elements
            partners[end] = partners.get(end, 0) + 1
    return max(elements.values(), default=0), max(partners.values(), default=0) + 1, far


def part_pairs(source: Layout, target: Layout, shape: tuple[int, ...]) -> list[PartPair] | None:
    """Return the parts that both Layouts consist of; ``None`` if there are none."""
    pairs: list[PartPair] = []
    for size, have, want in zip(shape, source.attr.dims, target.attr.dims, strict=True):
        if len(have) == len(want) == 1:
            pairs.append((size, have[0][1], want[0][1]))
            continue
        if source.mesh.axes != target.mesh.axes:
            return None
        common = in_common(have, want, size, source.mesh)
        if common is None:
            return None
        pairs += common
    return pairs


# -- digits ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def digits_of(axes: Axes, mesh: Mesh) -> tuple[tuple[Digit, int], ...]:
    """Return the digits of a part that is split over ``axes``, major first, each with its size."""
    return tuple([((axis, k), prime) for axis in axes for k, prime in enumerate(_primes(mesh.sizes[axis]))])


def _primes(size: int) -> list[int]:
    factors, prime = [], 2
    while size > 1:
        while size % prime == 0:
            factors.append(prime)
            size //= prime
        prime += 1
    return factors


Position = tuple[Digit | None, Digit | None, int]  # the digit before, the digit afterwards, and their size


@lru_cache(maxsize=65536)
def _positions(size: int, have: Axes, want: Axes, source: Mesh, target: Mesh) -> tuple[Position, ...] | None:
    """Return the digits at the positions of a part; ``None`` if pieces are uneven or digits do not meet."""
    if size % source.count(have) or size % target.count(want):
        return None
    before, after = digits_of(have, source), digits_of(want, target)
    both = min(len(before), len(after))
    positions: list[Position] = []
    for (h, size_before), (w, size_after) in zip(before, after, strict=False):
        if size_before != size_after:
            return None
        positions.append((h, w, size_before))
    positions += [(h, None, prime) for h, prime in before[both:]]
    positions += [(None, w, prime) for w, prime in after[both:]]
    if size % math.prod([prime for *_, prime in positions]):
        return None
    return tuple(positions)


def _all_positions(parts: Iterable[PartPair], source: Mesh, target: Mesh) -> list[Position] | None:
    found: list[Position] = []
    for size, have, want in parts:
        if have or want:
            positions = _positions(size, have, want, source, target)
            if positions is None:
                return None
            found += positions
    return found


# -- counting ----------------------------------------------------------------------------------------------------------


def counted_on_mesh(parts: Sequence[PartPair], pending: Axes, mesh: Mesh, ranks_per_node: int) -> Exchange | None:
    """Return what ``messages`` come to on one mesh; ``None`` where they have to be listed.

    Args:
        pending: axes over which the value is pending; messages stay within one coordinate of each.
    """
    elements = math.prod([size for size, _, _ in parts])
    if not elements:
        return NOTHING
    positions = _all_positions(parts, mesh, mesh)
    if positions is None:
        return None
    held, overlap, common, extra, pinned = 1, elements, 1, 1, 1
    for h, w, prime in positions:
        overlap //= prime
        if h is not None:
            held *= prime
            if w is None:
                extra *= prime
            else:
                common *= prime
                pinned *= prime if h != w else 1
    ranks = mesh.size // mesh.count(pending)  # that exchange data among themselves
    holders = ranks // held  # of one piece
    # of the ranks that need something of a piece, these hold it: all holders where no digit moves; where some do, no
    # more than this, and half of them at most
    needs = ranks // common - holders // pinned
    received = extra if pinned > 1 else extra - 1
    if not received:
        return NOTHING
    far = _leaves_node(positions, pending, holders, needs, mesh, ranks_per_node)
    if far is None:
        return None
    # a piece has ``extra`` needs for each holder, and its holders may be some of those that need it: none sends more
    return overlap * received, received + 1, far


def _leaves_node(
    positions: Sequence[Position], pending: Axes, holders: int, needs: int, mesh: Mesh, ranks_per_node: int
) -> bool | None:
    """Return whether a message leaves its node; ``None`` where that depends on the choice of senders."""
    nodes = node_digits(mesh, ranks_per_node)
    if nodes is None:
        return None
    if not nodes:
        return False
    placed = {h: w for h, w, _ in positions if h is not None}
    fixed = {w: prime for h, w, prime in positions if h is not None and w is not None}
    free = []
    for digit in nodes:
        if digit[0] in pending:
            continue
        if digit not in placed:
            free.append(digit)
        elif placed[digit] != digit:
            return True  # no holder of some piece is on the node of a rank that needs it
    if not free:
        return False
    # A sender is the least busy holder, and the nearest among these. Ranks take their turns node by node: all find a
    # holder of their own if no node has more ranks that need a piece than it has holders. Nearest means of one
    # coordinate, and a node that has several of an axis may hold nearer ones.
    axes = {axis for axis, _ in free}
    by_node = math.prod([fixed.get(digit, 1) for digit in free])
    by_axis = math.prod([prime for digit, prime in fixed.items() if digit[0] in axes])
    if needs * by_node > holders:
        return True
    return False if needs * by_axis <= holders else None


@lru_cache(maxsize=4096)
def node_digits(mesh: Mesh, ranks_per_node: int) -> tuple[Digit, ...] | None:
    """Return the digits of a rank that tell its node: none if all ranks are on one.

    ``None`` if nodes have no such digits.
    """
    ranks = mesh.ranks
    if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node:  # the least and the greatest
        return ()
    stride = ranks[1] - ranks[0]
    if ranks != tuple(range(ranks[0], ranks[0] + stride * len(ranks), stride)):
        return None
    if stride < ranks_per_node and (ranks_per_node % stride or ranks[0] % ranks_per_node >= stride):
        return None
    inside = max(1, ranks_per_node // stride)  # ranks of the mesh on a node
    digits, count = digits_of(mesh.names, mesh), 1
    for end in range(len(digits), -1, -1):
        if count == inside:
            return tuple([digit for digit, _ in digits[:end]])
        count *= digits[end - 1][1]
    return None


@lru_cache(maxsize=4096)
def nodes_of(mesh: Mesh, ranks_per_node: int) -> frozenset[int]:
    """Return the nodes that the ranks of a mesh are on."""
    return frozenset([rank // ranks_per_node for rank in mesh.ranks])


def counted_between(
    parts: Sequence[PartPair], dims: int, source: Mesh, target: Mesh, ranks_per_node: int
) -> Exchange | None:
    """Return what ``messages`` come to between two meshes; ``None`` where they have to be listed."""
    elements = math.prod([size for size, _, _ in parts])
    if not elements:
        return NOTHING
    here, there = nodes_of(source, ranks_per_node), nodes_of(target, ranks_per_node)
    far = here.isdisjoint(there)
    if not far and not (len(here) == len(there) == 1 and _disjoint(source, target)):
        return None
    positions = _all_positions(parts, source, target)
    if positions is None:
        return None
    held, overlap, common, extra = 1, elements, 1, 1
    for h, w, prime in positions:
        overlap //= prime
        if h is not None:
            held *= prime
            if w is None:
                extra *= prime
            else:
                common *= prime
    holders, needs = source.size // held, target.size // common  # of one piece
    if needs % holders and overlap >= 2 * LEAST:  # large boxes are divided
        senders = min(holders, needs * overlap // LEAST)
        divided = senders // needs
        if senders % needs or len(parts) != dims or _longest(parts, source, target) % divided:
            return None
        return overlap * extra, extra * divided + 1, far
    most = max(extra, -(-needs // holders))
    return overlap * most, most + 1, far


def _longest(parts: Sequence[PartPair], source: Mesh, target: Mesh) -> int:
    """Return the greatest length of an overlap of two pieces; parts are dims, and digits meet."""
    return max([size // max(source.count(have), target.count(want)) for size, have, want in parts])


@lru_cache(maxsize=4096)
def _disjoint(source: Mesh, target: Mesh) -> bool:
    return set(source.ranks).isdisjoint(target.ranks)
