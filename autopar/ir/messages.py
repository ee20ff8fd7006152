"""Plan an exchange: which rank sends which box to which rank, so that each gets what it needs and lacks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from autopar.ir.boxes import Box, Runs, box_of, count, overlap, volume
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Message:
    """A box of the value that one rank sends to another."""

    sender: int
    receiver: int
    box: Box

    @cached_property
    def elements(self) -> int:
        return volume(self.box)


# smallest part of a divided box, in elements: a MiB or so, which a link moves while one more message starts
LEAST = 1 << 18


@lru_cache(maxsize=4096)
def messages(
    source: Layout, target: Layout, shape: tuple[int, ...], kept: tuple[str, ...] = (), *, least: int = LEAST
) -> tuple[Message, ...]:
    """Return the messages that bring each rank the elements that it needs and lacks.

    Each element comes once, from one rank that holds it. Replicas share the work. Of the ranks that hold a box, the one
    with the fewest elements to send so far sends it; among equals the nearest (``_whole``). Between meshes, where a few
    ranks may need what many hold, large boxes are divided if the busiest sender then sends less (``_in_shares``); on
    one mesh, where all ranks need something, they stay whole. The messages have one order on all ranks, (receiver,
    sender), with at most one message for each pair. Ranks that send and receive in this order, one message after the
    other, finish even if a send waits for its receive.

    Args:
        kept: axes over which the value is pending; messages stay within one coordinate of each.
        least: the smallest part of a divided box, in elements.
    """
    holders: dict[tuple[tuple[int, ...], Box], list[int]] = {}
    for rank in source.mesh.ranks:
        box = box_of(source, shape, rank)
        if volume(box):
            holders.setdefault((_point(source.mesh, rank, kept), box), []).append(rank)
    needs_of: dict[tuple[tuple[int, ...], Box], list[Need]] = {}
    held_box = {rank: box for (_, box), ranks in holders.items() for rank in ranks}
    # the index sets of the boxes, dim by dim: only boxes that overlap are compared
    sets = [dict.fromkeys(box[d] for _, box in holders) for d in range(len(shape))]
    for rank in target.mesh.ranks:
        need, where = box_of(target, shape, rank), _point(target.mesh, rank, kept)
        if not volume(need):
            continue
        overlaps = [[(part, both) for part in sets[d] if (both := overlap(part, need[d]))] for d in range(len(shape))]
        for pieces in itertools.product(*overlaps):
            box = tuple(part for part, _ in pieces)
            if held_box.get(rank) != box and (where, box) in holders:
                needs_of.setdefault((where, box), []).append((rank, tuple(both for _, both in pieces)))
    sent: list[Message] = []
    alike = source.mesh.axes == target.mesh.axes
    points = {
        (end, rank): _point(layout.mesh, rank, layout.mesh.names)
        for end, layout in enumerate((source, target))
        for rank in layout.mesh.ranks
        if alike
    }
    for key, needs in needs_of.items():
        chosen = list(_whole(holders[key], needs, points))
        if source.mesh != target.mesh and any(volume(box) >= 2 * least for _, box in needs):
            chosen = min(chosen, list(_in_shares(holders[key], sorted(needs), least)), key=_most_sent)
        sent += chosen
    return tuple(sorted(sent, key=lambda message: (message.receiver, message.sender)))


Need = tuple[int, Box]  # a receiver, and the part that it needs of one sender's box


def _most_sent(sent: Sequence[Message]) -> int:
    """Return the elements that the busiest sender sends."""
    load: dict[int, int] = {}
    for message in sent:
        load[message.sender] = load.get(message.sender, 0) + message.elements
    return max(load.values())


def _whole(
    holders: Sequence[int], needs: Sequence[Need], points: Mapping[tuple[int, int], tuple[int, ...]]
) -> Iterator[Message]:
    """Yield one message for each need, largest first, from the holder with the least to send so far.

    Among equals it is the nearest. On one mesh, nearest means the same coordinates on the outer axes: links along them
    are slower, and an axis along which no message travels need not be part of the exchange. Between two meshes with the
    same axes, such as stages, it means the same too, so that the messages of all values join the same pairs of ranks.

    Args:
        points: 0 for senders or 1 for receivers, and a rank → its coordinates; empty where the meshes have other axes.
    """
    load = dict.fromkeys(holders, 0)
    for rank, box in sorted(needs, key=lambda need: -volume(need[1])):
        point = points.get((1, rank), ())
        nearest = (
            (load[holder], tuple(map(operator.ne, point, points.get((0, holder), ()))), abs(holder - rank), holder)
            for holder in holders
        )
        *_, sender = min(nearest)
        load[sender] += volume(box)
        yield Message(sender, rank, box)


def _in_shares(holders: Sequence[int], needs: Sequence[Need], least: int) -> Iterator[Message]:
    """Put the needs in a row and cut it into one stretch per holder.

    The stretches are equal shares in the fewest parts, sent to near ranks. This is McNaughton's wrap-around rule
    (Scheduling with deadlines and loss functions, 1959). Parts smaller than ``least`` are avoided up to a row: there
    are no more stretches than that allows, and a part that is left whole goes to the holder whose stretch has its
    middle. So a share is exceeded by two ``least`` at most.
    """
    total = sum(volume(box) for _, box in needs)
    near = sorted(holders, key=lambda holder: min(abs(holder - rank) for rank, _ in needs))
    holders = sorted(near[: total // least])
    share = Fraction(total, len(holders))
    begin = 0
    for rank, box in needs:
        end, cuts = begin + volume(box), [Fraction(begin)]
        for k in range(int(begin / share) + 1, math.ceil(end / share)):
            if k * share - cuts[-1] >= least and end - k * share >= least:
                cuts.append(k * share)
        for (a, b), part in zip(
            itertools.pairwise([*cuts, Fraction(end)]),
            _cut(box, [Fraction(cut - begin, end - begin) for cut in cuts]),
            strict=True,
        ):
            if volume(part):
                yield Message(holders[int((a + b) / 2 / share)], rank, part)
        begin = end


def _cut(box: Box, at: Sequence[Fraction]) -> list[Box]:
    """Cut a box along its longest dim into parts that begin at the fractions ``at``."""
    if len(at) == 1:
        return [box]
    dim = max(range(len(box)), key=lambda d: count(box[d]))
    size = count(box[dim])
    ends = [round(size * part) for part in (*at, Fraction(1))]
    return [(*box[:dim], _positions(box[dim], a, b), *box[dim + 1 :]) for a, b in itertools.pairwise(ends)]


def _positions(runs: Runs, first: int, last: int) -> Runs:
    """Return the indices from position ``first`` up to ``last``; the inverse of ``within``."""
    indices, before = [], 0
    for a, b in runs:
        start, stop = max(a, a + first - before), min(b, a + last - before)
        if start < stop:
            indices.append((start, stop))
        before += b - a
    return tuple(indices)


def _point(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    at = mesh.coordinates(rank)
    return tuple(at[axis] for axis in axes)


def axes_between(sent: Sequence[Message], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of one mesh along which messages travel, in mesh order."""
    travelled, left = set[str](), list(mesh.names)
    for message in sent:
        if not left:
            break
        sender, receiver = mesh.coordinates(message.sender), mesh.coordinates(message.receiver)
        travelled.update(axis for axis in left if sender[axis] != receiver[axis])
        left = [axis for axis in left if axis not in travelled]
    return tuple(axis for axis in mesh.names if axis in travelled)
