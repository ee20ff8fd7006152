"""Pending values: what they can be made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from autopar.ir import transfers
from autopar.ir.layout import Axes, DistAttr, Layout, normal_dim
from autopar.ir.record import TensorType
from autopar.transitions.draft import Dims, first_lengths, parts_of
from autopar.transitions.way import Move, op_argument, parts_argument, places_for

Place = tuple[int, int] | None  # a part, and behind how many splits of the goal; ``None``: the whole value


class Made(NamedTuple):
    """What a goal can be made of, and how.

    Attributes:
        dims: its splits, in normal form.
        lengths: of the first piece, dim by dim.
        pended: the new pending axes, each with its kind and what becomes pending.
        cut: the splits of the goal that are cut afterwards, each with its part.
    """

    goal: TensorType
    dims: Dims
    lengths: tuple[int, ...]
    pended: tuple[tuple[str, str, Place], ...]
    cut: tuple[tuple[int, str], ...]

    @property
    def count(self) -> int:
        """How many transfers make the goal of it."""
        return len(self.pended) + len(self.cut)

    @property
    def type(self) -> TensorType:
        new = {axis for axis, _, _ in self.pended}
        pending = tuple(pair for pair in self.goal.attr.pending if pair[0] not in new)
        return replace(self.goal, layout=Layout(self.goal.layout.mesh, DistAttr(self.dims, pending)))  # type: ignore[union-attr]

    def transfers(self) -> list[Move]:
        """The transfers that make the goal of it."""
        parts = parts_argument(transfers.part_sizes(self.goal.attr, self.goal.shape))
        pends = [(transfers.pend, {"axis": axis, **op_argument(kind), **({} if place is None else {"dim": place[0], **parts})})
                 for axis, kind, place in reversed(self.pended)]  # fmt: skip
        return [*pends, *((transfers.slice, {"dim": k, "axis": axis, **parts}) for k, axis in self.cut)]


def made_pending(start: TensorType, goal: TensorType, new: list[tuple[str, str]]) -> Iterator[Made]:
    """What the goal can be made of: whole over its new pending axes, or split.

    A split comes behind some splits that the goal has there; the rest of those are cut afterwards. First as the value is.
    """
    mesh, dims, shape = goal.layout.mesh, goal.attr.dims, goal.shape  # type: ignore[union-attr]
    if not new:
        yield Made(goal, dims, first_lengths(dims, shape, mesh), (), ())
        return
    sizes = parts_of(dims, shape)
    splits = [axes for dim in dims for _, axes in dim]
    every_split = list(map(len, splits))
    choices: Iterator[list[Place]] = iter([[None] * len(new)])
    if all(kind in transfers.MERGES for _, kind in new):
        own = _own_places(start, goal, [axis for axis, _ in new], splits)
        new = sorted(new, key=lambda pair: list(own).index(pair[0]))
        places = [None, *((k, len(axes)) for k, axes in enumerate(splits)), *((k, j) for k, axes in enumerate(splits) for j in range(len(axes)))]
        every = ([places[number] for number in numbers] for numbers in places_for(len(places), len(new)))
        choices = itertools.chain([list(own.values())] if any(own.values()) else [], every)
    for chosen in choices:
        prefix = list(every_split)
        for k, behind in filter(None, chosen):
            prefix[k] = min(prefix[k], behind)
        axes = [list(own[:j]) for own, j in zip(splits, prefix, strict=True)]
        for (axis, _), place in zip(new, chosen, strict=True):
            if place is not None:
                axes[place[0]].append(axis)
        flat = iter(axes)
        before = tuple([normal_dim(tuple([(n, tuple(next(flat))) for n in dim]), size, mesh) for dim, size in zip(sizes, shape, strict=True)])
        yield Made(goal, before, first_lengths(before, shape, mesh), tuple([(*pair, place) for pair, place in zip(new, chosen, strict=True)]),
                   tuple([(k, axis) for k, j in enumerate(prefix) if j < every_split[k] for axis in splits[k][j:]]))  # fmt: skip


def _own_places(start: TensorType, goal: TensorType, new: list[str], splits: list[Axes]) -> dict[str, Place]:
    """Where the value is split over axes that become pending, and behind how many splits of the goal; major first."""
    found: dict[str, Place] = {}
    if start.layout.mesh == goal.layout.mesh and transfers.part_sizes(start.attr, start.shape) == transfers.part_sizes(goal.attr, goal.shape):  # type: ignore[union-attr]
        for k, ((_, axes), wanted) in enumerate(zip(start.attr.parts(start.shape), splits, strict=True)):
            for i, axis in enumerate(axes):
                if axis in new:
                    before = tuple(other for other in axes[:i] if other not in new)
                    found[axis] = (k, len(before) if before == wanted[: len(before)] else 0)
    return found | {axis: None for axis in new if axis not in found}
