"""Draft the ways to reduce the pending axes of a value.

An axis is reduced to a split of the goal if that is possible, innermost axis first. A reduction works on pieces if
other ranks hold replicas and that saves enough bytes. The remaining axes are reduced at once, or to splits of their own
if transfers follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.ir import transfers
from autopar.ir.layout import Axes, DistAttr, Layout, normal_dim, sized
from autopar.ir.record import TensorType
from autopar.transitions.chain import (
    Cut,
    Dims,
    Draft,
    Move,
    Reduced,
    View,
    axes_of,
    first_lengths,
    first_view,
    op_argument,
    parts_argument,
    parts_of,
    places_for,
    views,
)

# -- pending -----------------------------------------------------------------------------------------------------------
#
# List the values from which a pending value can be made.


Place = tuple[int, int] | None  # a part, and the number of the goal's splits that precede; ``None``: the whole value


class Precursor(NamedTuple):
    """A value from which a goal can be made, and how.

    Attributes:
        dims: the splits of the precursor, in normal form.
        lengths: the lengths of its first piece, dim by dim.
        pended: the goal's new pending axes, each with its kind and the part that becomes pending.
        cut: the splits of the goal that slices make afterwards, each with its part.
    """

    goal: TensorType
    dims: Dims
    lengths: tuple[int, ...]
    pended: tuple[tuple[str, str, Place], ...]
    cut: tuple[tuple[int, str], ...]

    @property
    def steps(self) -> int:
        """The number of transfers from here to the goal."""
        return len(self.pended) + len(self.cut)

    @property
    def type(self) -> TensorType:
        new = {axis for axis, _, _ in self.pended}
        pending = tuple(pair for pair in self.goal.attr.pending if pair[0] not in new)
        return replace(self.goal, layout=Layout(self.goal.mesh, DistAttr(self.dims, pending)))

    def transfers(self) -> list[Move]:
        """Return the transfers from here to the goal."""
        parts = parts_argument(transfers.part_sizes(self.goal.attr, self.goal.shape))
        pends = [(transfers.pend,
                  {"axis": axis, **op_argument(kind), **({} if place is None else {"dim": place[0], **parts})})
                 for axis, kind, place in reversed(self.pended)]  # fmt: skip
        return [*pends, *((transfers.slice, {"dim": k, "axis": axis, **parts}) for k, axis in self.cut)]


def precursors_of(start: TensorType, goal: TensorType, new: list[tuple[str, str]]) -> Iterator[Precursor]:
    """Yield the values from which the goal can be made: replicated over its new pending axes, or split over them.

    A split comes after some of the goal's splits of that part; the rest of these are sliced afterwards. The first is
    the one nearest to ``start``.
    """
    mesh, dims, shape = goal.mesh, goal.attr.dims, goal.shape
    if not new:
        yield Precursor(goal, dims, first_lengths(dims, shape, mesh), (), ())
        return
    sizes = parts_of(dims, shape)
    splits = [axes for dim in dims for _, axes in dim]
    split_counts = list(map(len, splits))
    choices: Iterator[list[Place]] = iter([[None] * len(new)])
    if all(kind in transfers.MERGES for _, kind in new):
        present = _present_places(start, goal, [axis for axis, _ in new], splits)
        new = sorted(new, key=lambda pair: list(present).index(pair[0]))
        places = [
            None,
            *((k, len(axes)) for k, axes in enumerate(splits)),
            *((k, j) for k, axes in enumerate(splits) for j in range(len(axes))),
        ]
        all_choices = ([places[number] for number in numbers] for numbers in places_for(len(places), len(new)))
        choices = itertools.chain([list(present.values())] if any(present.values()) else [], all_choices)
    for chosen in choices:
        prefix = list(split_counts)
        for k, behind in filter(None, chosen):
            prefix[k] = min(prefix[k], behind)
        axes = [list(part_axes[:j]) for part_axes, j in zip(splits, prefix, strict=True)]
        for (axis, _), place in zip(new, chosen, strict=True):
            if place is not None:
                axes[place[0]].append(axis)
        flat = iter(axes)
        before = tuple(
            [
                normal_dim(tuple([(n, tuple(next(flat))) for n in dim]), size, mesh)
                for dim, size in zip(sizes, shape, strict=True)
            ]
        )
        yield Precursor(goal, before, first_lengths(before, shape, mesh),
                        tuple([(*pair, place) for pair, place in zip(new, chosen, strict=True)]),
                   tuple([(k, axis) for k, j in enumerate(prefix) if j < split_counts[k]
                          for axis in splits[k][j:]]))  # fmt: skip


def _present_places(start: TensorType, goal: TensorType, new: list[str], splits: list[Axes]) -> dict[str, Place]:
    """Return where the value is split over axes that become pending, and after how many splits of the goal.

    They come in the order of the splits, major first.
    """
    places: dict[str, Place] = {}
    if start.mesh == goal.mesh and transfers.part_sizes(start.attr, start.shape) == transfers.part_sizes(
        goal.attr, goal.shape
    ):
        for k, ((_, axes), wanted) in enumerate(zip(start.attr.parts(start.shape), splits, strict=True)):
            for i, axis in enumerate(axes):
                if axis in new:
                    before = tuple(other for other in axes[:i] if other not in new)
                    places[axis] = (k, len(before) if before == wanted[: len(before)] else 0)
    return places | {axis: None for axis in new if axis not in places}


# -- reductions --------------------------------------------------------------------------------------------------------


# if reducing to uneven pieces sends more than this factor, because of padding, an all-reduce is considered too
PADDED = 1.05
STARTED = 2**20  # bytes that a link moves while an exchange starts; a draft that uses replicas must save as many


def free_axes(value: Reduced) -> list[str]:
    """Return the axes whose replicas a reduction may use: those inside its outermost axis.

    Links there are no slower.
    """
    names = value.mesh.names
    first = names.index(value.outermost) if value.axes else len(names)
    return [axis for axis in names[first:] if value.mesh.sizes[axis] > 1 and axis in value.replicated]


class StartingDrafts:
    """The drafts from which a reduction starts: the whole value, or a slice of it over all free axes."""

    def __init__(self, value: Reduced, free: list[str]) -> None:
        self.free = free
        self._parts = parts_of(value.dims, value.shape)
        self._drafts = [value.draft]
        self._count = 1 + (sum(map(len, self._parts)) if free else 0)

    def __iter__(self) -> Iterator[Draft]:
        """Yield the drafts; each is made on demand, and once."""
        for number in range(self._count):
            if number == len(self._drafts):
                piece = self._drafts[0]._replace(extra=STARTED)
                self._drafts.append(piece.cut([(transfers.slice, number - 1, axis) for axis in self.free], self._parts))
            yield self._drafts[number]


def reduction_lower_bound(value: Reduced, wanted: int, itemsize: int) -> int:
    """Return a lower bound on the bytes to reduce a value to ``wanted`` elements a rank, without padding."""
    count = value.mesh.count(value.axes)
    share = value.elements / (count * value.mesh.count(value.replicated) if value.axes else 1)
    return int((share * (count - 1) + max(0.0, wanted - share)) * itemsize)


def least_reduced(value: Reduced, wanted: int, itemsize: int) -> int:
    """Return the fewest bytes to reduce a value and leave each rank ``wanted`` elements.

    They are those of a ring, and sums from other ranks.
    """
    count = value.mesh.count(value.axes)
    share = -(-value.elements // (count * value.mesh.count(value.replicated) if value.axes else 1))
    return (share * (count - 1) + max(0, wanted - share)) * itemsize


def least_from(draft: Draft, goal: Dims | None, lacked: int, wanted: int, itemsize: int) -> tuple[int, int]:
    """Return the fewest bytes of reductions that begin like ``draft``, and how many of them cross the outermost axis.

    ``lacked``: elements that the worst rank lacks before the reduction.
    """
    value = draft.value
    if not value.axes:
        return draft.bytes + draft.extra + lacked * itemsize, 0
    count, sizes = value.mesh.count(value.axes), value.mesh.sizes
    share = draft.elements / count
    for axis in (axes_of(goal or ()) & value.replicated) - axes_of(draft.dims):
        share /= sizes[axis]
    bytes = share * (count - 1) * value.sent + max(lacked, wanted - share) * itemsize
    return draft.bytes + draft.extra + int(bytes), int(share * (sizes[value.outermost] - 1) * value.sent)


def reduced_evenly(draft: Draft, axes: Sequence[str], wanted: int) -> int:
    """Return ``least_reduced`` after ``draft``, without using replicas, plus the bytes of ``draft``."""
    count, elements = draft.value.mesh.count(axes), draft.elements
    share = -(-elements // count)
    return draft.bytes + (share * (count - 1) + max(0, wanted - share)) * draft.value.itemsize


def draft_reductions(draft: Draft, goal: Dims | None, axes: Sequence[str], padded: float = PADDED) -> Iterator[Draft]:
    """Yield drafts that reduce a value over ``axes``, in the order in which they are preferred.

    They reduce to splits of the goal on the same mesh; the others at once, or to splits of their own. All are reduced
    at once where reduce-scatters to uneven pieces send more than ``padded`` times what even ones send.
    """
    if not axes:
        yield draft
        return
    view = _view_of(draft, goal, axes)
    ended, left = _moved_to_goal(draft, view, axes)
    inner = _inner_axes(draft, axes, left)
    if inner and goal is not None and (place := _unsplit(draft, goal)) is not None:
        cuts: list[Cut] = [(transfers.reduce_scatter, place, axis) for axis in reversed(inner)]
        yield from draft_reductions(
            draft.cut(cuts, parts_of(draft.dims, draft.value.shape)),
            goal,
            [axis for axis in axes if axis not in inner],
            padded,
        )
    yield ended.all_reduced(left) if left else ended
    if left:
        parts = parts_of(ended.dims, draft.value.shape)
        for chosen in places_for(sum(map(len, parts)), len(left)):
            yield ended.cut(
                [(transfers.reduce_scatter, place, axis) for place, axis in zip(chosen, reversed(left), strict=True)],
                parts,
            )
    if len(left) < len(axes):
        sliced, _ = _moved_to_goal(draft, view, [])
        if ended.bytes > padded * reduced_evenly(sliced, [axis for axis in axes if axis not in left], 0):
            yield sliced.all_reduced(list(axes))


def _inner_axes(draft: Draft, axes: Sequence[str], left: list[str]) -> list[str]:
    """Return the axes without a split in the goal that are inside an axis with one."""
    order = draft.value.mesh.names.index
    outermost = min((order(axis) for axis in axes if axis not in left), default=len(draft.value.mesh.names))
    return [axis for axis in left if order(axis) > outermost]


def _unsplit(draft: Draft, goal: Dims) -> int | None:
    """Return the first part that no axis splits in the value and in the goal.

    There is none if they have different numbers of parts.
    """
    parts, goal_parts = (
        [part for dim, size in zip(dims, draft.value.shape, strict=True) for part in sized(dim, size)]
        for dims in (draft.dims, goal)
    )
    if len(parts) != len(goal_parts):
        return None
    return next(
        (
            k
            for k, ((_, axes), (_, goal_axes)) in enumerate(zip(parts, goal_parts, strict=True))
            if not axes and not goal_axes
        ),
        None,
    )


def _view_of(draft: Draft, goal: Dims | None, axes: Sequence[str]) -> View | None:
    """Return common parts of the value and the goal, if an axis can be sliced or reduced to a split of the goal."""
    value, splits = draft.value, axes_of(goal or ())
    if goal is None or (splits.isdisjoint(axes) and splits.isdisjoint(value.replicated)):
        return None
    view = first_view(draft.dims, goal, value.shape, value.mesh)
    if view is not None and any([len(want) > 1 for want in view[2]]):
        # the finest view, with each axis in a part of its own
        *_, view = views(draft.dims, goal, value.shape, value.mesh)
    return view


def _moved_to_goal(draft: Draft, view: View | None, axes: Sequence[str]) -> tuple[Draft, list[str]]:
    """Slice and reduce-scatter to splits of the goal as far as possible.

    The innermost axis is reduced first, so that less remains for the others, which have slower links. Return the draft,
    and the axes that remain to be reduced.
    """
    to_reduce = list(axes)
    if view is None:
        return draft, to_reduce
    value, (parts, part_axes, goal_axes) = draft.value, view
    used = {axis for axes in part_axes for axis in axes} | value.pending
    cuts: list[Cut] = []
    remaining_splits = {
        place: want[len(have) :]
        for place, (have, want) in enumerate(zip(part_axes, goal_axes, strict=True))
        if have != want and have == want[: len(have)]
    }
    while True:
        slices = [place for place, axes in remaining_splits.items() if axes and axes[0] not in used]
        ends = [place for place, axes in remaining_splits.items() if axes and axes[0] in to_reduce]
        if not slices and not ends:
            return (draft.cut(cuts, parts) if cuts else draft), to_reduce
        place = slices[0] if slices else max(ends, key=lambda place: value.mesh.names.index(remaining_splits[place][0]))
        axis, *others = remaining_splits[place]
        remaining_splits[place] = tuple(others)
        used.add(axis)
        cuts.append((transfers.slice if slices else transfers.reduce_scatter, place, axis))
        if not slices:
            to_reduce.remove(axis)
