"""List the strategies of an op, and the layouts that a value without a producer may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.ir.layout import Dim, DistAttr
from autopar.ir.mesh import Mesh
from autopar.rules.strategies import Bound, Strategy


class StepLayouts(NamedTuple):
    """What one op of an expansion requires of its operands, and the attributes of its results."""

    needs: tuple[DistAttr, ...]
    gives: tuple[DistAttr | None, ...]


class Places(NamedTuple):
    """What numbers the indices of a dim in an expansion; the expansions of one phase share it.

    Attributes:
        size: how many indices there are.
        nanoseconds: of the op that makes it, whole on every rank.
        need: the attribute in which the expansion reads it.
    """

    size: int
    nanoseconds: int
    need: DistAttr


class Inside(NamedTuple):
    """The solved expansion of an op.

    Attributes:
        steps: of all ops of the expansion, in their order.
        places: what the expansion shares with others; the price of the strategy does not contain it.
        bytes: of the values inside at the peak, on the rank with the largest pieces.
    """

    steps: tuple[StepLayouts, ...]
    places: tuple[Places, ...]
    bytes: int


class Placed(NamedTuple):
    """A strategy with the attributes that it requires of the operands, and those of the results.

    Attributes:
        split: of the factors of the op's rule.
        inside: how the op's expansion is placed, if the strategy splits a factor that only the expansion can split.
            ``UNREAD`` is then the need of an operand that it does not read.
    """

    split: tuple[tuple[str, Dim], ...]
    needs: tuple[DistAttr, ...]
    gives: tuple[DistAttr | None, ...]
    inside: Inside | None = None


_Slot = tuple[str, int]  # a factor and one of its parts, or "" and a linear alternative
_IDLE: _Slot = ("", -1)


def strategies(bound: Bound, mesh: Mesh, parts: Mapping[str, tuple[int, ...]]) -> list[Placed]:
    """Return all strategies of a bound rule, each pair of needs and gives once, in a deterministic order.

    Each axis splits a part of a factor, passes a pending sum by a linear alternative, or does nothing. Where several
    axes split one part, each order of them is a strategy of its own. A split must make the largest piece smaller.

    Args:
        parts: factor → the sizes of its parts, as ``CutSearch`` finds them; other factors have one part.
    """
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    slots: list[_Slot] = [_IDLE]
    for factor, size in bound.sizes.items():
        if factor not in bound.whole and size > 1:
            slots += [(factor, k) for k, part in enumerate(parts.get(factor, (size,))) if part > 1]
    slots += [("", k) for k in range(len(bound.linear))]
    found: dict[tuple[object, ...], Placed] = {}
    for chosen in itertools.product(slots, repeat=len(axes)):
        for split in _splits(bound, mesh, parts, dict(zip(axes, chosen, strict=True))):
            passing = tuple((axis, k) for axis, (factor, k) in zip(axes, chosen, strict=True) if not factor and k >= 0)
            needs, gives = bound.place(Strategy(split, tuple(sorted(passing))), mesh)
            found.setdefault((needs, gives), Placed(split, needs, gives))
    return list(found.values())


def _splits(
    bound: Bound, mesh: Mesh, parts: Mapping[str, tuple[int, ...]], chosen: Mapping[str, _Slot]
) -> Iterator[tuple[tuple[str, Dim], ...]]:
    """Yield the splits of all factors for a slot of each axis, in each order of the axes of a part."""
    by_slot: dict[_Slot, list[str]] = {}
    for axis, slot in chosen.items():
        if slot[0]:
            by_slot.setdefault(slot, []).append(axis)
    for orders in itertools.product(*(itertools.permutations(axes) for axes in by_slot.values())):
        rows: dict[str, dict[int, tuple[str, ...]]] = {}
        for (factor, k), axes in zip(by_slot, orders, strict=True):
            rows.setdefault(factor, {})[k] = axes
        dims: list[tuple[str, Dim]] = []
        for factor, row in sorted(rows.items()):
            sizes = parts.get(factor, (bound.sizes[factor],))
            if not all(shrinks(sizes[k], axes, mesh) for k, axes in row.items()):
                break
            if len(sizes) == 1:
                dim: Dim = ((None, row[0]),)
            else:
                dim = tuple((size, row.get(k, ())) for k, size in enumerate(sizes))
            if not bound.takes(factor, dim, mesh):
                break
            dims.append((factor, dim))
        else:
            yield tuple(dims)


def shrinks(size: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Return whether each axis makes the largest piece smaller, and leaves less than half of its ranks idle."""
    for axis in axes:
        piece = -(-size // mesh.sizes[axis])
        if piece == size or piece * mesh.sizes[axis] >= 2 * size:
            return False
        size = piece
    return True


def homes(shape: tuple[int, ...], mesh: Mesh) -> list[DistAttr]:
    """Return the attributes that DTensor's Shard and Replicate can express, the replicated one first."""
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    found = []
    for chosen in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        rows = [tuple(axis for axis, d in zip(axes, chosen, strict=True) if d == dim) for dim in range(len(shape))]
        if all(shrinks(size, row, mesh) for size, row in zip(shape, rows, strict=True)):
            found.append(DistAttr(tuple(((None, row),) for row in rows)).normalize(shape, mesh))
    return list(dict.fromkeys(found))
