"""Decide which rows of a batch belong to a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import PIPELINE, SEQUENCE, Mesh
from autopar.ir.subaxes import index_along
from autopar.plan.batch import axes_of_rows


@dataclass(frozen=True)
class Place:
    """The rows of a rank: one of ``count`` pieces of each batch, which has the number ``index``."""

    index: int = 0
    count: int = 1

    def of(self, rows: int) -> tuple[int, int]:
        """Return the first row of the piece in a batch of so many rows, and the row after its last.

        Pieces follow each other in the order of their numbers. Their lengths differ by one row at most.
        """
        size, longer = divmod(rows, self.count)
        start = self.index * size + min(self.index, longer)
        return start, start + size + (self.index < longer)


WHOLE = Place()


def place_of(mesh: Mesh, rank: int, axes: str | Sequence[str] | None = None) -> Place:
    """Return the piece of a rank.

    Args:
        axes: the axes that split the batch, major first; by default those of a plan that names no inputs.

    Raises:
        ValueError: the mesh has no such axis; or it has several data axes and ``axes`` is not given; or an axis
            splits the sequence.
    """
    given = (axes,) if isinstance(axes, str) else axes
    names = axes_of_rows(mesh) if given is None else tuple(mesh.check_axis(axis) for axis in given)
    if len(set(names)) < len(names):
        raise ValueError(f"axes={names} names an axis twice; name each axis that splits the batch once")
    if PIPELINE in names:
        raise ValueError(f"axes={names} names {PIPELINE}, and all stages take the same rows; leave it out")
    if mesh.sizes.get(SEQUENCE, 1) > 1:
        raise ValueError(
            f"on the mesh ({mesh}) each rank has a part of the sequence, and a loader cuts rows only; use "
            f'inputs="global" here and in parallelize, so that each rank keeps its part of the whole batch'
        )
    coordinates, index = mesh.coordinates(rank), 0
    for axis in names:
        index = index * mesh.sizes[axis] + index_along(axis, coordinates)
    return Place(index, math.prod(mesh.sizes[axis] for axis in names))
