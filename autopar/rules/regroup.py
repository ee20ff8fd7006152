"""Build the patterns of views: the factors that two shapes of the same elements share, and dims that are moved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.ir.sizes import gcd
from autopar.rules.dims import chosen, names, ndim, tensor

Sized = tuple[str, dict[str, int]]


def regroup(old: Sequence[int], new: Sequence[int]) -> tuple[str, dict[str, int]]:
    """Return the factors that two shapes of the same elements share, major first.

    ``[4, 128, 64] → [512, 64]`` is ``a b c -> (a b) c``; ``[6, 4] → [4, 6]`` shares only a leading 2. Parts that do not
    divide evenly stay whole.
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
        elif (shared := gcd(a, b)) in (a, b) and shared > 1:
            factor(shared, left[i], right[j])
            a, b = a // shared, b // shared
        else:
            break
        if a == b == 1 and i == len(old) - 1 and j == len(new) - 1:
            break
    else:
        a = b = 1
    if (a, b) != (1, 1) or i < len(old) - 1 or j < len(new) - 1:
        if a and b and (shared := gcd(a, b)) > 1:
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
    """Dims are joined and split."""
    known = math.prod(n for n in size if n != -1)
    return regroup(x.shape, [math.prod(x.shape) // known if n == -1 and known else max(n, 0) for n in size])


def reordered(order: Callable[..., list[str]]) -> Callable[..., str]:
    """Return the pattern of an op that reorders dims: ``order`` returns their names in the new order."""

    def pattern(x, *args, **_) -> str:
        dims = names(len(x.shape))
        return f"{tensor(dims)} -> {tensor(order(list(dims), *args))}"

    pattern.__doc__ = "Dims change their order."
    return pattern


def swap(dims: list[str], a: int, b: int) -> list[str]:
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def unsqueeze(x, dim: int) -> str:
    """A dim of size one is inserted."""
    dims = names(len(x.shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "1")
    return f"{tensor(dims)} -> {tensor(new)}"


def squeeze(x, dims: int | Sequence[int] | None = None) -> str:
    """A named dim that is not of size one is kept, so it stays whole: a piece of it might have size one."""
    named = chosen(dims, len(x.shape))
    gone = {d for d in named if x.shape[d] == 1}
    old = ["1" if d in gone else f"d{d}" + "!" * (d in named) for d in range(len(x.shape))]
    return f"{tensor(old)} -> {tensor(n for d, n in enumerate(old) if d not in gone)}"


def expand(x, size: Sequence[int], **_) -> str:
    """A dim of size one becomes longer, and new leading dims are added."""
    new = names(len(size))
    offset = len(size) - len(x.shape)
    old = ("1" if n == 1 and size[offset + k] not in (1, -1) else new[offset + k] for k, n in enumerate(x.shape))
    return f"{tensor(old)} -> {tensor(new)}"


def cat(tensors, dim: int = 0) -> Sized:
    """Pieces are concatenated, in units of a common size: ``d, (piece! d) -> (units! d)``; other dims stay whole."""
    shapes = [t.shape for t in tensors]
    sizes = [shape[dim] for shape in shapes]
    unit = gcd(*sizes)
    rows, joined = [names(len(shape)) for shape in shapes], names(len(shapes[0]))
    name, counts = joined[dim], {}
    if len({*sizes}) > 1 and (unit < 2 or 0 in sizes):
        for k, row in enumerate(rows):
            row[dim] = f"piece{k}!"
        joined[dim] = "all!"
    else:
        counts = {"units": sum(sizes) // unit if unit else len(sizes)} | {
            f"piece{k}": n // unit for k, n in enumerate(sizes) if n != unit
        }
        for k, row in enumerate(rows):
            row[dim] = f"(piece{k}! {name})" if f"piece{k}" in counts else name
        joined[dim] = f"(units! {name})"
    return f"{', '.join(map(tensor, rows))} -> {tensor(joined)}", counts


def numbers(values, *_: object) -> str:
    """Return the pattern of a sum of numbers: ``(), () -> ()``."""
    return f"{', '.join(['()'] * len(values))} -> ()"


def stack(tensors, dim: int = 0) -> str:
    """A new dim is inserted, which stays whole."""
    dims = names(len(tensors[0].shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "stacked!")
    return f"{', '.join([tensor(dims)] * len(tensors))} -> {tensor(new)}"


def split(x, sizes: Sequence[int], dim: int = 0) -> Sized:
    """Each part is split by itself, in units of a common size.

    ``(units! d) -> d, (part! d)``, as in a fused qkv weight, also with fewer heads of keys; other parts stay whole.
    """
    dims, unit = names(len(x.shape)), gcd(*sizes)
    parts = [list(dims) for _ in sizes]
    name, counts = dims[dim], {}
    if unit == 0 or 0 in sizes or (unit == 1 < max(sizes)):
        for k, part in enumerate(parts):
            part[dim] = f"part{k}!"
        dims[dim] = "whole!"
    else:
        counts = {"units": sum(sizes) // unit} | {
            f"part{k}": size // unit for k, size in enumerate(sizes) if size != unit
        }
        for k, part in enumerate(parts):
            part[dim] = f"(part{k}! {name})" if f"part{k}" in counts else name
        dims[dim] = f"(units! {name})"
    return f"{tensor(dims)} -> {', '.join(map(tensor, parts))}", counts


def split_sizes(args: Sequence[Any], shape: Sequence[int], factors: Mapping[str, int]) -> Sequence[int]:
    """Return the sizes of the local parts."""
    sizes = args[1]
    if "units" not in factors:
        return sizes
    counts = [factors.get(f"part{k}", 1) for k in range(len(sizes))]
    local = shape[args[2] if len(args) > 2 else 0] // counts[0]
    return [count * local for count in counts]


def unbind(x, dim: int = 0) -> str:
    """A result for each index in one dim."""
    dims = names(len(x.shape))
    dims[dim] = "whole!"
    return f"{tensor(dims)} -> {', '.join([tensor(d for d in dims if d != 'whole!')] * x.shape[dim])}"


def repeat(x, repeats: Sequence[int]) -> Sized:
    """Each dim is repeated as a whole: the number of repetitions is the major part of the result's dim."""
    dims, new = names(len(x.shape)), names(len(repeats), "r")
    extra = len(new) - len(dims)
    joined = (f"{r}!" if k < extra else f"({r}! {dims[k - extra]})" for k, r in enumerate(new))
    return f"{tensor(dims)} -> {tensor(joined)}", dict(zip(new, repeats, strict=True))


def pad(x, amounts: Sequence[int], *_) -> str:
    """``amounts`` lists (before, after) from the last dim backwards; padded dims stay whole."""
    dims = names(len(x.shape))
    new = list(dims)
    for k in range(len(amounts) // 2):
        if amounts[2 * k] or amounts[2 * k + 1]:
            dims[-1 - k], new[-1 - k] = f"whole{k}!", f"padded{k}!"
    return f"{tensor(dims)} -> {tensor(new)}"


def diagonal(sides: str, of: int = 0, where: int = 1, more: int = 0, last: bool = False) -> Callable[..., str]:
    """Return the pattern of an op between a ``square`` and its ``diagonal``, which stay whole.

    Args:
        sides: as in ``"square -> diagonal"``.
        of: the argument with the dims of the square, except ``more`` of them.
        where: the position of the offset; the two dims are the next arguments.
        last: the two dims are by default the last ones, else the first ones.
    """

    def pattern(*args, **_) -> str:
        dims = names(ndim(args[of]) + more)
        given_dims = args[where + 1 : where + 3]
        dims_of_square: list[int] = [*given_dims, *((-2, -1) if last else (0, 1))[len(given_dims) :]]
        dim1, dim2 = dims_of_square
        dims[dim1], dims[dim2] = "rows!", "columns!"
        inner = [*(d for d in dims if not d.endswith("!")), "diagonal!"]
        return sides.replace("diagonal", tensor(inner)).replace("square", tensor(dims))

    pattern.__doc__ = f"``{sides}``."
    return pattern


def unfold(sides: str, of: int = 0) -> Callable[..., str]:
    """Return a pattern for windows of one dim, which may overlap.

    The number of windows replaces the dim, and their size is the last dim.
    """

    def pattern(*args, **_) -> str:
        dims = names(ndim(args[of]))
        new, dim = [*dims, "inside!"], args[of + 1]
        if dims:
            dims[dim], new[dim % len(dims)] = "whole!", "windows!"
        return sides.replace("windows", tensor(new)).replace("whole", tensor(dims), 1)

    pattern.__doc__ = f"``{sides}``: windows of one dim, which may overlap."
    return pattern


def turned(x, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    """A quarter turn swaps two dims, which stay whole."""
    old = [f"d{d}" + "!" * (d in chosen(dims, len(x.shape))) for d in range(len(x.shape))]
    return f"{tensor(old)} -> {tensor(swap(list(old), *dims) if k % 2 else old)}"


END = 2**62  # larger numbers stand for the end of a dim


def sliced(sides: str, first: int, of: int = 0):
    """Return the pattern of a slice: ``whole`` is the sliced dim, ``part`` the slice of it.

    Some of several equal parts, ``(parts! kept)``, or every so-many-th element, ``(kept parts!)``, can be split along
    what is kept; other slices stay whole.

    Args:
        first: the position of the arguments dim, start, end and step.
        of: the argument with these dims.
    """

    def pattern(*args, **_) -> tuple[str, dict[str, int]]:
        shape = getattr(args[of], "shape", args[of])
        bounds: list[Any] = [*args[first:], *(0, None, None, 1)[len(args) - first :]]
        dim, start, end, step = bounds
        size, last = shape[dim], end is None or end > END
        taken = range(size)[start:end:step]
        whole, part = names(len(shape)), names(len(shape))
        in_bounds = last or ((start or 0) >= 0 and 0 <= end <= size)
        # not of ``taken``, whose length is a number where that of the slice follows from symbols
        begin = start or 0
        begin = max(begin + size, 0) if begin < 0 else begin
        count = (size if last else end) - begin
        unit = gcd(size, begin, count) if in_bounds and taken and step == 1 else 0
        if in_bounds and len(taken) > 1 and step * len(taken) == size:
            whole[dim], part[dim] = "(kept parts!)", "kept"
            return _sides(sides, whole, part), {"parts": step}
        if in_bounds and unit > 1:
            several = count != unit
            whole[dim], part[dim] = "(parts! kept)", "(taken! kept)" if several else "kept"
            return _sides(sides, whole, part), {"parts": size // unit} | ({"taken": count // unit} if several else {})
        whole[dim], part[dim] = "whole!", "part!"
        return _sides(sides, whole, part), {}

    pattern.__doc__ = f"``{sides}``, a slice of one dim; one of several equal parts is split by itself."
    return pattern


def _sides(sides: str, whole: Sequence[str], part: Sequence[str]) -> str:
    return re.sub(r"\w+", lambda word: tensor(whole if word[0] == "whole" else part), sides)


def slice_bounds(first: int) -> dict[int, Callable[..., Any]]:
    """Return functions that compute start and end of a slice on a rank, for one of several equal parts."""

    def bound(args: Sequence[Any], factors: Mapping[str, int], which: int) -> Any:
        bounds: list[Any] = [*args[first + 1 :], *(None, None, 1)[len(args) - first - 1 :]]
        start, end, step = bounds
        value = (start, end)[which]
        if "kept" not in factors or step != 1 or value is None or value > END:
            return value
        taken = factors.get("taken", 1)
        place = factors["parts"] - taken if end is None or end > END else (start or 0) * taken // (end - (start or 0))
        return (place + which * taken) * factors["kept"]

    return {
        first + 1: lambda args, shape, factors: bound(args, factors, 0),
        first + 2: lambda args, shape, factors: bound(args, factors, 1),
    }
