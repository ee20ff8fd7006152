"""Build patterns from the dims of a call's tensors: dims that stay whole, are removed, or change their size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{k}" for k in range(count)]


def wholes(count: int, prefix: str = "w") -> str:
    """Return the factors of dims that stay whole: ``w0! w1!``."""
    return " ".join(f"{name}!" for name in names(count, prefix))


def tensor(dims: Iterable[str]) -> str:
    """Return one tensor of a pattern."""
    return " ".join(dims) or "()"


def ndim(like: Any) -> int:
    """Return the number of dims of a tensor, or of the tensor that a list of sizes describes."""
    return len(like.shape) if hasattr(like, "shape") else len(like)


def argument(args: Sequence[Any], kwargs: dict[str, Any], where: int | str, default: Any = None) -> Any:
    """Return a call's argument, named by its position or its keyword."""
    return kwargs.get(where, default) if isinstance(where, str) else args[where] if len(args) > where else default


def chosen(dims: int | Sequence[int] | None, count: int) -> set[int]:
    """Return the dims that an argument names; ``None`` stands for all dims."""
    return (
        {d % count for d in ([dims] if isinstance(dims, int) else range(count) if dims is None else dims)}
        if count
        else set()
    )


_WORDS = re.compile(r"\b(open|whole|part|gone|kept|ones)\b")


def along(
    sides: str, dim: int | str, *, default: Any = None, keep: int | str | None = None, of: int = 0
) -> Callable[..., str]:
    """Return the pattern of an op that acts on one dim or several; each side is a list of words, one for each tensor.

    ======  ==================================================================
    open    the named dims can be split, like the others
    whole   the named dims stay whole
    part    they stay whole too, and have another size
    gone    they are removed
    ones    they have size one
    kept    of a reduction: ``gone``, or ``ones`` where ``keep`` is true
    ======  ==================================================================

    Args:
        sides: as in ``"whole, part -> whole"``.
        dim: the argument that names dims, by position or keyword.
        default: the dims if the argument is missing; ``None`` means all.
        keep: the argument that says whether a reduction keeps its dims. With it, an empty list of dims means all dims.
        of: the argument that has these dims: a tensor or a list of sizes.
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
        return _WORDS.sub(lambda match: tensor(words[match[0]]), sides)

    pattern.__doc__ = f"``{sides}``, in the dims named by argument {dim}."
    return pattern


def all_whole(*operands: Any, results: str) -> str:
    """Return operands that stay whole, and ``results`` in the same words: ``a0! a1!``, ``b0!``."""
    sides = [tensor(f"{prefix}{k}!" for k in range(ndim(x))) for prefix, x in zip("abcdef", operands, strict=False)]
    return f"{', '.join(sides)} -> {results}"


def entire(results: Callable[..., str]) -> Callable[..., str]:
    """Return a pattern in which nothing is split; ``results`` are named as ``all_whole`` names them."""

    def pattern(*args: Any, **kwargs: Any) -> str:
        return all_whole(*(x for x in args if hasattr(x, "shape")), results=results(*args, **kwargs))

    pattern.__doc__ = "Nothing is split."
    return pattern


def sized(text: str, sizes: Callable[..., dict[str, int]]) -> Callable[..., tuple[str, dict[str, int]]]:
    """Return a pattern with factors whose sizes are given by arguments."""

    def pattern(*args: Any, **kwargs: Any) -> tuple[str, dict[str, int]]:
        return text, sizes(*args, **kwargs)

    pattern.__doc__ = f"``{text}``."
    return pattern


def broadcast(shape: Sequence[int], dims: Sequence[str], sizes: Sequence[int] = ()) -> str:
    """Return a tensor that broadcasts to ``dims``.

    It may lack leading dims, or have size one where ``dims`` are longer.
    """
    lead = len(dims) - len(shape)
    full = sizes or [0] * len(dims)
    return tensor("1" if n == 1 != full[lead + k] else dims[lead + k] for k, n in enumerate(shape))


def broadcasting(*shapes: Sequence[int], prefix: str = "d") -> tuple[list[str], list[str]]:
    """Return the dims that shapes broadcast to, and each tensor in these dims."""
    count = max(map(len, shapes))
    full = [max((s[d] for s in shapes if len(s) >= -d and s[d] != 1), default=1) for d in range(-count, 0)]
    dims = names(count, prefix)
    return dims, [broadcast(shape, dims, full) for shape in shapes]


def every(count: int) -> str:
    """Return the operands through which a sum passes jointly: ``0+1+2``."""
    return "+".join(map(str, range(count)))


def elements(x: Any, dim: int, index: Any) -> tuple[str, str]:
    """Return the factors of a tensor and of an index into one of its dims.

    If the index is shorter along a dim, that dim stays whole.
    """
    table, picked = [], []
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        same = n == m and k != dim % len(x.shape)
        table.append(f"d{k}" if same else f"v{k}!")
        picked.append(f"d{k}" if same else f"i{k}!")
    return tensor(table), tensor(picked)
