"""Name a part of an axis: the ranks of an axis that share a host, or those that have the same place on their hosts.

On ``dp=8`` over two hosts of four ranks, ``dp.within4`` are the four ranks of a host, and ``dp.across4`` the two that have
the same place on their hosts. The index of a rank along them is ``dp % 4`` and ``dp // 4``. So ``32/dp`` is
``32/dp.across4/dp.within4``. Sub-axes have sub-axes: ``dp.across4.within2`` is ``dp // 4 % 2``. The name says all, so that
neither a mesh nor a text has to declare them.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

_STEP = re.compile(r"(within|across)([1-9]\d*)")


class SubAxis(NamedTuple):
    """Which indices of an axis a name stands for: index ``i`` of ``axis`` has the index ``i // stride % size``.

    ``size`` is ``None`` for all that are left.
    """

    axis: str
    stride: int
    size: int | None


def within(axis: str, count: int) -> str:
    """Return the sub-axis of ``count`` neighbouring ranks of an axis, as those of a host: ``dp.within4``."""
    return f"{axis}.within{count}"


def across(axis: str, count: int) -> str:
    """Return the sub-axis of the ranks that have one place among ``count`` neighbours: ``dp.across4``."""
    return f"{axis}.across{count}"


def is_sub_axis(name: str) -> bool:
    return "." in name


@lru_cache(maxsize=4096)
def sub_axis(name: str) -> SubAxis | None:
    """Return which part of an axis a name stands for; ``None`` if it is no name of a sub-axis."""
    axis, *steps = name.split(".")
    if not steps or not axis.isidentifier():
        return None
    stride, count = 1, None
    for step in steps:
        match = _STEP.fullmatch(step)
        if match is None:
            return None
        number = int(match[2])
        if count is not None and count % number:
            return None
        if match[1] == "within":
            count = number
        else:
            stride, count = stride * number, None if count is None else count // number
    return SubAxis(axis, stride, count)


def index_along(axis: str, at: Mapping[str, int]) -> int:
    """Return the index along an axis or a sub-axis of the rank at coordinates ``at``, which have no sub-axes."""
    if axis in at:
        return at[axis]
    found = sub_axis(axis)
    if found is None:
        raise KeyError(axis)
    index = at[found.axis] // found.stride
    return index if found.size is None else index % found.size


def overlap(a: str, b: str) -> bool:
    """Return whether two axes or sub-axes of a mesh have indices of one axis in common.

    A value cannot be split by both.
    """
    if a == b or not (is_sub_axis(a) or is_sub_axis(b)) or whole_axis(a) != whole_axis(b):
        return a == b
    (begin, end), (other_begin, other_end) = map(_strides, (a, b))
    return begin < other_end and other_begin < end


def _strides(name: str) -> tuple[int, float]:
    found = sub_axis(name)
    if found is None:
        return 1, math.inf
    return found.stride, math.inf if found.size is None else found.stride * found.size


def whole_axis(name: str) -> str:
    """Return the axis of the mesh of which a name is a part, or which it is."""
    return name.partition(".")[0]


def parent_of(name: str) -> str:
    """Return the axis or sub-axis of which a sub-axis is a part."""
    return name.rpartition(".")[0]


def halves(name: str) -> tuple[str, str]:
    """Return the two sub-axes of a sub-axis' parent, of which it is one, major first: across, within."""
    parent, _, step = name.rpartition(".")
    number = int(step.removeprefix("within").removeprefix("across"))
    return across(parent, number), within(parent, number)


def cut_towards(axes: tuple[str, ...], wanted: str) -> tuple[str, ...]:
    """Return axes, major first, of which one was cut until ``wanted`` is among them.

    ``("tp", "dp")`` towards ``dp.within4`` is ``("tp", "dp.across4", "dp.within4")``.
    """
    if wanted in axes or not is_sub_axis(wanted):
        return axes
    parent = parent_of(wanted)
    axes = cut_towards(axes, parent)
    if parent not in axes:
        return axes
    place = axes.index(parent)
    return (*axes[:place], *halves(wanted), *axes[place + 1 :])


def cut_pending(pending: dict[str, str], wanted: str) -> None:
    """Replace a pending axis, of which ``wanted`` is a part, by its sub-axes, each pending alike."""
    if wanted not in pending and is_sub_axis(wanted):
        cut_pending(pending, parent := parent_of(wanted))
        if parent in pending:
            pending |= dict.fromkeys(halves(wanted), pending.pop(parent))


def joined(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return axes, major first, in which both halves of an axis side by side are that axis."""
    found: list[str] = []
    for axis in axes:
        found.append(axis)
        while len(found) > 1 and is_sub_axis(found[-1]) and tuple(found[-2:]) == halves(found[-1]):
            found[-2:] = [parent_of(found[-1])]
    return tuple(found)
