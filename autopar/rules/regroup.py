"""The patterns of views: which factors two shapes of the same elements share, and what becomes of dims that are moved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.rules.dims import chosen, names, ndim, tensor

Sized = tuple[str, dict[str, int]]


def regroup(old: Sequence[int], new: Sequence[int]) -> tuple[str, dict[str, int]]:
    """The factors that two shapes of the same elements share, major first.

    ``[4, 128, 64] → [512, 64]`` is ``a b c -> (a b) c``; ``[6, 4] → [4, 6]`` shares only a leading 2, and what does
    not come apart evenly stays whole.
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in old]
    right: list[list[str]] = [[] for _ in new]

    def factor(size: int, *places: list[str], whole: bool = False) -> None:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for place in places:
            place.append(name + "!" * whole)

    i, j = 0, 0
    a, b = (old[0] if old else 1), (new[0] if new else 1)
    while i < len(old) and j < len(new):
        if a == 1 and i + 1 < len(old):
            i, a = i + 1, old[i + 1]
        elif b == 1 and j + 1 < len(new):
            j, b = j + 1, new[j + 1]
        elif (shared := math.gcd(a, b)) in (a, b) and shared > 1:
            factor(shared, left[i], right[j])
            a, b = a // shared, b // shared
        else:
            break
        if a == b == 1 and i == len(old) - 1 and j == len(new) - 1:
            break
    else:
        a = b = 1
    if (a, b) != (1, 1) or i < len(old) - 1 or j < len(new) - 1:
        if a and b and (shared := math.gcd(a, b)) > 1:
            factor(shared, left[i], right[j])
            a, b = a // shared, b // shared
        for side, sizes_left, place in ((left, [a, *old[i + 1 :]], i), (right, [b, *new[j + 1 :]], j)):
            for offset, size in enumerate(sizes_left):
                if size != 1 and place + offset < len(side):
                    factor(size, side[place + offset], whole=True)
    return f"{_side(left)} -> {_side(right)}", sizes


