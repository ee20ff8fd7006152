"""Define the mesh, a grid of ranks with named axes, with its coordinates, groups and stages."""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from autopar.errors import shown
from autopar.ir.subaxes import cut_towards, index_along, sub_axis

# -- rank groups -------------------------------------------------------------------------------------------------------
#
# List the groups of a mesh as arrays: of meshes with thousands of ranks, too.


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


# -- mesh --------------------------------------------------------------------------------------------------------------


SEQUENCE, EXPERTS = "cp", "ep"  # axes with a meaning: cp splits the sequence; on ep each rank keeps its experts
PIPELINE = "pp"  # the axis of pipeline stages
ROWS = "rows"  # the one axis of the mesh on which a step learns what depends on the rows of a batch
MOST_RANKS = 2**20  # of a mesh; each takes memory here, and a mistyped size would exhaust it


class _Sizes(dict[str, int]):
    """The sizes of the axes of a mesh; also those of sub-axes, which are not listed."""

    def __missing__(self, axis: str) -> int:
        found = sub_axis(axis)
        size = 0 if found is None else self.get(found.axis, 0)
        if found is None or not size or size % (found.stride * (found.size or 1)):
            raise KeyError(axis)
        return found.size or size // found.stride

    def __contains__(self, axis: object) -> bool:
        if super().__contains__(axis) or not isinstance(axis, str) or "." not in axis:
            return super().__contains__(axis)
        try:
            return self[axis] > 0
        except KeyError:
            return False


