"""Reductions: the ways to take the pending axes from a value.

To splits of the goal where they can end in those, innermost axis first; on pieces where other ranks hold replicas and that
saves enough; the rest at once, or to splits of their own if more than a reduction follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar import layout, transfers
from autopar.record import TensorType
from autopar.transitions.relayouts import views
from autopar.transitions.way import Move, Way, op_argument, parts_argument, places_for

REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)
PADDED = 1.05  # a reduction to uneven pieces brings padding; where that is more than this, an all-reduce is considered
STARTED = 2**20  # bytes that a link moves while an exchange starts: what one that replicas are borrowed for has to save


def free_axes(start: TensorType, axes: list[str]) -> list[str]:
    """Axes whose replicas a reduction over ``axes`` may borrow: those within the outermost, where links are no slower."""
    mesh = start.layout.mesh  # type: ignore[union-attr]
    outermost = min((mesh.names.index(axis) for axis in axes), default=len(mesh.names))
    return [axis for axis in mesh.names[outermost:] if mesh.sizes[axis] > 1 and axis not in start.attr.axes]


def begun(start: TensorType, free: list[str]) -> Iterator[Way]:
    """What is reduced: the value as it is, or a piece of it, cut at any one place for all free axes."""
    yield Way(start)
    parts = transfers.part_sizes(start.attr, start.shape)
    for place in range(sum(map(len, parts)) if free else 0):
        yield Way(start, extra=STARTED).then(*((transfers.slice, {"dim": place, "axis": axis, **parts_argument(parts)}) for axis in free))


def bound_of(start: TensorType, axes: list[str], wanted: int, itemsize: int) -> int:
    """Bytes that no way to reduce a value and leave each rank so many elements goes below: ``least_reduced`` of pieces that need no padding."""
    mesh = start.layout.mesh  # type: ignore[union-attr]
    replicated = [axis for axis in mesh.names if axis not in start.attr.axes]
    share, count = largest(start) / mesh.count((*axes, *replicated) if axes else ()), mesh.count(axes)
    return int((share * (count - 1) + max(0.0, wanted - share)) * itemsize)


def least_reduced(start: TensorType, axes: list[str], wanted: int, itemsize: int) -> int:
    """Bytes at least, to reduce a value and leave each rank so many elements: a ring's, and what others have summed."""
    mesh = start.layout.mesh  # type: ignore[union-attr]
    replicated = [axis for axis in mesh.names if axis not in start.attr.axes]
    share = -(-largest(start) // mesh.count((*axes, *replicated) if axes else ()))
    return (share * (mesh.count(axes) - 1) + max(0, wanted - share)) * itemsize


def reduced_evenly(way: Way, axes: list[str], wanted: int, itemsize: int) -> int:
    """As ``least_reduced``, from where a way has led and without its replicas; and the bytes so far."""
    count = way.type.layout.mesh.count(axes)  # type: ignore[union-attr]
    share = -(-largest(way.type) // count)
    return way.bytes + (share * (count - 1) + max(0, wanted - share)) * itemsize


def largest(type: TensorType) -> int:
    """Elements of the first piece, than which none is larger."""
    return layout.largest(type.attr, type.shape, type.layout.mesh)  # type: ignore[union-attr]


def reduced_ways(way: Way, goal: TensorType, axes: list[str]) -> Iterator[Way]:
    """Ways to reduce a value over ``axes``: to splits that the goal has, the others at once or to splits of their own."""
    if not axes:
        yield way
        return
    op = op_argument(dict(way.type.attr.pending)[axes[0]])
    here, left = _ended(way, goal, axes, op)
    inner, place = _within(way.type, goal, axes, left)
    if inner and place is not None:
        given = {"dim": place, **op, **parts_argument(transfers.part_sizes(way.type.attr, way.type.shape))}
        yield from reduced_ways(way.then(*((transfers.reduce_scatter, {**given, "axis": axis}) for axis in reversed(inner))), goal,
                            [axis for axis in axes if axis not in inner])  # fmt: skip
    parts = transfers.part_sizes(here.type.attr, here.type.shape)
    yield here.then(*([_all_reduced(left, op)] if left else []))
    for chosen in places_for(sum(map(len, parts)), len(left)) if left else ():
        yield here.then(*((transfers.reduce_scatter, {"dim": place, "axis": axis, **op, **parts_argument(parts)})
                          for place, axis in zip(chosen, reversed(left), strict=True)))  # fmt: skip
    if len(left) < len(axes):
        sliced, _ = _ended(way, goal, [], op)
        even = reduced_evenly(sliced, [axis for axis in axes if axis not in left], 0, way.type.dtype.itemsize)
        if here.bytes > PADDED * even:
            yield sliced.then(_all_reduced(axes, op))


def _all_reduced(axes: list[str], op: dict[str, Any]) -> Move:
    return transfers.all_reduce, {"axis": axes[0] if len(axes) == 1 else tuple(axes), **op}


def _within(type: TensorType, goal: TensorType, axes: list[str], left: list[str]) -> tuple[list[str], int | None]:
    """Axes that the goal has no split for, within one for which it has; and the first part that nothing splits."""
    order = type.layout.mesh.names.index  # type: ignore[union-attr]
    outermost = min((order(axis) for axis in axes if axis not in left), default=len(type.layout.mesh.names))  # type: ignore[union-attr]
    inner = [axis for axis in left if order(axis) > outermost]
    parts = [t.attr.parts(t.shape) for t in (type, goal)] if inner else []
    if not parts or len({len(each) for each in parts}) > 1:
        return inner, None
    return inner, next((k for k, ((_, own), (_, wanted)) in enumerate(zip(*parts, strict=True)) if not own and not wanted), None)


def far_bytes(way: Way, axes: list[str]) -> int:
    """Bytes that a way reduces over the outermost axis, whose links may be slow, in whole ``STARTED``.

    Half of an all-reduce is a gather, and those of other ways are not counted either.
    """
    mesh = way.type.layout.mesh  # type: ignore[union-attr]
    outermost = min(axes, key=mesh.names.index, default="")
    total = 0
    for step in way.steps:
        over = transfers.axes_of(dict(step.arguments)["axis"]) if step.function in REDUCTIONS else ()
        if outermost in over:
            total += step.bytes // (mesh.count(set(over) - {outermost}) * (2 if step.function is transfers.all_reduce else 1))
    return total // STARTED


def _ended(way: Way, goal: TensorType, axes: list[str], op: dict[str, Any]) -> tuple[Way, list[str]]:
    """Slices and reduce-scatters to splits of the goal, as far as they go; and what is still to be reduced.

    The innermost axis is reduced first: the others, over slower links, have less left.
    """
    seen = list(views(way.type, goal)) if goal.layout.mesh == way.type.layout.mesh else []  # type: ignore[union-attr]
    if not seen:
        return way, axes
    view = seen[-1] if any(len(want) > 1 for want in seen[0][2]) else seen[0]  # in which each axis is met on its own
    parts, own, wanted = view
    mesh, left = goal.layout.mesh, list(axes)  # type: ignore[union-attr]
    moves: list[Move] = []
    while True:
        used = {axis for axes in own for axis in axes} | {axis for axis, _ in way.type.attr.pending}
        steps = [(place, want[len(have)]) for place, (have, want) in enumerate(zip(own, wanted, strict=True))
                 if len(have) < len(want) and have == want[: len(have)]]  # fmt: skip
        slices = [(place, axis) for place, axis in steps if axis not in used]
        ends = [(place, axis) for place, axis in steps if axis in left]
        if not slices and not ends:
            return way.then(*moves), left
        place, axis = slices[0] if slices else max(ends, key=lambda end: mesh.names.index(end[1]))
        own[place] = (*own[place], axis)
        moves.append((transfers.slice if slices else transfers.reduce_scatter, {"dim": place, "axis": axis, **({} if slices else op), **parts_argument(parts)}))
        if not slices:
            left.remove(axis)
