"""List the groups of a mesh as arrays: of meshes with thousands of ranks, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.subaxes import cut_towards


@lru_cache(maxsize=256)
def positions_by_group(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Return the positions in ``mesh.ranks`` of the members of each group: ``[groups, members]``.

    ``axes``: axes or sub-axes. Members are in row-major order of the axes. ``ValueError`` if the mesh has no such axis.
    """
    names = mesh.names
    for axis in axes:
        names = cut_towards(names, mesh.check_axis(axis))
    last = [names.index(axis) for axis in axes]
    grid = np.arange(mesh.size).reshape([mesh.sizes[name] for name in names])
    return np.moveaxis(grid, last, range(-len(last), 0)).reshape(-1, mesh.count(axes))


def ranks_by_group(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of all groups over ``axes``, each in row-major order of these axes."""
    return list(map(tuple, np.asarray(mesh.ranks)[positions_by_group(mesh, tuple(axes))].tolist()))


def ranges_of(ranks: Sequence[int]) -> str:
    """Write ascending ranks in short: ``0-3 8 9`` as it stands, and ``1-4089:8`` for each eighth one from 1 to 4089."""
    words: list[str] = []
    k = 0
    while k < len(ranks):
        step = ranks[k + 1] - ranks[k] if k + 1 < len(ranks) else 1
        end = k
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end - k < 2:  # two ranks are no row
            words.append(str(ranks[k]))
            k += 1
            continue
        words.append(f"{ranks[k]}-{ranks[end]}" + (f":{step}" if step > 1 else ""))
        k = end + 1
    return " ".join(words)
