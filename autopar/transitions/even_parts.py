"""View two Layouts of a value in common parts that axes split evenly, dim by dim."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.ir.layout import Axes, Dim
from autopar.transitions.axis_prices import Numbers, Prices, Room
from autopar.transitions.chain import views_of

Row = tuple[Room, Numbers, Numbers]  # the room of a part, and the axes that split it at both ends


class DimView(NamedTuple):
    """A dim in the common parts of two Layouts.

    Attributes:
        sizes: of the parts.
        have, want: the axes that split each part.
        rows: what matters of the parts that have axes or room for some; for each at how many ends another axis would
            not split the dim plainly, and its place.
    """

    sizes: tuple[int, ...]
    have: tuple[Numbers, ...]
    want: tuple[Numbers, ...]
    rows: tuple[tuple[Row, int, int], ...]


@lru_cache(maxsize=65536)
def dim_views(dim: Dim, goal: Dim, size: int, prices: Prices) -> tuple[DimView | None, DimView | None] | None:
    """Return a dim in coarse parts and in the finest: ``None`` for the ones that are uneven, or if there are none."""
    views = views_of(dim, goal, size, prices.mesh)
    return (_dim_view(*views[0], prices), _dim_view(*views[-1], prices)) if views else None


def _dim_view(sizes: tuple[int, ...], before: list[Axes], after: list[Axes], prices: Prices) -> DimView | None:
    number = {name: k for k, name in enumerate(prices.names)}
    have, want = (tuple([tuple([number[axis] for axis in axes]) for axes in side]) for side in (before, after))
    rows = []
    late = 0
    for p, (n, a, b) in enumerate(zip(sizes, have, want, strict=True)):
        if not n or n % prices.count(a) or n % prices.count(b):
            return None
        room = prices.room(n)
        if a or b or room[0] > 1:
            rows.append(((room, a, b), late, p))
        late |= 2 * (prices.count(b) != n) + (prices.count(a) != n)
    return DimView(sizes, have, want, tuple(rows))


View = tuple[DimView, ...]  # of each dim


def even_views(source: tuple[Dim, ...], goal: tuple[Dim, ...], shape: tuple[int, ...], prices: Prices) -> list[View]:
    """Return the views of a value in which a path is looked for: in coarse parts, and in the finest."""
    dims = [dim_views(have, want, size, prices) for size, have, want in zip(shape, source, goal, strict=True)]
    if None in dims:
        return []
    coarse, fine = zip(*dims, strict=True) if dims else ((), ())
    if coarse == fine or None in coarse or (None not in fine and covers(fine, coarse, prices.sizes)):
        return [] if None in fine else [fine]
    return [coarse] if None in fine else [coarse, fine]


def covers(fine: View, coarse: View, axes: Numbers) -> bool:
    """Return whether all even splits of coarse parts are splits of the fine ones.

    They are if all axes have one size, and each fills any fine part but the last of a coarse one.
    """
    if len(set(axes)) > 1:
        return False
    for dim, plain in zip(fine, coarse, strict=True):
        sizes = iter(dim.sizes)
        for size in plain.sizes:
            while size > 1 and (n := next(sizes)) < size:
                if n != axes[0]:
                    return False
                size //= n
    return True
