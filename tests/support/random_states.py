"""Draw states of a value: any splits of its dims and of parts of them, pending sums, and dtypes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from autopar.ir.layout import Dim, DistAttr
from autopar.ir.mesh import Mesh
from autopar.search.transfer_prices.chains import State


def random_state(
    draw: random.Random, shape: Sequence[int], mesh: Mesh, dtypes: Sequence[torch.dtype], pending: float = 0.25
) -> State:
    """Each axis splits a part of a dim, is pending with this chance, or does nothing."""
    parts = [random_parts(draw, size) for size in shape]
    places = [(d, k) for d, sizes in enumerate(parts) for k in range(len(sizes))]
    axes: dict[tuple[int, int], tuple[str, ...]] = {}
    waiting = []
    for axis in draw.sample(mesh.names, len(mesh.names)):
        if draw.random() < pending:
            waiting.append((axis, "sum"))
        elif places and draw.random() < 0.75:
            place = draw.choice(places)
            axes[place] = (*axes.get(place, ()), axis)
    dims: list[Dim] = []
    for d, sizes in enumerate(parts):
        if len(sizes) == 1:
            dims.append(((None, axes.get((d, 0), ())),))
        else:
            dims.append(tuple((size, axes.get((d, k), ())) for k, size in enumerate(sizes)))
    return DistAttr(tuple(dims), tuple(sorted(waiting))).normalize(tuple(shape), mesh), draw.choice(dtypes)


def random_parts(draw: random.Random, size: int) -> tuple[int, ...]:
    divisors = [n for n in range(2, size) if size % n == 0]
    if not divisors or draw.random() < 0.5:
        return (size,)
    first = draw.choice(divisors)
    return first, size // first
