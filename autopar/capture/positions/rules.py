"""The rules of ops: what an op makes, by what its operands hold.

A rule takes the shape and the dtype of the result, and the op's arguments.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.positions.holds import (
    Affine,
    NotByPosition,
    Number,
    Operand,
    Positional,
    Shape,
    flipped,
    is_number,
)

# -- numbers -----------------------------------------------------------------------------------------------------------


def _constant(number: Number, shape: Shape) -> Positional:
    return Positional(frozenset(), Affine(number, (0,) * len(shape)))


def _broadcast(value: Any, shape: Shape) -> Positional:
    """Return what an operand, a tensor or a number, holds at the positions of a result."""
    if not isinstance(value, Operand):
        return _constant(value, shape)
    before = (0,) * (len(shape) - len(value.shape))
    return _each(value.holds, lambda affine: Affine(affine.constant, (*before, *affine.slopes)))


def _each(value: Positional, change: Callable[[Affine], Affine]) -> Positional:
    return Positional(frozenset(map(change, value.conditions)), change(value.then), value.other)


def _of_numbers(change: Callable[..., Number]) -> Callable[..., Positional]:
    """Return the rule of an element-wise function. At most one operand has several numbers."""

    def rule(shape: Shape, dtype: torch.dtype, *operands: Any) -> Positional:
        values = [_broadcast(value, shape) for value in operands]
        varying = [value for value in values if value.constant is None]
        if len(varying) > 1 or not all(value.then.is_constant and is_number(value.then.constant) for value in values):
            raise NotByPosition
        where = varying[0] if varying else values[0]

        def made(part: Callable[[Positional], Number]) -> Number:
            return _cast(change(*(part(v) if v.constant is None else v.constant for v in values)), dtype)

        then = Affine(made(lambda value: value.then.constant), (0,) * len(shape))
        return Positional(where.conditions, then, made(lambda value: value.other) if varying else 0)

    return rule


def _cast(number: Number, dtype: torch.dtype) -> Number:
    if not is_number(number):
        if dtype is torch.bool or dtype.is_floating_point:
            raise NotByPosition
        return number
    if dtype is torch.bool:
        return int(bool(number != 0))
    if dtype.is_floating_point:
        return float(number)
    if isinstance(number, float) and not math.isfinite(number):
        raise NotByPosition
    return int(number)


def _counts(dtype: torch.dtype) -> bool:
    """Return whether it is a dtype of integers."""
    return not dtype.is_floating_point and dtype is not torch.bool


def _affine(value: Positional) -> Affine:
    if value.conditions:
        raise NotByPosition
    return value.then


def _sum(sign: int) -> Callable[..., Positional]:
    """Return the rule of a sum or a difference."""
    numbers = _of_numbers(operator.add if sign > 0 else operator.sub)

    def rule(shape: Shape, dtype: torch.dtype, a: Any, b: Any) -> Positional:
        left, right = _broadcast(a, shape), _broadcast(b, shape)
        if not _counts(dtype) or left.conditions or right.conditions:
            return numbers(shape, dtype, a, b)
        return Positional(frozenset(), left.then.plus(right.then, sign))

    return rule


def _from(shape: Shape, dtype: torch.dtype, a: Any, b: Any, *alpha: Number) -> Positional:
    """The rule of ``rsub``."""
    if alpha:
        raise NotByPosition
    return _sum(-1)(shape, dtype, b, a)


def _product(shape: Shape, dtype: torch.dtype, a: Any, b: Any) -> Positional:
    one, other = _broadcast(a, shape), _broadcast(b, shape)
    one, other = (one, other) if other.constant is not None else (other, one)
    if not _counts(dtype) or one.conditions or other.constant is None:
        return _of_numbers(operator.mul)(shape, dtype, a, b)
    return Positional(frozenset(), Affine(0, (0,) * len(shape)).plus(one.then, other.constant))


def _is_least(difference: Callable[[Affine, Affine], Affine]) -> Callable[..., Positional]:
    """Return the rule of a comparison of integers, which holds where a difference is at least 0."""

    def rule(shape: Shape, dtype: torch.dtype, a: Any, b: Any) -> Positional:
        condition = difference(_affine(_broadcast(a, shape)), _affine(_broadcast(b, shape)))
        if any(isinstance(part, float) for part in (condition.constant, *condition.slopes)):
            raise NotByPosition
        return Positional(frozenset([condition]), Affine(1, (0,) * len(shape)), 0)

    return rule


def _equal(is_equal: bool) -> Callable[..., Positional]:
    """Return the rule of ``eq`` or ``ne`` of numbers that differ by the same everywhere."""
    numbers = _of_numbers(operator.eq if is_equal else operator.ne)

    def rule(shape: Shape, dtype: torch.dtype, a: Any, b: Any) -> Positional:
        left, right = _broadcast(a, shape), _broadcast(b, shape)
        if (left.then.is_constant and right.then.is_constant) or left.conditions or right.conditions:
            return numbers(shape, dtype, a, b)
        apart = left.then.plus(right.then, -1)
        if not apart.is_constant or not is_number(apart.constant):
            raise NotByPosition
        return _constant(int((apart.constant == 0) == is_equal), shape)

    return rule


def _where(shape: Shape, dtype: torch.dtype, truth: Any, yes: Any, no: Any) -> Positional:
    condition, a, b = (_broadcast(value, shape) for value in (truth, yes, no))
    if condition.constant is not None:
        return a if condition.constant else b
    if a.constant is None or b.constant is None or not condition.then.is_constant:
        raise NotByPosition
    then, other = (a.constant if number else b.constant for number in (condition.then.constant, condition.other))
    return Positional(condition.conditions, Affine(_cast(then, dtype), (0,) * len(shape)), _cast(other, dtype))


def _and(shape: Shape, dtype: torch.dtype, a: Any, b: Any) -> Positional:
    if not all(isinstance(value, Operand) and value.dtype is torch.bool for value in (a, b)):
        raise NotByPosition
    left, right = _as_truth(_broadcast(a, shape)), _as_truth(_broadcast(b, shape))
    for one, two in ((left, right), (right, left)):
        if one.constant is not None:
            return two if one.constant else _constant(0, shape)
    return Positional(left.conditions | right.conditions, left.then, 0)


def _as_truth(value: Positional) -> Positional:
    """Return a tensor of truths as one that is 1 where all conditions hold, and 0 elsewhere."""
    if value.constant is None and (value.then.constant, value.other) != (1, 0):
        value = flipped(value)
        if (value.then.constant, value.other) != (1, 0):
            raise NotByPosition
    return value


def _not(shape: Shape, dtype: torch.dtype, x: Operand) -> Positional:
    if x.dtype is not torch.bool:
        raise NotByPosition
    return _of_numbers(operator.not_)(shape, dtype, x)


def _masked_fill(shape: Shape, dtype: torch.dtype, x: Any, mask: Any, value: Any) -> Positional:
    return _where(shape, dtype, mask, value, x)


def _triangle(sign: int) -> Callable[..., Positional]:
    """Return the rule of ``triu`` or ``tril``."""

    def rule(shape: Shape, dtype: torch.dtype, x: Operand, diagonal: Number = 0) -> Positional:
        slopes = (*(0,) * (len(shape) - 2), -sign, sign)
        kept = Positional(frozenset([Affine(-sign * diagonal, slopes)]), Affine(1, (0,) * len(shape)), 0)
        if x.holds.constant is None and dtype is torch.bool:
            return _and(shape, dtype, x, Operand(kept, shape, dtype))
        return _where(shape, dtype, Operand(kept, shape, dtype), x, 0)

    return rule


def _cumsum(shape: Shape, dtype: torch.dtype, x: Operand, dim: int) -> Positional:
    if (each := x.holds.constant) is None or not _counts(dtype) or not shape:
        raise NotByPosition
    each = _cast(each, dtype)
    slopes = [0] * len(shape)
    slopes[dim] = each
    return Positional(frozenset(), Affine(each, tuple(slopes)))


# -- making ------------------------------------------------------------------------------------------------------------


def _arange(shape: Shape, dtype: torch.dtype, *bounds: Number) -> Positional:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    if any(isinstance(number, float) for number in (start, step)) or not _counts(dtype):
        raise NotByPosition
    return Positional(frozenset(), Affine(start, (step,)))


def _full(shape: Shape, dtype: torch.dtype, *args: Any) -> Positional:
    return _constant(_cast(args[-1], dtype), shape)


def _filled(number: int) -> Callable[..., Positional]:
    return lambda shape, dtype, *_: _constant(_cast(number, dtype), shape)


# -- views -------------------------------------------------------------------------------------------------------------


def _same(shape: Shape, dtype: torch.dtype, x: Operand, *_: Any) -> Positional:
    if x.holds.conditions or x.holds.then.is_constant:
        return _of_numbers(lambda number: number)(shape, dtype, x)
    if not _counts(dtype):
        raise NotByPosition
    return x.holds


def _reshaped(shape: Shape, dtype: torch.dtype, x: Operand, *_: Any) -> Positional:
    """The rule of views that only add or remove dims of one element."""
    if x.dtype is not dtype:  # its bits are read as others
        raise NotByPosition
    if x.holds.constant is not None:
        return _constant(x.holds.constant, shape)
    before, after = [d for d, n in enumerate(x.shape) if n != 1], [d for d, n in enumerate(shape) if n != 1]
    if [x.shape[d] for d in before] != [shape[d] for d in after]:
        raise NotByPosition
    come_from = dict(zip(after, before, strict=True))
    return _rearranged(x.holds, [come_from.get(d) for d in range(len(shape))])


def _rearranged(value: Positional, dims: Sequence[int | None]) -> Positional:
    """Return a tensor with other dims. ``dims``: the old one of each; ``None`` for a new one."""
    return _each(value, lambda a: Affine(a.constant, tuple(0 if d is None else a.slopes[d] for d in dims)))


def _expand(shape: Shape, dtype: torch.dtype, x: Operand, *_: Any) -> Positional:
    return _broadcast(x, shape)


def _permute(shape: Shape, dtype: torch.dtype, x: Operand, dims: Sequence[int]) -> Positional:
    return _rearranged(x.holds, [d % len(shape) for d in dims])


def _transpose(shape: Shape, dtype: torch.dtype, x: Operand, a: int = 0, b: int = 1) -> Positional:
    dims = list(range(len(shape)))
    if len(dims) < 2:
        return x.holds
    dims[a], dims[b] = dims[b], dims[a]
    return _rearranged(x.holds, dims)


def _slice(shape: Shape, dtype: torch.dtype, x: Operand, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> Positional:  # fmt: skip
    first = _place(0 if start is None else start, x.shape[dim])

    def cut(affine: Affine) -> Affine:
        slopes = list(affine.slopes)
        slopes[dim] = slopes[dim] * step
        return Affine(affine.constant + affine.slopes[dim] * first, tuple(slopes))

    return _each(x.holds, cut)


def _select(shape: Shape, dtype: torch.dtype, x: Operand, dim: int, index: Number) -> Positional:
    at, dim = _place(index, x.shape[dim]), dim % len(x.shape)
    return _each(x.holds, lambda a: Affine(a.constant + a.slopes[dim] * at, (*a.slopes[:dim], *a.slopes[dim + 1 :])))


def _place(at: Number, size: Number) -> Number:
    """Return a position from the begin of a dim."""
    if not is_number(at):
        raise NotByPosition
    if at >= 0:
        return min(at, size) if is_number(size) else at
    return max(at + size, 0) if is_number(size) else at + size


def _cat(shape: Shape, dtype: torch.dtype, parts: Sequence[Operand], dim: int = 0) -> Positional:
    """Parts that go on as one: ``[-1]`` and ``[0, 1, 2]``."""
    if any(len(part.shape) != len(shape) for part in parts):  # an empty vector may be among them
        raise NotByPosition
    dim %= len(shape)
    offset: Number = 0
    pieces: list[tuple[Affine, bool]] = []  # each as it would go on to the begin of the result, and whether it is long
    for part in parts:
        affine = _affine(part.holds)
        pieces.append((Affine(affine.constant - affine.slopes[dim] * offset, affine.slopes), part.shape[dim] != 1))
        offset = offset + part.shape[dim]
    whole = next((piece for piece, is_long in pieces if is_long), None)
    if whole is None:
        raise NotByPosition
    offset = 0
    for (piece, is_long), part in zip(pieces, parts, strict=True):
        apart = piece.plus(whole, -1)
        if not is_long:  # its only element counts, and not its slope
            slopes = (*apart.slopes[:dim], 0, *apart.slopes[dim + 1 :])
            apart = Affine(apart.constant + apart.slopes[dim] * offset, slopes)
        if apart.constant != 0 or not apart.is_constant:
            raise NotByPosition
        offset = offset + part.shape[dim]
    return Positional(frozenset(), whole)


def _index(shape: Shape, dtype: torch.dtype, x: Operand, entries: Sequence[Operand | None]) -> Positional:
    """Entries that are one block of dims, or the only dims that are read."""
    places = [d for d, entry in enumerate(entries) if entry is not None]
    numbers = [entry for entry in entries if entry is not None]
    if any(entry.dtype is torch.bool for entry in numbers):
        raise NotByPosition
    rank = max(len(entry.shape) for entry in numbers)
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rest = [d for d in range(len(x.shape)) if d not in places]
    made = [*rest[:first], *[None] * rank, *rest[first:]]  # the dims of the result

    def at(affine: Affine) -> Affine:
        found = Affine(affine.constant, tuple(0 if d is None else affine.slopes[d] for d in made))
        for d, entry in zip(places, numbers, strict=True):
            index = _affine(entry.holds)
            if any(not is_number(part) or part < 0 for part in (index.constant, *index.slopes)):
                raise NotByPosition  # an index below 0 counts from the end
            block = (0,) * (rank - len(index.slopes)) + index.slopes
            whole = (*(0,) * first, *block, *(0,) * (len(made) - first - rank))
            found = found.plus(Affine(index.constant, whole), affine.slopes[d])
        return found

    return _each(x.holds, at)


RULES: Mapping[str, Callable[..., Positional]] = {
    "arange": _arange, "full": _full, "full_like": _full, "new_full": _full, "scalar_tensor": _full,
    "zeros": _filled(0), "zeros_like": _filled(0), "new_zeros": _filled(0),
    "ones": _filled(1), "ones_like": _filled(1), "new_ones": _filled(1),
    "add": _sum(1), "sub": _sum(-1), "mul": _product, "neg": _of_numbers(operator.neg),
    "rsub": _from,
    "ge": _is_least(lambda a, b: a.plus(b, -1)), "le": _is_least(lambda a, b: b.plus(a, -1)),
    "gt": _is_least(lambda a, b: _less_one(a.plus(b, -1))), "lt": _is_least(lambda a, b: _less_one(b.plus(a, -1))),
    "eq": _equal(True), "ne": _equal(False), "bitwise_and": _and, "logical_and": _and, "logical_not": _not,
    "bitwise_not": _not,
    "where": _where, "masked_fill": _masked_fill, "triu": _triangle(1), "tril": _triangle(-1), "cumsum": _cumsum,
    "_to_copy": _same, "clone": _same, "alias": _same, "detach": _same, "lift_fresh_copy": _same, "contiguous": _same,
    "view": _reshaped, "_unsafe_view": _reshaped, "reshape": _reshaped, "unsqueeze": _reshaped, "squeeze": _reshaped,
    "expand": _expand, "permute": _permute, "transpose": _transpose, "t": _transpose, "slice": _slice,
    "select": _select, "cat": _cat, "index": _index,
}  # fmt: skip


def _less_one(affine: Affine) -> Affine:
    return Affine(affine.constant - 1, affine.slopes)