def _side(dims: list[list[str]]) -> str:
    return tensor("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)


def view(x, size: Sequence[int], *_, **__) -> Sized:
    """Dims are joined and taken apart."""
    known = math.prod(n for n in size if n != -1)
    return regroup(x.shape, [math.prod(x.shape) // known if n == -1 and known else max(n, 0) for n in size])


def reordered(order: Callable[..., list[str]]) -> Callable[..., str]:
    """Dims change places: ``order`` gives their names in the new one."""

    def pattern(x, *args, **_) -> str:
        dims = names(len(x.shape))
        return f"{tensor(dims)} -> {tensor(order(list(dims), *args))}"

    pattern.__doc__ = "Dims change places."
    return pattern


def swap(dims: list[str], a: int, b: int) -> list[str]:
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def unsqueeze(x, dim: int) -> str:
    """A dim of size one is put in."""
    dims = names(len(x.shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "1")
    return f"{tensor(dims)} -> {tensor(new)}"


def squeeze(x, dims: int | Sequence[int] | None = None) -> str:
    """A dim that is not of size one is left alone, so it stays whole: a piece of it might be of size one."""
    named = chosen(dims, len(x.shape))
    gone = {d for d in named if x.shape[d] == 1}
    old = ["1" if d in gone else f"d{d}" + "!" * (d in named) for d in range(len(x.shape))]
    return f"{tensor(old)} -> {tensor(n for d, n in enumerate(old) if d not in gone)}"


def expand(x, size: Sequence[int], **_) -> str:
    """A dim of size one becomes longer, and others are put before."""
    new = names(len(size))
    offset = len(size) - len(x.shape)
    old = ("1" if n == 1 and size[offset + k] not in (1, -1) else new[offset + k] for k, n in enumerate(x.shape))
    return f"{tensor(old)} -> {tensor(new)}"


def cat(tensors, dim: int = 0) -> Sized:
    """Pieces lie behind each other, in units that all are made of: ``d, (piece! d) -> (units! d)``; others stay whole."""
    shapes = [t.shape for t in tensors]
    sizes = [shape[dim] for shape in shapes]
    unit = math.gcd(*sizes)
    rows, joined = [names(len(shape)) for shape in shapes], names(len(shapes[0]))
    own, counts = joined[dim], {}
    if len({*sizes}) > 1 and (unit < 2 or 0 in sizes):
        for k, row in enumerate(rows):
            row[dim] = f"piece{k}!"
        joined[dim] = "all!"
    else:
        counts = {"units": sum(sizes) // unit if unit else len(sizes)} | {f"piece{k}": n // unit for k, n in enumerate(sizes) if n != unit}
        for k, row in enumerate(rows):
            row[dim] = f"(piece{k}! {own})" if f"piece{k}" in counts else own
        joined[dim] = f"(units! {own})"
    return f"{', '.join(map(tensor, rows))} -> {tensor(joined)}", counts


def stack(tensors, dim: int = 0) -> str:
    """A new dim, which stays whole, is put in."""
    dims = names(len(tensors[0].shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "stacked!")
    return f"{', '.join([tensor(dims)] * len(tensors))} -> {tensor(new)}"


def split(x, sizes: Sequence[int], dim: int = 0) -> Sized:
    """Parts come apart, each by itself, in units that all of them are made of: ``(units! d) -> d, (part! d)``, as a fused qkv
    does, with fewer heads of keys too; others stay whole."""
    dims, unit = names(len(x.shape)), math.gcd(*sizes)
    parts = [list(dims) for _ in sizes]
    own, counts = dims[dim], {}
    if unit == 0 or 0 in sizes or (unit == 1 < max(sizes)):
        for k, part in enumerate(parts):
            part[dim] = f"part{k}!"
        dims[dim] = "whole!"
    else:
        counts = {"units": sum(sizes) // unit} | {f"part{k}": size // unit for k, size in enumerate(sizes) if size != unit}
        for k, part in enumerate(parts):
            part[dim] = f"(part{k}! {own})" if f"part{k}" in counts else own
        dims[dim] = f"(units! {own})"
    return f"{tensor(dims)} -> {', '.join(map(tensor, parts))}", counts


def split_sizes(args: Sequence[Any], shape: Sequence[int], factors: Mapping[str, int]) -> Sequence[int]:
    """Of the local parts."""
    sizes = args[1]
    if "units" not in factors:
        return sizes
    counts = [factors.get(f"part{k}", 1) for k in range(len(sizes))]
    local = shape[args[2] if len(args) > 2 else 0] // counts[0]
    return [count * local for count in counts]


def unbind(x, dim: int = 0) -> str:
    """A result for each place in one dim."""
    dims = names(len(x.shape))
    dims[dim] = "whole!"
    return f"{tensor(dims)} -> {', '.join([tensor(d for d in dims if d != 'whole!')] * x.shape[dim])}"


def repeat(x, repeats: Sequence[int]) -> Sized:
    """Each dim is repeated as a whole: its repetitions are the major half of the result's."""
    dims, new = names(len(x.shape)), names(len(repeats), "r")
    extra = len(new) - len(dims)
    joined = (f"{r}!" if k < extra else f"({r}! {dims[k - extra]})" for k, r in enumerate(new))
    return f"{tensor(dims)} -> {tensor(joined)}", dict(zip(new, repeats, strict=True))


def pad(x, amounts: Sequence[int], *_) -> str:
    """``amounts`` lists (before, after) from the last dim backwards; what is padded stays whole."""
    dims = names(len(x.shape))
    new = list(dims)
    for k in range(len(amounts) // 2):
        if amounts[2 * k] or amounts[2 * k + 1]:
            dims[-1 - k], new[-1 - k] = f"whole{k}!", f"padded{k}!"
    return f"{tensor(dims)} -> {tensor(new)}"


def diagonal(sides: str, of: int = 0, where: int = 1, more: int = 0, last: bool = False) -> Callable[..., str]:
    """An op between a ``square`` and its ``diagonal``, which stay whole.

    Args:
        sides: as in ``"square -> diagonal"``.
        of: the argument whose dims, and ``more``, the square has.
        where: the position of the offset, which the two dims follow.
        last: the two dims are the last ones where they are not given.
    """

    def pattern(*args, **_) -> str:
        dims = names(ndim(args[of]) + more)
        given = args[where + 1 : where + 3]
        dim1, dim2 = (*given, *((-2, -1) if last else (0, 1))[len(given) :])
        dims[dim1], dims[dim2] = "rows!", "columns!"
        inner = [*(d for d in dims if not d.endswith("!")), "diagonal!"]
        return sides.replace("diagonal", tensor(inner)).replace("square", tensor(dims))

    pattern.__doc__ = f"``{sides}``."
    return pattern


def unfold(sides: str, of: int = 0) -> Callable[..., str]:
    """Windows of one dim, which may overlap: their number stands in its place, their size is the last dim."""

    def pattern(*args, **_) -> str:
        dims = names(ndim(args[of]))
        new, dim = [*dims, "inside!"], args[of + 1]
        if dims:
            dims[dim], new[dim % len(dims)] = "whole!", "windows!"
        return sides.replace("windows", tensor(new)).replace("whole", tensor(dims), 1)

    pattern.__doc__ = f"``{sides}``: windows of one dim, which may overlap."
    return pattern


def turned(x, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    """A quarter turn swaps two dims, and they stay whole."""
    old = [f"d{d}" + "!" * (d in chosen(dims, len(x.shape))) for d in range(len(x.shape))]
    return f"{tensor(old)} -> {tensor(swap(list(old), *dims) if k % 2 else old)}"


END = 2**62  # what stands for the end of a dim is larger


def sliced(sides: str, first: int, of: int = 0):
    """``whole``: the dim of which a part is taken; ``part``: that part. Some of equal parts, ``(parts! kept)``, or every
    so-many-th element, ``(kept parts!)``, come apart along what is kept; other parts stay whole.

    Args:
        first: where the arguments dim, start, end and step begin.
        of: the argument whose dims these are.
    """

    def pattern(*args, **_) -> tuple[str, dict[str, int]]:
        shape = getattr(args[of], "shape", args[of])
        dim, start, end, step = [*args[first:], *(0, None, None, 1)[len(args) - first :]]
        size, last = shape[dim], end is None or end > END
        taken = range(size)[start:end:step]
        whole, part = names(len(shape)), names(len(shape))
        told = last or ((start or 0) >= 0 and 0 <= end <= size)
        unit = math.gcd(size, taken[0], len(taken)) if taken and step == 1 else 0
        if told and len(taken) > 1 and step * len(taken) == size:
            whole[dim], part[dim] = "(kept parts!)", "kept"
            return _sides(sides, whole, part), {"parts": step}
        if told and unit > 1:
            several = len(taken) != unit
            whole[dim], part[dim] = "(parts! kept)", "(taken! kept)" if several else "kept"
            return _sides(sides, whole, part), {"parts": size // unit} | ({"taken": len(taken) // unit} if several else {})
        whole[dim], part[dim] = "whole!", "part!"
        return _sides(sides, whole, part), {}

    pattern.__doc__ = f"``{sides}``, where a part of one dim is taken; one of equal parts comes apart by itself."
    return pattern


def _sides(sides: str, whole: Sequence[str], part: Sequence[str]) -> str:
    return re.sub(r"\w+", lambda word: tensor(whole if word[0] == "whole" else part), sides)


def slice_bounds(first: int) -> dict[int, Callable[..., Any]]:
    """How start and end of a slice are told on a rank: of one of equal parts, those of its place."""

    def bound(args: Sequence[Any], factors: Mapping[str, int], which: int) -> Any:
        start, end, step = [*args[first + 1 :], *(None, None, 1)[len(args) - first - 1 :]]
        given = (start, end)[which]
        if "kept" not in factors or step != 1 or given is None or given > END:
            return given
        taken = factors.get("taken", 1)
        place = factors["parts"] - taken if end is None or end > END else (start or 0) * taken // (end - (start or 0))
        return (place + which * taken) * factors["kept"]

    return {
        first + 1: lambda args, shape, factors: bound(args, factors, 0),
        first + 2: lambda args, shape, factors: bound(args, factors, 1),
    }
