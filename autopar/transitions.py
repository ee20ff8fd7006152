"""Transitions: the cheapest sequence of transfers from one Layout to another.

The states in between are searched (Dijkstra), each transfer priced by the bytes it makes a rank receive; the number of
transfers breaks ties. A cast is one of the transfers, and so falls on the side where fewer bytes move. Searched are
gathers anywhere and splits that the goal has; a way through splits that neither end has may, rarely, be cheaper.
Results are cached by content.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar import transfers
from autopar.errors import TransitionError
from autopar.layout import Axes, Dim, Layout, align, finest
from autopar.mesh import Mesh
from autopar.record import TensorType
from autopar.text.printer import print_type


@dataclass(frozen=True)
class Step:
    """One transfer of a sequence: its function, its arguments after the operand, and what it leads to."""

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


def transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    """The transfers that turn ``source`` into ``target``, a value of the same shape; ``()`` when they are equal.

    Types in between, and the last, are in normal form. A pending value is never narrowed: it is reduced first.

    Raises:
        TransitionError: the Layouts lie on different meshes, or the target is pending a max (or any kind but sum) that
            the source is not.
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
    start, goal = _normal(source), _normal(target)
    order = itertools.count()
    queue: list[tuple[int, int, int, TensorType, tuple[Step, ...]]] = [(0, 0, next(order), start, ())]
    done: set[TensorType] = set()
    while queue:
        paid, length, _, here, steps = heapq.heappop(queue)
        if here == goal:
            return steps
        if here in done:
            continue
        done.add(here)
        for function, arguments in _moves(here, goal):
            given = dict(arguments)
            new = transfers.BY_FUNCTION[function].infer(here, given, {})
            if new in done:
                continue
            price = transfers.received(function, here, given)
            step = Step(function, arguments, new, price)
            heapq.heappush(queue, (paid + price, length + 1, next(order), new, (*steps, step)))
    raise TransitionError(f"no transfers lead from {print_type(start)} to {print_type(goal)}: {_why(start, goal)}")


def _normal(type: TensorType) -> TensorType:
    assert type.layout is not None
    mesh = type.layout.mesh
    return replace(type, layout=Layout(mesh, type.attr.normalize(type.shape, mesh)))


def _why(start: TensorType, goal: TensorType) -> str:
    if len({kind for _, kind in goal.attr.pending}) > 1:
        return "reductions of different kinds do not commute, so no value is pending several at once"
    held = dict(start.attr.pending)
    for axis, kind in goal.attr.pending:
        if kind != "sum" and held.get(axis) != kind:
            return f"a value cannot become pending {kind} over {axis}; only a pending sum can be made, from a whole value"
        if kind != "sum":
            return f"the cast needs it reduced, and then it cannot become pending {kind} over {axis} again"
    raise AssertionError("every other Layout can be gathered, reduced and split again")


Move = tuple[Any, tuple[tuple[str, Any], ...]]


def _moves(here: TensorType, goal: TensorType) -> Iterator[Move]:
    """The transfers that the search tries: those that take away, and those that bring what the goal has."""
    coarse, fine = _views(here, goal)
    yield from _relay(here, goal, coarse)
    if fine != coarse:
        yield from _relay(here, goal, fine)
    pending = dict(here.attr.pending)
    for axis, kind in pending.items():
        yield transfers.all_reduce, (("axis", axis), *_op(kind))
    for axis, kind in goal.attr.pending:
        if kind == "sum" and axis not in here.attr.axes and set(pending.values()) <= {"sum"}:  # kinds do not mix
            yield transfers.pend, (("axis", axis),)
    if here.dtype != goal.dtype and (not pending or _widens(here.dtype, goal.dtype)):
        yield transfers.cast, (("dtype", goal.dtype),)


def _op(kind: str) -> tuple[tuple[str, Any], ...]:
    return () if kind == "sum" else (("op", kind),)