@dataclass(frozen=True, init=False, eq=True)
class Mesh:
    """A grid of ranks: ``Mesh(dp=2, tp=4)`` is eight ranks, the last axis varying fastest.

    Wherever the name of an axis stands, that of a sub-axis may stand too (``autopar.ir.subaxes``); ``names`` and
    ``sizes`` list the axes alone.

    Args:
        axes: sizes by axis name, as keywords or as one mapping.
        ranks: the ranks in row-major order of the axes; ``0 … size-1`` when left out.
        name: the name of a *stage* (a sub-mesh); ``None`` for a whole mesh.

    Raises:
        ValueError: an axis size below one, more than ``MOST_RANKS`` ranks, a name that cannot be printed, or ranks that
            do not fit the grid, or do not ascend along an axis.
        TypeError: axes without names, a name that is not a string, ranks that are not a list.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    name: str | None

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        /,
        *more: object,  # mistakes, which raise a clear TypeError
        ranks: Sequence[int] | None = None,
        name: str | None = None,
        **sizes: int,
    ) -> None:
        if more or not (axes is None or isinstance(axes, Mapping)):
            sizes_text = ", ".join(map(repr, (axes, *more)))
            raise TypeError(f"Mesh({sizes_text}) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)")
        axes = dict(axes or {})
        if twice := [axis for axis in sizes if axis in axes]:
            axis = twice[0]
            raise ValueError(
                f"axis {shown(axis)} is given twice, with the sizes {shown(axes[axis])} and {shown(sizes[axis])}; "
                f"give it once, as in Mesh(dp=2, tp=2)"
            )
        pairs = tuple((_axis_name(axis), _axis_size(axis, size)) for axis, size in {**axes, **sizes}.items())
        count = math.prod(size for _, size in pairs)
        if count > MOST_RANKS:
            raise ValueError(f"{self._grid(pairs)} has {count:,} ranks; a mesh has at most {MOST_RANKS:,}")
        ranks = tuple(range(count)) if ranks is None else _checked_ranks(ranks)
        if len(ranks) != count:
            of = self._grid(pairs) or "a mesh without axes"
            raise ValueError(f"{of} needs {count} different ranks, got {len(ranks)}: {list(ranks)}")
        if len(set(ranks)) < count:
            repeated, times = Counter(ranks).most_common(1)[0]
            raise ValueError(
                f"{self._grid(pairs)} needs {count} different ranks, but rank {repeated} is given "
                f"{'twice' if times == 2 else f'{times} times'}: {list(ranks)}"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(
                f"name={shown(name)} is not a string; it names a stage, as in Mesh(dp=2, tp=2, name='first') "
                f"(an axis called 'name' is Mesh({{'name': 2}}))"
            )
        if name is not None and not name.isidentifier():
            raise ValueError(f"stage name {shown(name)} is not an identifier")
        object.__setattr__(self, "axes", pairs)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "name", name)
        self._check_order()

    def _check_order(self) -> None:
        """Check that the ranks ascend along each axis.

        Collectives number a group's members in the order of their ranks.
        """
        if list(self.ranks) == sorted(self.ranks):
            return
        stride = self.size
        for axis, size in self.axes:
            stride //= size
            for k, rank in enumerate(self.ranks):
                if k // stride % size and self.ranks[k - stride] > rank:
                    raise ValueError(
                        f"the ranks of {self._grid(self.axes)} do not ascend along {axis}: {rank} comes after "
                        f"{self.ranks[k - stride]} in {list(self.ranks)}; give them in ascending order along each "
                        f"axis, as in ranks={sorted(self.ranks)}"
                    )

    @staticmethod
    def _grid(pairs: Iterable[tuple[str, int]]) -> str:
        return " ".join(f"{axis}={size}" for axis, size in pairs)

    def __str__(self) -> str:
        return self._grid(self.axes)

    def __repr__(self) -> str:
        extra = "" if self.ranks == tuple(range(self.size)) else f", ranks={list(self.ranks)}"
        extra += "" if self.name is None else f", name={self.name!r}"
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.axes)}{extra})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.ranks, self.name))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name → size, in mesh order."""
        return _Sizes(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def count(self, axes: Iterable[str]) -> int:
        """Return how many pieces a dim split over ``axes`` has."""
        return math.prod([self.sizes[axis] for axis in axes])

    def check_axis(self, axis: object) -> str:
        """Return ``axis``, or raise ``ValueError`` with the nearest name."""
        if isinstance(axis, str) and axis in self.sizes:
            return axis
        if isinstance(axis, str) and (found := sub_axis(axis)) is not None and found.axis in self.sizes:
            raise ValueError(
                f"the axis {found.axis} of the mesh ({self}) has no sub-axis {shown(axis)}: {self.sizes[found.axis]} "
                f"ranks are not divisible by {found.stride * (found.size or 1)}"
            )
        near = difflib.get_close_matches(str(axis), self.names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"the mesh ({self}) has no axis {shown(axis)}; its axes are {', '.join(self.names) or 'none'}{hint}"
        )

    @cached_property
    def _coordinates(self) -> dict[int, dict[str, int]]:
        grid = itertools.product(*(range(size) for size in self.shape))
        return {rank: dict(zip(self.names, point, strict=True)) for rank, point in zip(self.ranks, grid, strict=True)}

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinates

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis name → index of ``rank``; ``ValueError`` if the rank is not on the mesh."""
        try:
            return self._coordinates[rank]
        except KeyError:
            raise ValueError(
                f"rank {shown(rank)} is not on the mesh ({self}), whose ranks are {_ranges(self.ranks)}"
            ) from None

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at ``coordinates``, which have one index for every axis."""
        position = 0
        for axis, size in self.axes:
            if axis not in coordinates:
                raise ValueError(f"coordinates {dict(coordinates)} lack the axis {shown(axis)} of the mesh ({self})")
            index = coordinates[axis]
            if not 0 <= index < size:
                raise ValueError(f"coordinate {axis}={index} is outside the mesh ({self})")
            position = position * size + index
        return self.ranks[position]

    def group(self, rank: int, axis: str | Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, or along several axes.

        They are in row-major order of those axes.
        """
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        points = [self.coordinates(rank)]
        for name in axes:
            count = self.sizes[self.check_axis(name)]
            points = [self._moved(point, name, index) for point in points for index in range(count)]
        return tuple(map(self.rank, points))

    @staticmethod
    def _moved(at: Mapping[str, int], axis: str, index: int) -> dict[str, int]:
        """Return coordinates with another index along an axis or a sub-axis."""
        if axis in at:
            return {**at, axis: index}
        found = sub_axis(axis)
        assert found is not None
        return {**at, found.axis: at[found.axis] + (index - index_along(axis, at)) * found.stride}

    def points(self) -> Iterator[dict[str, int]]:
        """Iterate over the coordinates of all ranks, in the order of ``ranks``."""
        return iter(self._coordinates.values())


def mesh_of_stage(mesh: Mesh, position: int) -> Mesh:
    """Return the mesh of the ranks at a position along ``pp``, without that axis; a mesh without ``pp`` itself."""
    if PIPELINE not in mesh.sizes:
        return mesh
    ranks = [rank for rank in mesh.ranks if mesh.coordinates(rank)[PIPELINE] == position]
    return Mesh({axis: size for axis, size in mesh.axes if axis != PIPELINE}, ranks=ranks)


def stage_name(number: int) -> str:
    """Return the name of a stage of a pipeline in a program: ``s0``."""
    return f"s{number}"


def stage_number(name: str) -> int:
    """Return the number of a stage from its name."""
    return int(name.removeprefix("s"))


def _axis_name(axis: object) -> str:
    if not isinstance(axis, str):
        raise TypeError(f"axis name {shown(axis)} is not a string; name the axes, as in Mesh(dp=2, tp=2)")
    if not axis.isidentifier():
        raise ValueError(f"axis name {shown(axis)} is not an identifier; use letters, digits and '_', as in Mesh(dp=2)")
    return axis


def _axis_size(axis: str, size: object) -> int:
    number = integer(size)
    if number is None or number < 1:
        raise ValueError(f"axis {shown(axis)} has size {shown(size)}; the size of an axis is an integer ≥ 1")
    return number


def _checked_ranks(ranks: object) -> tuple[int, ...]:
    if isinstance(ranks, (str, bytes, Mapping, Set)) or not isinstance(ranks, Iterable):
        raise TypeError(
            f"ranks={shown(ranks)} is not a list of ranks; leave it out, as in Mesh(dp=2, tp=2), or give ranks=[0, 1]"
        )
    given, numbers = tuple(ranks), []
    if set(map(type, given)) == {int} and min(given) >= 0:
        return given
    for rank in given:
        number = integer(rank)
        if number is None or number < 0:
            raise ValueError(
                f"rank {shown(rank)} is not an integer ≥ 0; leave the ranks out, as in Mesh(dp=2, tp=2), or give "
                f"ranks=[0, 1]"
            )
        numbers.append(number)
    return tuple(numbers)


def integer(value: Any) -> int | None:
    """Return ``value`` as an ``int`` if it is an integer (numpy's too); a bool is none."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def _ranges(ranks: Sequence[int]) -> str:
    """Write ``(0, 1, 2, 3, 8, 9)`` as ``0-3 8 9``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a} {b}" for a, b in runs)
