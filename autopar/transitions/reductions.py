"""Draft the ways to take the pending axes from a value.

To splits of the goal where they can end in those, innermost axis first; on pieces where other ranks hold replicas and that
saves enough; the rest at once, or to splits of their own if more than a reduction follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir import transfers
from autopar.ir.layout import sized
from autopar.transitions.draft import Cut, Dims, Draft, Reduced, axes_of, parts_of
from autopar.transitions.relayouts import View, first_view, views
from autopar.transitions.way import places_for

PADDED = 1.05  # a reduction to uneven pieces brings padding; where that is more than this, an all-reduce is considered
STARTED = 2**20  # bytes that a link moves while an exchange starts: what one that replicas are borrowed for has to save


def free_axes(value: Reduced) -> list[str]:
    """Axes whose replicas a reduction may borrow: those within the outermost axis that is reduced, where links are no slower."""
    names = value.mesh.names
    first = names.index(value.outermost) if value.axes else len(names)
    return [axis for axis in names[first:] if value.mesh.sizes[axis] > 1 and axis in value.replicated]


class Begun:
    """What is reduced: the value as it is, or a piece of it, cut at any one place for all free axes."""

    def __init__(self, value: Reduced, free: list[str]) -> None:
        self.free = free
        self._parts = parts_of(value.dims, value.shape)
        self._made = [value.draft]
        self._count = 1 + (sum(map(len, self._parts)) if free else 0)

    def __iter__(self) -> Iterator[Draft]:
        """Each is made when it is asked for, and once."""
        for number in range(self._count):
            if number == len(self._made):
                piece = self._made[0]._replace(extra=STARTED)
                self._made.append(piece.cut([(transfers.slice, number - 1, axis) for axis in self.free], self._parts))
            yield self._made[number]


def bound_of(value: Reduced, wanted: int, itemsize: int) -> int:
    """Bytes that no way to reduce a value and leave each rank so many elements goes below: ``least_reduced`` of pieces that need no padding."""
    count = value.mesh.count(value.axes)
    share = value.held / (count * value.mesh.count(value.replicated) if value.axes else 1)
    return int((share * (count - 1) + max(0.0, wanted - share)) * itemsize)


def least_reduced(value: Reduced, wanted: int, itemsize: int) -> int:
    """Bytes at least, to reduce a value and leave each rank so many elements: a ring's, and what others have summed."""
    count = value.mesh.count(value.axes)
    share = -(-value.held // (count * value.mesh.count(value.replicated) if value.axes else 1))
    return (share * (count - 1) + max(0, wanted - share)) * itemsize


def least_from(way: Draft, goal: Dims | None, lacked: int, wanted: int, itemsize: int) -> tuple[int, int]:
    """Bytes that no way that begins so goes below, and of these over the outermost axis; ``lacked`` are elements that the worst rank lacks already."""
    value = way.value
    if not value.axes:
        return way.bytes + way.extra + lacked * itemsize, 0
    count, sizes = value.mesh.count(value.axes), value.mesh.sizes
    share = way.held / count
    for axis in (axes_of(goal or ()) & value.replicated) - axes_of(way.dims):
        share /= sizes[axis]
    bytes = share * (count - 1) * value.sent + max(lacked, wanted - share) * itemsize
    return way.bytes + way.extra + int(bytes), int(share * (sizes[value.outermost] - 1) * value.sent)


def reduced_evenly(way: Draft, axes: Sequence[str], wanted: int) -> int:
    """As ``least_reduced``, from where a way has led and without its replicas; and the bytes so far."""
    count, held = way.value.mesh.count(axes), way.held
    share = -(-held // count)
    return way.bytes + (share * (count - 1) + max(0, wanted - share)) * way.value.itemsize


def reduced_ways(way: Draft, goal: Dims | None, axes: Sequence[str]) -> Iterator[Draft]:
    """Ways to reduce a value over ``axes``: to splits that the goal has on the same mesh, the others at once or to splits of their own."""
    if not axes:
        yield way
        return
    view = _view_of(way, goal, axes)
    here, left = _ended(way, view, axes)
    inner = _within(way, axes, left)
    if inner and goal is not None and (place := _unsplit(way, goal)) is not None:
        cuts: list[Cut] = [(transfers.reduce_scatter, place, axis) for axis in reversed(inner)]
        yield from reduced_ways(way.cut(cuts, parts_of(way.dims, way.value.shape)), goal, [axis for axis in axes if axis not in inner])
    yield here.all_reduced(left) if left else here
    if left:
        parts = parts_of(here.dims, way.value.shape)
        for chosen in places_for(sum(map(len, parts)), len(left)):
            yield here.cut([(transfers.reduce_scatter, place, axis) for place, axis in zip(chosen, reversed(left), strict=True)], parts)
    if len(left) < len(axes):
        sliced, _ = _ended(way, view, [])
        if here.bytes > PADDED * reduced_evenly(sliced, [axis for axis in axes if axis not in left], 0):
            yield sliced.all_reduced(list(axes))


def _within(way: Draft, axes: Sequence[str], left: list[str]) -> list[str]:
    """Axes that the goal has no split for, within one for which it has."""
    order = way.value.mesh.names.index
    outermost = min((order(axis) for axis in axes if axis not in left), default=len(way.value.mesh.names))
    return [axis for axis in left if order(axis) > outermost]


def _unsplit(way: Draft, goal: Dims) -> int | None:
    """The first part that nothing splits, neither here nor in the goal, if both have the same number of parts."""
    own, wanted = ([part for dim, size in zip(dims, way.value.shape, strict=True) for part in sized(dim, size)] for dims in (way.dims, goal))
    if len(own) != len(wanted):
        return None
    return next((k for k, ((_, here), (_, there)) in enumerate(zip(own, wanted, strict=True)) if not here and not there), None)


def _view_of(way: Draft, goal: Dims | None, axes: Sequence[str]) -> View | None:
    """Parts in which the value and the goal can be seen, if there is anything to slice or to reduce to splits of the goal."""
    value, splits = way.value, axes_of(goal or ())
    if goal is None or (splits.isdisjoint(axes) and splits.isdisjoint(value.replicated)):
        return None
    view = first_view(way.dims, goal, value.shape, value.mesh)
    if view is not None and any([len(want) > 1 for want in view[2]]):
        *_, view = views(way.dims, goal, value.shape, value.mesh)  # in which each axis is met on its own
    return view


def _ended(way: Draft, view: View | None, axes: Sequence[str]) -> tuple[Draft, list[str]]:
    """Slices and reduce-scatters to splits of the goal, as far as they go; and what is still to be reduced.

    The innermost axis is reduced first: the others, over slower links, have less left.
    """
    left = list(axes)
    if view is None:
        return way, left
    value, (parts, own, wanted) = way.value, view
    used = {axis for axes in own for axis in axes} | value.pending
    cuts: list[Cut] = []
    rest = {place: want[len(have) :] for place, (have, want) in enumerate(zip(own, wanted, strict=True)) if have != want and have == want[: len(have)]}
    while True:
        slices = [place for place, axes in rest.items() if axes and axes[0] not in used]
        ends = [place for place, axes in rest.items() if axes and axes[0] in left]
        if not slices and not ends:
            return (way.cut(cuts, parts) if cuts else way), left
        place = slices[0] if slices else max(ends, key=lambda place: value.mesh.names.index(rest[place][0]))
        axis, *others = rest[place]
        rest[place] = tuple(others)
        used.add(axis)
        cuts.append((transfers.slice if slices else transfers.reduce_scatter, place, axis))
        if not slices:
            left.remove(axis)
