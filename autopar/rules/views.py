"""Ops that only regroup or reorder elements: pending values may wait through them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.rules.registry import rule


def names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{k}" for k in range(count)]


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
    return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims) or "()"


def _view(x, size, *_, **__) -> tuple[str, dict[str, int]]:
    known = math.prod(n for n in size if n != -1)
    return regroup(x.shape, [math.prod(x.shape) // known if n == -1 and known else max(n, 0) for n in size])


rule(_view, "view _unsafe_view reshape", linear="0", sizes={1: "*"}, view=True)


def _reordered(order):
    def bound(x, *args, **_) -> str:
        dims = names(len(x.shape))
        moved = order(list(dims), *args)
        return f"{' '.join(dims) or '()'} -> {' '.join(moved) or '()'}"

    return bound


def _swap(dims: list[str], a: int, b: int) -> list[str]:
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


rule(_reordered(lambda dims: dims[::-1]), "t", linear="0", view=True)
rule(_reordered(_swap), "transpose.int", linear="0", view=True)
rule(_reordered(lambda dims, order: [dims[k] for k in order]), "permute", linear="0", view=True)


def _unsqueeze(x, dim: int) -> str:
    dims = names(len(x.shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "1")
    return f"{' '.join(dims) or '()'} -> {' '.join(new)}"


def _squeeze(x, dims: int | Sequence[int] | None = None) -> str:
    """A dim that is not of size one is left alone, so it stays whole: a piece of it might be of size one."""
    ndim = len(x.shape)
    chosen = {d % ndim for d in (range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims) if ndim}
    gone = {d for d in chosen if x.shape[d] == 1}
    old = ["1" if d in gone else f"d{d}" + "!" * (d in chosen) for d in range(ndim)]
    return f"{' '.join(old) or '()'} -> {' '.join(n for d, n in enumerate(old) if d not in gone) or '()'}"


rule(_unsqueeze, "unsqueeze", linear="0", view=True)
rule(_squeeze, "squeeze squeeze.dim squeeze.dims", linear="0", view=True)


def _expand(x, size, **_) -> str:
    new = [f"d{k}" for k in range(len(size))]
    offset = len(size) - len(x.shape)
    old = ["1" if n == 1 and size[offset + k] not in (1, -1) else new[offset + k] for k, n in enumerate(x.shape)]
    return f"{' '.join(old) or '()'} -> {' '.join(new) or '()'}"


rule(_expand, "expand", linear="0", sizes={1: "*"}, view=True)


def _kept_whole(x, dim: int = 0, *_, **__) -> str:
    """A part of one dim is taken: the others come apart."""
    dims = names(len(x.shape))
    new = list(dims)
    dims[dim], new[dim] = "whole!", "part!"
    return f"{' '.join(dims)} -> {' '.join(new)}"


def _select(x, dim: int, index: int) -> str:
    dims = names(len(x.shape))
    dims[dim] = "whole!"
    return f"{' '.join(dims)} -> {' '.join(d for d in dims if d != 'whole!') or '()'}"


rule(_kept_whole, "slice.Tensor", linear="0", view=True)
rule(_select, "select.int", linear="0", view=True)


def _cat(tensors, dim: int = 0) -> str:
    """Equal pieces lie behind each other: ``d, d, d -> (pieces! d)``; others stay whole."""
    shapes = [t.shape for t in tensors]
    equal = len({shape[dim] for shape in shapes}) == 1
    rows = []
    for k, shape in enumerate(shapes):
        dims = names(len(shape))
        dims[dim] = dims[dim] if equal else f"piece{k}!"
        rows.append(" ".join(dims))
    joined = names(len(shapes[0]))
    joined[dim] = f"(pieces! {joined[dim]})" if equal else "all!"
    return f"{', '.join(rows)} -> {' '.join(joined)}"


rule(_cat, "cat", linear=lambda tensors, dim=0: "+".join(map(str, range(len(tensors)))))


def _stack(tensors, dim: int = 0) -> str:
    dims = names(len(tensors[0].shape))
    new = list(dims)
    new.insert(dim % (len(dims) + 1), "stacked!")
    return f"{', '.join([' '.join(dims) or '()'] * len(tensors))} -> {' '.join(new)}"


rule(_stack, "stack", linear=lambda tensors, dim=0: "+".join(map(str, range(len(tensors)))))


def _split(x, sizes: Sequence[int], dim: int = 0) -> tuple[str, dict[str, int]]:
    """Equal parts come apart, each by itself: ``(parts! d) -> d, d, d``, as a fused qkv does; others stay whole."""
    dims = names(len(x.shape))
    equal = len({*sizes}) == 1
    parts = [list(dims) for _ in sizes]
    for k, part in enumerate(parts):
        part[dim] = part[dim] if equal else f"part{k}!"
    dims[dim] = f"(parts! {dims[dim]})" if equal else "whole!"
    return f"{' '.join(dims)} -> {', '.join(map(' '.join, parts))}", {"parts": len(sizes)} if equal else {}


def _split_sizes(args: Sequence, shape: Sequence[int]) -> list[int]:
    sizes, dim = args[1], args[2] if len(args) > 2 else 0
    return [shape[dim]] * len(sizes) if len({*sizes}) == 1 else sizes


def _unbind(x, dim: int = 0) -> str:
    dims = names(len(x.shape))
    dims[dim] = "whole!"
    return f"{' '.join(dims)} -> {', '.join([' '.join(d for d in dims if d != 'whole!') or '()'] * x.shape[dim])}"


rule(_split, "split_with_sizes", linear="0", sizes={1: _split_sizes}, view=True)
rule(_unbind, "unbind.int", linear="0", view=True)


def _placed_back(keep: bool):
    """The backward of taking a part of one dim: zeros, and the part in its place."""

    def bound(gradient, shape, dim: int, *_) -> str:
        dims = names(len(shape))
        dims[dim] = "part!"
        part = " ".join(d for d in dims if keep or d != "part!") or "()"
        return f"{part} -> {' '.join(dims).replace('part!', 'whole!')}"

    return bound


rule(_placed_back(keep=True), "slice_backward", linear="0", sizes={1: "*"})
rule(_placed_back(keep=False), "select_backward", linear="0", sizes={1: "*"})


def _into_part(x, source, dim: int = 0, *_, keep: bool = True) -> str:
    """A part of one dim is written over."""
    dims = names(len(x.shape))
    dims[dim] = "whole!"
    part = " ".join("part!" if d == "whole!" else d for d in dims if keep or d != "whole!") or "()"
    return f"{' '.join(dims)}, {part} -> {' '.join(dims)}"


rule(_into_part, "slice_scatter", linear="0+1")
rule(lambda x, source, dim, index: _into_part(x, source, dim, keep=False), "select_scatter", linear="0+1")


def _repeat(x, repeats) -> tuple[str, dict[str, int]]:
    """Each dim is repeated as a whole: its repetitions are the major half of the result's."""
    dims = names(len(x.shape))
    new = names(len(repeats), "r")
    extra = len(new) - len(dims)
    joined = [f"{r}!" if k < extra else f"({r}! {dims[k - extra]})" for k, r in enumerate(new)]
    return f"{' '.join(dims) or '()'} -> {' '.join(joined) or '()'}", dict(zip(new, repeats, strict=True))