def _widens(a: torch.dtype, b: torch.dtype) -> bool:
    """Every value of ``a`` is one of ``b``, and sums of them come out alike."""
    return a.is_floating_point and b.is_floating_point and a.itemsize < b.itemsize


def _relay(here: TensorType, goal: TensorType, parts: tuple[tuple[int, ...], ...]) -> Iterator[Move]:
    """The transfers between the parts of one view: gathers anywhere, splits only in the dims where the goal has them."""
    merged: tuple[tuple[str, Any], ...] = (("parts", parts),) if any(len(sizes) > 1 for sizes in parts) else ()
    homes = {axis: d for d, dim in enumerate(goal.attr.dims) for _, axes in dim for axis in axes}
    pending, used = dict(here.attr.pending), set(here.attr.axes)
    places = list(enumerate(d for d, sizes in enumerate(parts) for _ in sizes))
    for place, axes in enumerate(_seen_as(here, parts)):
        if axes:
            axis = axes[-1]
            yield transfers.all_gather, (("dim", place), ("axis", axis), *merged)
            for target, d in places:
                if target != place and homes.get(axis) == d:
                    yield transfers.all_to_all, (("source", place), ("target", target), ("axis", axis), *merged)
    for axis, home in homes.items():
        for target, d in places:
            if d != home:
                continue
            if axis in pending:
                yield transfers.reduce_scatter, (("dim", target), ("axis", axis), *_op(pending[axis]), *merged)
            elif axis not in used:
                yield transfers.slice, (("dim", target), ("axis", axis), *merged)


def _views(here: TensorType, goal: TensorType) -> list[tuple[tuple[int, ...], ...]]:
    """The parts to work in, dim by dim: the goal's where the dim can be seen so, else its own; and the finest common ones.

    In the finest parts every axis is the minor-most split of a part: ``8/dp/tp`` is ``2/dp 2/tp 2``.
    """
    assert here.layout is not None
    mesh = here.layout.mesh
    coarse, fine = [], []
    for size, dim, want in zip(here.shape, here.attr.dims, goal.attr.dims, strict=True):
        own, wanted = _sized(dim, size), _sized(want, size)
        smallest = [_sizes(finest(parts, mesh)) for parts in (own, wanted)]
        coarse.append(_first(own, mesh, _sizes(wanted)))
        fine.append(_first(own, mesh, _common(*smallest), smallest[0]))
    return [tuple(coarse), tuple(fine)]


def _first(own: list[tuple[int, Axes]], mesh: Mesh, *candidates: tuple[int, ...]) -> tuple[int, ...]:
    """The first parts that the dim can be seen as; its own at the last."""
    return next((sizes for sizes in candidates if sizes and align(own, sizes, mesh) is not None), _sizes(own))


def _common(*sides: tuple[int, ...]) -> tuple[int, ...]:
    """Parts that both sides are made of: ``(2 6)`` and ``(4 3)`` are of ``(2 2 3)``; ``()`` where there are none."""
    ends = sorted({end for sizes in sides for end in itertools.accumulate(sizes, operator.mul)} - {0, 1})
    steps = [divmod(b, a) for a, b in itertools.pairwise((1, *ends))]
    return () if any(rest for _, rest in steps) else tuple(size for size, _ in steps)


def _seen_as(type: TensorType, parts: Sequence[Sequence[int]]) -> list[Axes]:
    """The axes of every part of a view, flat."""
    assert type.layout is not None
    flat: list[Axes] = []
    for size, dim, sizes in zip(type.shape, type.attr.dims, parts, strict=True):
        axes = align(_sized(dim, size), sizes, type.layout.mesh)
        assert axes is not None, "a view is chosen so that the dim can be seen so"
        flat += axes
    return flat


def _sized(dim: Dim, size: int) -> list[tuple[int, Axes]]:
    return [(size if part is None else part, axes) for part, axes in dim]


def _sizes(parts: Sequence[tuple[int, Axes]]) -> tuple[int, ...]:
    return tuple(size for size, _ in parts)
