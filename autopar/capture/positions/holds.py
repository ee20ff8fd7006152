"""Describe what a tensor holds at each position.

keys : i64[1 1 1 64]                                   k
le : bool[1 1 64 64] = le(keys, queries)               1 where q - k >= 0, else 0
where : f32[1 1 64 64] = where(le, 0.0, -inf)          0.0 where q - k >= 0, else -inf
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

Number = Any  # a number of Python, or an expression of sizes


def is_number(value: Number) -> bool:
    """Return whether a number is known; an expression with a symbol is not."""
    return bool(getattr(value, "is_number", True))


class Affine(NamedTuple):
    """A number at each position: a constant, and a slope for each dim, times the coordinate along it."""

    constant: Number
    slopes: tuple[Number, ...]

    @property
    def is_constant(self) -> bool:
        return not any(slope != 0 for slope in self.slopes)

    def plus(self, other: Affine, factor: Number = 1) -> Affine:
        """Return the sum with ``factor`` times another one, of the same dims."""
        slopes = tuple(a + factor * b for a, b in zip(self.slopes, other.slopes, strict=True))
        return Affine(self.constant + factor * other.constant, slopes)


class Positional(NamedTuple):
    """What a tensor holds at each position.

    Attributes:
        conditions: numbers that are integers. The tensor holds ``then`` where all are at least 0.
        then: the number there.
        other: the number elsewhere.
    """

    conditions: frozenset[Affine]
    then: Affine
    other: Number = 0

    @property
    def constant(self) -> Number | None:
        """The one number that it holds; ``None`` if there are several."""
        return None if self.conditions or not self.then.is_constant else self.then.constant


Shape = tuple[Number, ...]


class Operand(NamedTuple):
    """A tensor that an op reads: what it holds, its shape and dtype."""

    holds: Positional
    shape: Shape
    dtype: torch.dtype


class NotByPosition(Exception):
    """What an op makes does not follow from positions."""


def settled(found: Positional, shape: Shape) -> Positional:
    """Leave out slopes of dims of one element, and conditions that hold everywhere or nowhere."""

    def without_ones(affine: Affine) -> Affine:
        return Affine(affine.constant, tuple(0 if n == 1 else s for s, n in zip(affine.slopes, shape, strict=True)))

    then, conditions = without_ones(found.then), set()
    for condition in map(without_ones, found.conditions):
        least, most = _range(condition, shape)
        if most is not None and most < 0:
            return Positional(frozenset(), Affine(found.other, (0,) * len(shape)))
        if least is None or least < 0:
            conditions.add(condition)
    return Positional(frozenset(conditions), then, found.other if conditions else 0)


def _range(affine: Affine, shape: Shape) -> tuple[Number | None, Number | None]:
    """Return the least and the largest number; ``None`` where a size is no number."""
    parts = [affine.constant, *(s * (n - 1) for s, n in zip(affine.slopes, shape, strict=True) if s != 0)]
    if not all(map(is_number, parts)):
        return None, None
    first, *rest = parts
    return first + sum(min(part, 0) for part in rest), first + sum(max(part, 0) for part in rest)


MOST = 2**20  # of the numbers of a tensor of integers, so that no sum of them wraps around
MOST_QUARTERS = 256  # which all dtypes of floating-point numbers hold exactly
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_exact(found: Positional, dtype: torch.dtype) -> bool:
    """Return whether a tensor of a dtype holds these numbers as they are: not rounded, and not wrapped around."""
    conditions = (number for condition in found.conditions for number in (condition.constant, *condition.slopes))
    if not all(_is_integer(number, 4 * MOST) for number in conditions):
        return False
    numbers = (found.then.constant, found.other)
    if dtype in (torch.int32, torch.int64):
        return all(_is_integer(number, MOST) for number in (*numbers, *found.then.slopes))
    if not found.then.is_constant or not all(map(is_number, numbers)):
        return False
    if dtype is torch.bool:
        return all(number in (0, 1) for number in numbers)
    return dtype in FLOATS and all(
        math.isinf(number) or abs(number) == torch.finfo(dtype).max
        or (number * 4 == int(number * 4) and abs(number * 4) <= MOST_QUARTERS)
        for number in map(float, numbers)
    )  # fmt: skip


def _is_integer(number: Number, most: int) -> bool:
    return not isinstance(number, float) and (not is_number(number) or abs(number) <= most)


def flipped(value: Positional) -> Positional:
    """Return the same, with the condition turned round, if there is one: ``a >= 0`` becomes ``-a - 1 >= 0``."""
    if len(value.conditions) != 1 or not value.then.is_constant:
        return value
    (condition,) = value.conditions
    zeros = (0,) * len(condition.slopes)
    return Positional(
        frozenset([Affine(-1, zeros).plus(condition, -1)]), Affine(value.other, zeros), value.then.constant
    )


def hides_later_keys(found: Positional, dtype: torch.dtype) -> bool | None:
    """Return whether a mask lets each query read the keys up to its own position.

    ``False``: it lets all be read. ``None``: neither.

    Args:
        found: of at least two dims, the last of queries and of keys.
        dtype: that of the mask: truths, or numbers that are added to scores.
    """
    if dtype is not torch.bool and not dtype.is_floating_point:
        return None
    read, lowest = (1, 0) if dtype is torch.bool else (0, torch.finfo(dtype).min)
    if found.constant is not None:
        return False if found.constant == read else None
    for value in (found, flipped(found)):
        rank = len(value.then.slopes)
        causal = Affine(0, (*(0,) * (rank - 2), 1, -1))
        is_hidden = value.other == lowest or (read == 0 and value.other == -math.inf)
        if value.conditions == {causal} and value.then.is_constant and value.then.constant == read and is_hidden:
            return True
    return None