rule(_repeat, "repeat", linear="0")


def _some_whole(x, dims: Sequence[int]) -> str:
    one = " ".join(d + "!" * (k in {n % len(x.shape) for n in dims}) for k, d in enumerate(names(len(x.shape)))) or "()"
    return f"{one} -> {one}"


rule(_some_whole, "flip", linear="0", view=True)
rule(lambda x, shifts, dims=(): _some_whole(x, dims or range(len(x.shape))), "roll", linear="0", view=True)
rule(lambda x, *_: _some_whole(x, (-2, -1)), "tril triu", linear="0")


def _padded(x, pad: Sequence[int], *_) -> str:
    """``pad`` lists (before, after) from the last dim backwards; what is padded stays whole."""
    dims = names(len(x.shape))
    new = list(dims)
    for k in range(len(pad) // 2):
        if pad[2 * k] or pad[2 * k + 1]:
            dims[-1 - k], new[-1 - k] = f"whole{k}!", f"padded{k}!"
    return f"{' '.join(dims)} -> {' '.join(new)}"


rule(_padded, "constant_pad_nd", linear=lambda x, pad, value=0: "" if value else "0")


def _diagonal_dims(ndim: int, offset: int = 0, dim1: int = 0, dim2: int = 1) -> tuple[str, str]:
    dims = names(ndim)
    dims[dim1], dims[dim2] = "rows!", "columns!"
    return " ".join(dims), " ".join([d for d in dims if not d.endswith("!")] + ["diagonal!"])


def _diagonal(x, *where: int) -> str:
    square, diagonal = _diagonal_dims(len(x.shape), *where)
    return f"{square} -> {diagonal}"


def _diagonal_backward(gradient, shape, *where: int) -> str:
    square, diagonal = _diagonal_dims(len(shape), *where)
    return f"{diagonal} -> {square}"


rule(_diagonal, "diagonal", linear="0", view=True)
rule(_diagonal_backward, "diagonal_backward", linear="0", sizes={1: "*"})
