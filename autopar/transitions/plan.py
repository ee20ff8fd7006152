"""The plan of a transition: what is refused, and the cheapest of what can be chosen; cached by content."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch

from autopar import transfers
from autopar.boxes import most_lacked
from autopar.errors import TransitionError
from autopar.layout import Layout
from autopar.record import TensorType
from autopar.text.printer import print_type
from autopar.transitions import reductions
from autopar.transitions.pending import made_pending
from autopar.transitions.reductions import (
    begun,
    bound_of,
    far_bytes,
    free_axes,
    largest,
    least_reduced,
    reduced_evenly,
    reduced_ways,
)
from autopar.transitions.relayouts import relaid
from autopar.transitions.way import Move, Step, Way


def transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    """The transfers that turn ``source`` into ``target``, a value of the same shape; ``()`` when they are equal.

    Types in between, and the last, are in normal form. A pending value is never narrowed: it is reduced first.

    Raises:
        TransitionError: the shapes differ, one has no Layout, or a kind of pending would become another.
    """
    if source.shape != target.shape:
        raise TransitionError(f"a transition keeps the shape; {source.shape} is not {target.shape}")
    return _transitions(source, target)


def cost(source: TensorType, target: TensorType) -> int:
    """Bytes the worst rank receives."""
    return sum(step.bytes for step in transitions(source, target))


@lru_cache(maxsize=65536)
def _transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    if source.layout is None or target.layout is None:
        raise TransitionError("a transition leads between placed values; one of these has no Layout")
    for type in (source, target):
        if len(type.attr.dims) != len(type.shape):
            raise TransitionError(f"a Layout of {len(type.attr.dims)} dims is given to a value of {len(type.shape)}")
        if (why := _malformed(type)) is not None:
            raise _refused(source, target, why)
    start, goal = _normal(source), _normal(target)
    _check_kinds(start, goal)
    if start == goal:
        return ()
    steps = _cheapest(start, goal)
    assert steps[-1].type == goal, (steps[-1].type, goal)
    return steps


def _normal(type: TensorType) -> TensorType:
    assert type.layout is not None
    mesh = type.layout.mesh
    return replace(type, layout=Layout(mesh, type.attr.normalize(type.shape, mesh)))


# -- refusals -----------------------------------------------------------------------------------------------------


def _refused(start: TensorType, goal: TensorType, why: str) -> TransitionError:
    return TransitionError(f"no transfers lead from {print_type(start)} to {print_type(goal)}: {why}")


def _malformed(type: TensorType) -> str | None:
    """Why nothing lies so."""
    assert type.layout is not None
    mesh, dims, axes = type.layout.mesh, type.attr.dims, type.attr.axes
    if any(n < 0 for n in type.shape):
        return f"a value has no shape {list(type.shape)}"
    for n, dim in zip(type.shape, dims, strict=True):
        if len(dim) > 1 and math.prod(size for size, _ in dim if size is not None) != n:
            return f"the parts of {print_type(type)} do not make a dim of {n}"
    for axis in axes:
        if axis not in mesh.sizes:
            return f"{print_type(type)} names the axis {axis}; the mesh has {', '.join(mesh.names)}"
        if axes.count(axis) > 1:
            return f"{print_type(type)} uses the axis {axis} twice"
    return None


def _check_kinds(start: TensorType, goal: TensorType) -> None:
    """What has no meaning: two kinds at once, a kind that becomes another, a kind that the dtype has not."""
    for type in (start, goal):
        kinds = sorted({kind for _, kind in type.attr.pending})
        if len(kinds) > 1:
            why = f"{print_type(type)} is pending {' and '.join(kinds)} at once, and these do not commute; reduce one first"
            raise _refused(start, goal, why)
        for kind in kinds:
            try:
                transfers.check_kind(kind, type.dtype)
            except transfers.LayoutMismatch as error:
                raise _refused(start, goal, str(error)) from None
    if start.layout.mesh != goal.layout.mesh:  # type: ignore[union-attr]
        return
    held = dict(start.attr.pending)
    for axis, kind in goal.attr.pending:
        if held.get(axis, kind) != kind:
            raise _refused(start, goal, (
                f"over {axis} the ranks hold {PARTIAL[held[axis]]} (pending {held[axis]}), and would have to hold "
                f"{PARTIAL[kind]} (pending {kind}); reduce the value over {axis} first"
            ))  # fmt: skip


PARTIAL = {"sum": "addends", "avg": "values to be averaged", "max": "candidates for the largest",
           "min": "candidates for the smallest", "prod": "factors"}  # fmt: skip


# -- what is chosen -----------------------------------------------------------------------------------------------


def _cheapest(start: TensorType, goal: TensorType) -> tuple[Step, ...]:
    casts = start.dtype != goal.dtype
    linear = not casts or _widens(start.dtype, goal.dtype)  # a cast that a pending value may pass
    same = start.layout.mesh == goal.layout.mesh  # type: ignore[union-attr]
    held = dict(start.attr.pending)
    kept = {axis: kind for axis, kind in goal.attr.pending if same and linear and axis in held}
    new = [(axis, kind) for axis, kind in goal.attr.pending if axis not in kept]
    best: tuple[tuple[int, int, int], Way, TensorType, list[Move]] | None = None
    axes = [axis for axis in start.layout.mesh.names if axis in held and axis not in kept]  # type: ignore[union-attr]
    free = free_axes(start, axes)
    itemsize = min(start.dtype.itemsize, goal.dtype.itemsize)
    least = least_reduced(start, axes, -(-largest(goal) // goal.layout.mesh.count(axis for axis, _ in new)), itemsize)  # type: ignore[union-attr]
    for before, last in made_pending(start, goal, new):
        wanted = largest(before)
        bound, fewest = bound_of(start, axes, wanted, itemsize), len(last) + bool(axes)
        if best is not None and best[0] <= (bound, 0, fewest):
            continue
        for way in begun(start, free):
            if best is not None and best[0] <= (bound + way.extra, 0, fewest):
                continue
            even = reductions.PADDED * reduced_evenly(way, axes, wanted, start.dtype.itemsize)
            for reduced in reduced_ways(way, before, axes):
                paid, steps = reduced.bytes + reduced.extra, len(reduced.steps) + len(last)
                missing = max(0, wanted - largest(reduced.type)) if same else 0  # at the least
                better = best is None or (paid + missing * itemsize, 0, steps + (missing > 0)) < best[0]
                ends = same and not missing and reduced.bytes <= even
                if not better and not ends:
                    continue
                lacked = most_lacked(reduced.type.layout, before.layout, goal.shape)  # type: ignore[arg-type]
                key = paid + lacked * itemsize, far_bytes(reduced, axes), steps + (lacked > 0)
                if best is None or key < best[0]:
                    best = key, reduced, before, last
                if ends and not lacked:
                    break  # whatever else it is reduced to, a gather would have to follow, which brings about as much
            if not free or best[0][0] <= reductions.STARTED + least_reduced(start, axes, wanted, itemsize):  # type: ignore[index]
                break
        assert best is not None
        if best[0][0] <= least:
            break
    _, reduced, before, last = best  # type: ignore[misc]
    return relaid(reduced, before).then(*last).steps


def _widens(a: torch.dtype, b: torch.dtype) -> bool:
    """Every value of ``a`` is one of ``b``, and sums of them come out alike."""
    return a.is_floating_point and b.is_floating_point and a.itemsize < b.itemsize
