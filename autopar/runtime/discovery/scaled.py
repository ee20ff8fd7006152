"""Scale a call with large operands down to small calls, on which its rule can be discovered.

Equal sizes stay equal, and different sizes stay different. With 2 and 3 ranks each piece has at least 4 elements, so
that indices, which are below 4, are within any piece. A small call is used only if the sizes of its results are scaled
in the same way as those of the call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.record import TensorType
from autopar.torch_private import pytree

EVEN, ODD = 12, 15  # the smallest sizes; further ones are 4 and 2 apart
BELOW = 4  # the bound of whole numbers, which may be indices
FEW = 4  # replaces a number that may count heads or groups
COUNTS = 8  # the smallest such number; a smaller one may be the number of a dim
LARGEST = 1 << 18  # the most elements of a small call

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """One way to make a call small.

    Attributes:
        sizes: size of a dim → its small size.
        numbers: whole number among the arguments → its replacement.
    """

    sizes: Mapping[int, int]
    numbers: Mapping[int, int]

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        def small(value: Any) -> Any:
            if isinstance(value, TensorType):
                return TensorType(tuple(self.sizes.get(n, n) for n in value.shape), value.dtype)
            return self.numbers.get(value, value) if type(value) is int else value

        return pytree.tree_map(small, (tuple(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, TensorType))

    def fits(self, large: Sequence[TensorType | None], small: Sequence[torch.Tensor | None]) -> bool:
        """Return whether results are scaled as operands are: equal sizes stay equal, and different sizes different."""
        if [result is None for result in large] != [result is None for result in small]:
            return False
        for theirs, ours in zip(large, small, strict=True):
            if theirs is None or ours is None:
                continue
            if len(theirs.shape) != ours.dim():
                return False
            for n, m in zip(theirs.shape, ours.shape, strict=True):
                if m != self.sizes[n] if n in self.sizes else m in self.sizes.values() or (n == 1) != (m == 1):
                    return False
        return True

    def odd(self) -> Scale:
        """Return a scale with other small sizes, which are odd."""
        values = itertools.count(ODD, 2)
        sizes = {n: m if n == m else next(values) for n, m in self.sizes.items()}
        return Scale(sizes, {n: sizes[n] if n != m == self.sizes.get(n) else m for n, m in self.numbers.items()})


def scales(args: Sequence[Any], kwargs: Mapping[str, Any], *, related: bool = False) -> list[Scale]:
    """Return ways to scale a call down, the better ones first.

    The last one is the call itself, if it is small enough; else the one in which numbers are small too, because a
    number may be a threshold along a dim.

    Args:
        related: whether sizes that may be products or multiples of other sizes stay so in the first scales; else in
            later ones.
    """
    leaves = _leaves(args, kwargs)
    types = [leaf for leaf in leaves if isinstance(leaf, TensorType)]
    sizes = list(dict.fromkeys(n for type in types for n in type.shape if n > 1))
    numbers = {leaf: leaf for leaf in leaves if type(leaf) is int}
    plain = dict(zip(sizes, itertools.count(EVEN, 2)))
    first = {type.shape[0] for type in types if type.shape}
    counted = {n: FEW for n in numbers if n >= COUNTS and n not in sizes}
    candidates: list[Scale] = []
    for small in (_with_products(sizes), plain) if related else (plain, _with_products(sizes)):
        following = {n: small[n] for n in numbers if n in small}
        candidates += [Scale(small, numbers), Scale(small, {**numbers, **following})]
    multiples = dict(zip(sizes, itertools.count(EVEN, FEW)))
    candidates += [Scale(multiples, {**numbers, **{n: multiples[n] for n in numbers if n in multiples}, **counted})]
    if _safe(types):
        candidates += [
            Scale({n: plain[n] if n in first else n for n in sizes}, numbers),
            Scale({n: n for n in sizes}, numbers),
        ]
    distinct = {(tuple(scale.sizes.items()), tuple(scale.numbers.items())): scale for scale in candidates}
    return [
        scale
        for scale in distinct.values()
        if sum(math.prod(scale.sizes.get(n, n) for n in type.shape) for type in types) <= LARGEST
    ]


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return pytree.tree_leaves((tuple(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, TensorType))


def _safe(types: Sequence[TensorType]) -> bool:
    """Return whether dims may keep their sizes: otherwise an index might be outside of a piece.

    Not every kernel checks its indices.
    """
    indices = any(
        not (type.dtype.is_floating_point or type.dtype.is_complex or type.dtype == torch.bool) for type in types
    )
    return not indices or all(n >= EVEN or n == 1 for type in types for n in type.shape)


def _with_products(sizes: Sequence[int]) -> dict[int, int]:
    """Scale sizes so that a product of two sizes, a multiple of a size, or a size plus one stays so."""
    small: dict[int, int] = {}
    unused_sizes = itertools.count(EVEN, 4)
    for n in sorted(sizes):
        pair = next(((p, q) for p, q in itertools.combinations_with_replacement(small, 2) if p * q == n), None)
        before = small.get(n - 1)
        factor = next((p for p in reversed(small) if n % p == 0), None)
        if pair is not None:
            small[n] = small[pair[0]] * small[pair[1]]
        elif before is not None:
            small[n] = before + 1
        elif factor is not None:
            small[n] = n // factor * small[factor]
        else:
            small[n] = next(unused_sizes)
    return small


# -- values ------------------------------------------------------------------------------------------------------


Fill = Callable[[Sequence[int], int, torch.Generator], torch.Tensor]  # whole numbers below the second argument; 0: any


def _normal(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    if not below:
        return torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.randint(below, shape, generator=random)


def _shares(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    """Fill with numbers in (0, 1); one index is above all others, one boolean is true."""
    if not below:
        return torch.rand(shape, generator=random, dtype=torch.float64) * 0.9 + 0.05
    return _but_one(shape, 0, below - 1, random)


def _wide(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    """Fill with large numbers, one by far the largest; one index is below all others, one boolean is false."""
    if not below:
        return _but_one(shape, torch.randn(shape, generator=random, dtype=torch.float64) * 50, 1e4, random)
    return _but_one(shape, below - 1, 0, random)


def _but_one(shape: Sequence[int], most: Any, exception: float, random: torch.Generator) -> torch.Tensor:
    filled = most if isinstance(most, torch.Tensor) else torch.full(shape, most)
    if filled.numel():
        filled.view(-1)[int(torch.randint(filled.numel(), (), generator=random))] = exception
    return filled


def _with_one(exception: float) -> Fill:
    """Return a fill with one such number: what an op does then, each piece must do, too."""

    def fill(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
        values = _normal(shape, below, random)
        return values if below else _but_one(shape, values, exception, random)

    return fill


def _zeros(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long if below else torch.float64)


FILLS: tuple[Fill, ...] = (_normal, _shares, _wide)
REACTED_TO: tuple[Fill, ...] = (_with_one(math.inf), _with_one(math.nan), _with_one(1e38), _zeros)


def drawn(call: Arguments, fill: Fill) -> Arguments:
    """Return a call with real tensors, the same in every process.

    Floats have double precision; other dtypes are unchanged.
    """
    random = torch.Generator().manual_seed(0)
    # such a number may be the number of classes
    below = min([BELOW, *(leaf for leaf in _leaves(*call) if type(leaf) is int and leaf > 1)])

    def draw(value: Any) -> Any:
        return _drawn(value, fill, below, random) if isinstance(value, TensorType) else value

    return pytree.tree_map(draw, call, is_leaf=lambda value: isinstance(value, TensorType))


def _drawn(type: TensorType, fill: Fill, below: int, random: torch.Generator) -> torch.Tensor:
    if type.dtype.is_complex:
        return torch.complex(*(fill(type.shape, 0, random) for _ in range(2)))
    if type.dtype.is_floating_point:
        return fill(type.shape, 0, random)
    return fill(type.shape, 2 if type.dtype == torch.bool else below, random).to(type.dtype)
