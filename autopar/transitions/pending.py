"""List the values from which a pending value can be made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from autopar.ir import transfers
from autopar.ir.layout import Axes, DistAttr, Layout, normal_dim
from autopar.ir.record import TensorType
from autopar.transitions.chain import Move, op_argument, parts_argument, places_for
from autopar.transitions.draft import Dims, first_lengths, parts_of

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
