"""Search the shape of the mesh: of all grids of so many devices, the one whose cheapest plan is the fastest.

Grids have up to three axes, and the first axis is the outermost: its ranks are the farthest from each other. A grid
whose axes divide those of another, as 2 × 4 × 8 those of 8 × 8, has all of its plans, so the grids with fewer axes come
first, and another one must be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.costs.machine import Machine
from autopar.errors import AutoparError, shown
from autopar.ir.mesh import MOST_RANKS, Mesh
from autopar.search.solutions.found import Found

AXES = ("a", "b", "c")


@dataclass(frozen=True)
class Devices:
    """So many devices, whose mesh ``parallelize`` chooses. Made by ``autopar.devices``.

    Attributes:
        count: the number of devices.
        machine: their machine; ``None``: that of the model's device.
    """

    count: int
    machine: Machine | None = None


@dataclass(frozen=True)
class MeshRow:
    """What the search found on one mesh.

    Attributes:
        mesh: the mesh.
        nanoseconds: the price of its cheapest plan; ``None`` if the time limit came before, or it has no plan.
        least: a lower bound of the prices of its plans, in nanoseconds.
        note: why there is no price.
    """

    mesh: Mesh
    nanoseconds: int | None
    least: float
    note: str = ""


def meshes(count: int) -> Iterator[Mesh]:
    """Yield all meshes of so many ranks with up to three axes of two ranks or more; those with fewer axes first.

    Raises:
        ValueError: ``count`` is no number of ranks.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
        raise ValueError(f"{shown(count)} is no number of devices from 1 to {MOST_RANKS}")
    for axes in range(1, len(AXES) + 1):
        for sizes in _factors(count, axes):
            yield Mesh(dict(zip(AXES, sizes, strict=False)))


def _factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factors of a number, each above one; of the number one, itself."""
    if parts == 1:
        if count > 1 or parts == 1 == count:
            yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for rest in _factors(count // first, parts - 1):
                if 1 not in rest:
                    yield (first, *rest)


def best_mesh(
    count: int, find: Callable[[Mesh, float], Found], time_limit: float
) -> tuple[Mesh, Found, tuple[MeshRow, ...]]:
    """Return the mesh with the cheapest plan, that plan, and a row for each mesh.

    Args:
        find: searches a plan on a mesh in so many seconds.
        time_limit: seconds, after which no further mesh is searched.

    Raises:
        AutoparError: no mesh has a plan; it is that of the last one.
    """
    end = time.monotonic() + time_limit
    rows: list[MeshRow] = []
    best: tuple[Mesh, Found] | None = None
    error: AutoparError | None = None
    for mesh in meshes(count):
        left = end - time.monotonic()
        if best is not None and left <= 0:
            rows.append(MeshRow(mesh, None, 0.0, "the time limit came before"))
            continue
        try:
            found = find(mesh, max(left, 0.0))
        except AutoparError as raised:
            error = raised
            rows.append(MeshRow(mesh, None, 0.0, str(raised).partition("\n")[0]))
            continue
        rows.append(MeshRow(mesh, found.nanoseconds, found.least))
        if best is None or found.nanoseconds < best[1].nanoseconds:
            best = mesh, found
    if best is None:
        assert error is not None
        raise error
    return *best, tuple(rows)
