"""Pending values: what they can be made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar import transfers
from autopar.layout import Axes, DistAttr, Layout
from autopar.record import TensorType
from autopar.transitions.way import Move, op_argument, parts_argument, places_for


def made_pending(start: TensorType, goal: TensorType, new: list[tuple[str, str]]) -> Iterator[tuple[TensorType, list[Move]]]:
    """What the goal can be made of, with the transfers that make it so: whole over its new pending axes, or split.

    A split comes behind some splits that the goal has there; the rest of those are cut afterwards. First as the value is.
    """
    mesh, attr = goal.layout.mesh, goal.attr  # type: ignore[union-attr]
    rest = DistAttr(attr.dims, tuple(pair for pair in attr.pending if pair not in new))
    sizes = transfers.part_sizes(attr, goal.shape)
    splits = [axes for _, axes in attr.parts(goal.shape)]
    choices: Iterator[list[tuple[int, int] | None]] = iter([[None] * len(new)])
    if new and all(kind in transfers.MERGES for _, kind in new):
        own = _own_places(start, goal, [axis for axis, _ in new], splits)
        new = sorted(new, key=lambda pair: list(own).index(pair[0]))
        places = [None, *((k, len(axes)) for k, axes in enumerate(splits)), *((k, j) for k, axes in enumerate(splits) for j in range(len(axes)))]
        every = ([places[number] for number in numbers] for numbers in places_for(len(places), len(new)))
        choices = itertools.chain([list(own.values())] if any(own.values()) else [], every)
    for chosen in choices:
        prefix = [min((place[1] for place in chosen if place and place[0] == k), default=len(axes)) for k, axes in enumerate(splits)]
        axes = [list(own[:j]) for own, j in zip(splits, prefix, strict=True)]
        last: list[Move] = []
        for (axis, kind), place in zip(new, chosen, strict=True):
            given: dict[str, Any] = {"axis": axis, **op_argument(kind)}
            if place is not None:
                axes[place[0]].append(axis)
                given |= {"dim": place[0], **parts_argument(sizes)}
            last.insert(0, (transfers.pend, given))
        last += [(transfers.slice, {"dim": k, "axis": axis, **parts_argument(sizes)}) for k, j in enumerate(prefix) for axis in splits[k][j:]]
        flat = iter(axes)
        dims = tuple(tuple((size, tuple(next(flat))) for size in dim) for dim in sizes)
        before = replace(goal, layout=Layout(mesh, replace(rest, dims=dims).normalize(goal.shape, mesh)))
        yield before, last


def _own_places(start: TensorType, goal: TensorType, new: list[str], splits: list[Axes]) -> dict[str, tuple[int, int] | None]:
    """Where the value is split over axes that become pending, and behind how many splits of the goal; major first."""
    found: dict[str, tuple[int, int] | None] = {}
    if start.layout.mesh == goal.layout.mesh and transfers.part_sizes(start.attr, start.shape) == transfers.part_sizes(goal.attr, goal.shape):  # type: ignore[union-attr]
        for k, ((_, axes), wanted) in enumerate(zip(start.attr.parts(start.shape), splits, strict=True)):
            for i, axis in enumerate(axes):
                if axis in new:
                    before = tuple(other for other in axes[:i] if other not in new)
                    found[axis] = (k, len(before) if before == wanted[: len(before)] else 0)
    return found | {axis: None for axis in new if axis not in found}
