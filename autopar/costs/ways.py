"""Price the ways of a collective over several hosts: at once, or level by level, so that slow links carry less.

    all_reduce over dp=8, on two hosts of four      reduce_scatter over dp.within4      n bytes within a host
                                                    all_reduce over dp.across4          n / 4 bytes between hosts
                                                    all_gather over dp.within4          n bytes within a host

A reduce-scatter or an all-gather goes level by level, too. Each part of a way is a collective of a program, so what is
priced here is what runs.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

from autopar.costs.machine import Machine
from autopar.costs.prices import group_price
from autopar.ir.layout import Axes
from autopar.ir.mesh import Mesh, ranks_by_group
from autopar.ir.subaxes import across, within

BY_LEVELS = ("all_reduce", "all_gather", "reduce_scatter")
Borders = tuple[tuple[str, int], ...]  # of ``Machine``: what shares links, and its ranks


class Part(NamedTuple):
    """One collective of a way.

    Attributes:
        name: the transfer.
        axes: its axes and sub-axes; one, except for an all-reduce.
        less: its bytes ``n`` are those of the whole collective, divided by this.
    """

    name: str
    axes: Axes
    less: int


Way = tuple[Part, ...]


class Digit(NamedTuple):
    """An axis or a sub-axis whose ranks are separated by so many borders, and its size."""

    borders: int
    axis: str
    size: int


@lru_cache(maxsize=4096)
def ways(name: str, axes: Axes, mesh: Mesh, borders: Borders) -> tuple[Way, ...]:
    """Return the ways of a collective over ``axes`` that go level by level; none if its ranks are on one level.

    Where hosts have different numbers of the group's ranks, there are none either.
    """
    if name not in BY_LEVELS or (len(axes) > 1 and name != "all_reduce"):
        return ()
    found: dict[Way, None] = {}
    for count in range(1, len(borders) + 1):
        for some in itertools.combinations(borders, count):
            digits = _digits(axes, mesh, some)
            if digits is not None and digits[0].borders < digits[-1].borders:
                found[_way(name, digits)] = None
    return tuple(found)


def _way(name: str, digits: tuple[Digit, ...]) -> Way:
    """Return the way over digits, which are given from the innermost on."""
    last = digits[-1].borders
    inner = [digit for digit in digits if digit.borders < last] if name == "all_reduce" else list(digits)
    less = [math.prod([digit.size for digit in inner[:k]]) for k in range(len(inner) + 1)]
    scatters = tuple([Part("reduce_scatter", (digit.axis,), less[k]) for k, digit in enumerate(inner)])
    gathers = tuple([Part("all_gather", (digit.axis,), less[k]) for k, digit in enumerate(inner)])[::-1]
    if name != "all_reduce":
        return scatters if name == "reduce_scatter" else gathers
    outer = tuple([digit.axis for digit in reversed(digits) if digit.borders == last])
    return (*scatters, Part("all_reduce", outer, less[-1]), *gathers)


def _digits(axes: Axes, mesh: Mesh, borders: Borders) -> tuple[Digit, ...] | None:
    """Return the digits of all axes, from the innermost on; ``None`` if they do not tell where a rank is."""
    found: list[Digit] = []
    for axis in sorted(axes, key=mesh.names.index, reverse=True):
        lengths = [_together(axis, mesh, ranks) for _, ranks in borders]
        left, size, before = axis, mesh.sizes[axis], 1
        for crossed, length in enumerate(lengths):
            if length is None or length % before:
                return None
            count, before = length // before, length
            if 1 < count < size:
                found.append(Digit(crossed, within(left, count), count))
                left, size = across(left, count), size // count
            elif count == size > 1:
                found.append(Digit(crossed, left, size))
                size = 1
        if size > 1:
            found.append(Digit(len(borders), left, size))
    return tuple(sorted(found, key=lambda digit: digit.borders)) or None


@lru_cache(maxsize=4096)
def _together(axis: str, mesh: Mesh, ranks: int) -> int | None:
    """Return how many neighbours along an axis share a host of so many ranks; ``None`` if groups differ in it."""
    lengths = set()
    for group in ranks_by_group(mesh, (axis,)):
        hosts = [rank // ranks for rank in group]
        lengths |= {len([*run]) for _, run in itertools.groupby(hosts)}  # ranks ascend, and so do hosts
    return lengths.pop() if len(lengths) == 1 else None


def way_nanoseconds(way: Way, size: int, mesh: Mesh, machine: Machine) -> int:
    """Return the price of a way of a collective of ``size`` bytes, the ``n`` of ``costs.prices``."""
    return sum([round(group_price(part.name, size // part.less, part.axes, mesh, machine) * 1e9) for part in way])


def collective_nanoseconds(name: str, size: int, axes: Axes, mesh: Mesh, machine: Machine) -> int:
    """Return the price of the cheapest way of a collective, at once or level by level."""
    at_once = round(group_price(name, size, axes, mesh, machine) * 1e9)
    return min(
        [at_once, *(way_nanoseconds(way, size, mesh, machine) for way in ways(name, axes, mesh, machine.borders))]
    )


@lru_cache(maxsize=4096)
def crosses(axes: Axes, mesh: Mesh, ranks: int) -> bool:
    """Return whether some ranks that differ along axes are on different hosts of so many ranks."""
    return any(len({rank // ranks for rank in group}) > 1 for group in ranks_by_group(mesh, axes))
