"""The words of which patterns are made: the dims of a call's tensors, some of them whole, gone, or in another size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{k}" for k in range(count)]


def wholes(count: int, prefix: str = "w") -> str:
    """``w0! w1!``: dims that stay whole."""
    return " ".join(f"{name}!" for name in names(count, prefix))


def tensor(dims: Iterable[str]) -> str:
    """One tensor of a pattern."""
    return " ".join(dims) or "()"


def ndim(like: Any) -> int:
    """Of a tensor, or of the one that a list of sizes describes."""
    return len(like.shape) if hasattr(like, "shape") else len(like)


def argument(args: Sequence[Any], kwargs: dict[str, Any], where: int | str, default: Any = None) -> Any:
    """What a call gives for an argument, named by its position or its keyword."""
    return kwargs.get(where, default) if isinstance(where, str) else args[where] if len(args) > where else default


def chosen(dims: int | Sequence[int] | None, count: int) -> set[int]:
    """The dims that an argument names; ``None`` is all of them."""
    return {d % count for d in ([dims] if isinstance(dims, int) else range(count) if dims is None else dims)} if count else set()


_WORDS = re.compile(r"\b(open|whole|part|gone|kept|ones)\b")


def along(sides: str, dim: int | str, *, default: Any = None, keep: int | str | None = None, of: int = 0) -> Callable[..., str]:
    """The pattern of an op that does something to one dim, or some; each side is a word for one tensor.

    ======  ==================================================================
    open    the dims it names come apart as the others do
    whole   they stay whole
    part    they are whole too, in a size of their own
    gone    they are not there
    ones    they are of size one
    kept    of a reduction: ``gone``, or ``ones`` where ``keep`` is true
    ======  ==================================================================

    Args:
        sides: as in ``"whole, part -> whole"``.
        dim: the argument that names dims, by position or keyword.
        default: the dims where it is not given; ``None`` means all.
        keep: the argument that says whether a reduction keeps its dims. An empty list of dims means all there.
        of: the argument whose dims these are: a tensor or a list of sizes.
    """

    def pattern(*args: Any, **kwargs: Any) -> str:
        count = ndim(args[of])
        dims = argument(args, kwargs, dim, default)
        named = chosen(None if (keep is not None and dims == []) or dims == () else dims, count)
        words = {
            "open": names(count),
            "whole": [f"d{k}" + "!" * (k in named) for k in range(count)],
            "part": [f"p{k}!" if k in named else f"d{k}" for k in range(count)],
            "ones": ["1" if k in named else f"d{k}" for k in range(count)],
            "gone": [f"d{k}" for k in range(count) if k not in named],
        }
        words["kept"] = words["ones" if keep is not None and argument(args, kwargs, keep) else "gone"]
        return _WORDS.sub(lambda found: tensor(words[found[0]]), sides)

    pattern.__doc__ = f"``{sides}``, in the dims named by argument {dim}."
    return pattern


def all_whole(*given: Any, results: str) -> str:
    """Operands of which nothing comes apart, before ``results`` of the same words: ``a0! a1!``, ``b0!``."""
    sides = [tensor(f"{prefix}{k}!" for k in range(ndim(x))) for prefix, x in zip("abcdef", given, strict=False)]
    return f"{', '.join(sides)} -> {results}"


def entire(results: Callable[..., str]) -> Callable[..., str]:
    """Nothing comes apart; ``results`` are named as ``all_whole`` names them."""

    def pattern(*args: Any, **kwargs: Any) -> str:
        return all_whole(*(x for x in args if hasattr(x, "shape")), results=results(*args, **kwargs))

    pattern.__doc__ = "Nothing comes apart."
    return pattern


def sized(text: str, sizes: Callable[..., dict[str, int]]) -> Callable[..., tuple[str, dict[str, int]]]:
    """A pattern with factors whose sizes are given by arguments."""

    def pattern(*args: Any, **kwargs: Any) -> tuple[str, dict[str, int]]:
        return text, sizes(*args, **kwargs)

    pattern.__doc__ = f"``{text}``."
    return pattern


def broadcast(shape: Sequence[int], dims: Sequence[str], sizes: Sequence[int] = ()) -> str:
    """A tensor that broadcasts to ``dims``: leading ones may be missing, or ones of size one, where those are longer."""
    lead = len(dims) - len(shape)
    full = sizes or [0] * len(dims)
    return tensor("1" if n == 1 != full[lead + k] else dims[lead + k] for k, n in enumerate(shape))


def broadcasting(*shapes: Sequence[int], prefix: str = "d") -> tuple[list[str], list[str]]:
    """The dims that shapes broadcast to, and each of the tensors in them."""
    count = max(map(len, shapes))
    full = [max((s[d] for s in shapes if len(s) >= -d and s[d] != 1), default=1) for d in range(-count, 0)]
    dims = names(count, prefix)
    return dims, [broadcast(shape, dims, full) for shape in shapes]


def every(count: int) -> str:
    """``0+1+2``: operands through which a sum passes jointly."""
    return "+".join(map(str, range(count)))


def elements(x: Any, dim: int, index: Any) -> tuple[str, str]:
    """A tensor and an index into one of its dims. A dim along which the index is shorter is cut off, so it stays whole."""
    table, picked = [], []
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        same = n == m and k != dim % len(x.shape)
        table.append(f"d{k}" if same else f"v{k}!")
        picked.append(f"d{k}" if same else f"i{k}!")
    return tensor(table), tensor(picked)
