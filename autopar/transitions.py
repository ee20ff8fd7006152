"""Transitions: the cheapest sequence of transfers from one Layout to another.

The states in between are searched (Dijkstra), each transfer priced by the bytes it makes a rank receive; the number of
transfers breaks ties. Results are cached by content.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar import transfers
from autopar.errors import TransitionError
from autopar.layout import Axes, DistAttr, Layout, align
from autopar.mesh import Mesh
from autopar.record import TensorType


@dataclass(frozen=True)
class Step:
    """One transfer of a sequence: its function, its arguments after the operand, and what it leads to."""

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


def transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    """The transfers that turn ``source`` into ``target``, a value of the same shape; ``()`` when they are equal.

    The dtype is changed on the side where fewer bytes move: before the other transfers if it narrows, else after them.

    Raises:
        TransitionError: the Layouts lie on different meshes, or a pending kind would have to change into another.
    """
    if source.shape != target.shape:
        raise TransitionError(f"a transition keeps the shape; {source.shape} is not {target.shape}")
    return _transitions(source, target)


def cost(source: TensorType, target: TensorType) -> int:
    """Bytes the rank with the largest piece receives."""
    return sum(step.bytes for step in transitions(source, target))


@lru_cache(maxsize=65536)
def _transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    if source.layout is None or target.layout is None:
        raise TransitionError("a transition leads between placed values; one of these has no Layout")
    if source.layout.mesh != target.layout.mesh:
        raise TransitionError(
            f"no transition between the meshes {source.layout.mesh!r} and {target.layout.mesh!r} yet; keep both on one mesh"
        )
    if source.dtype == target.dtype:
        return _search(source, target)
    narrows = target.dtype.itemsize < source.dtype.itemsize and not source.attr.pending
    if narrows:
        changed = replace(source, dtype=target.dtype)
        return (_cast(changed), *_search(changed, target))
    same = replace(target, dtype=source.dtype)
    return (*_search(source, same), _cast(target))


def _cast(changed: TensorType) -> Step:
    return Step(transfers.cast, (("dtype", changed.dtype),), changed, 0)


def _search(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    assert source.layout is not None and target.layout is not None
    mesh, goal = source.layout.mesh, target.attr.normalize(target.shape, target.layout.mesh)
    start = source.attr.normalize(source.shape, mesh)
    order = itertools.count()
    queue: list[tuple[int, int, int, DistAttr, tuple[Step, ...]]] = [(0, 0, next(order), start, ())]
    done: set[DistAttr] = set()
    while queue:
        paid, length, _, attr, steps = heapq.heappop(queue)
        if attr == goal:
            return steps
        if attr in done:
            continue
        done.add(attr)
        here = replace(source, layout=Layout(mesh, attr))
        for function, arguments in _moves(attr, goal, source.shape, mesh):
            given = dict(arguments)
            new = transfers.BY_FUNCTION[function].infer(here, given, {})
            if new.attr in done:
                continue
            price = transfers.received(function, here, given)
            step = Step(function, arguments, new, price)
            heapq.heappush(queue, (paid + price, length + 1, next(order), new.attr, (*steps, step)))
    raise TransitionError(_why(start, goal))


def _why(start: DistAttr, goal: DistAttr) -> str:
    held = dict(start.pending)
    for axis, kind in goal.pending:
        if kind != "sum" and held.get(axis) != kind:
            return f"a value cannot become pending {kind} over {axis}: only a pending sum can be made, from a whole value"
    return f"no sequence of transfers leads from {start} to {goal}"


Move = tuple[Any, tuple[tuple[str, Any], ...]]


def _moves(attr: DistAttr, goal: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Move]:
    """The transfers that may lie on a cheapest way: gathers anywhere, splits and pendings only where the goal has them."""
    parts = [_parts(dim, want, size, mesh) for dim, want, size in zip(attr.dims, goal.dims, shape, strict=True)]
    now, wanted = _seen_as(attr, shape, parts, mesh), _seen_as(goal, shape, parts, mesh)
    merged: tuple[tuple[str, Any], ...] = (("parts", tuple(parts)),) if any(len(p) > 1 for p in parts) else ()
    used = {axis for axes in now for axis in axes or ()} | dict(attr.pending).keys()
    homes = {axis: place for place, axes in enumerate(wanted) for axis in axes or ()}
    pending = dict(goal.pending)
    for place, axes in enumerate(now):
        if axes:
            axis = axes[-1]
            yield transfers.all_gather, (("dim", place), ("axis", axis), *merged)
            if homes.get(axis, place) != place:
                yield transfers.all_to_all, (("source", place), ("target", homes[axis]), ("axis", axis), *merged)
    for axis, kind in attr.pending:
        op = () if kind == "sum" else (("op", kind),)
        yield transfers.all_reduce, (("axis", axis), *op)
        if axis in homes:
            yield transfers.reduce_scatter, (("dim", homes[axis]), ("axis", axis), *op, *merged)
    for axis, place in homes.items():
        if axis not in used:
            yield transfers.slice, (("dim", place), ("axis", axis), *merged)
    for axis, kind in pending.items():
        if axis not in used and kind == "sum":
            yield transfers.pend, (("axis", axis),)


def _parts(dim: Any, want: Any, size: int, mesh: Mesh) -> tuple[int, ...]:
    """The parts to work in: the goal's where the dim can be seen so, else its own."""
    own = [(size if n is None else n, axes) for n, axes in dim]
    sizes = tuple(size if n is None else n for n, _ in want)
    return sizes if align(own, sizes, mesh) is not None else tuple(n for n, _ in own)


def _seen_as(attr: DistAttr, shape: tuple[int, ...], parts: list[tuple[int, ...]], mesh: Mesh) -> list[Axes | None]:
    """The axes of every part, flat; ``None`` for the parts of a dim that cannot be seen so."""
    flat: list[Axes | None] = []
    for size, dim, sizes in zip(shape, attr.dims, parts, strict=True):
        aligned = align([(size if n is None else n, axes) for n, axes in dim], sizes, mesh)
        flat += aligned if aligned is not None else [None] * len(sizes)
    return flat


