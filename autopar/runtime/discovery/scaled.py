"""Scaled: small calls in the place of one with large operands, to learn from them what holds of it.

Equal sizes stay equal, different ones different. Sizes are such that over 2 and 3 ranks no piece has less than 4 elements:
indices, which are below 4, are within any piece. A small call counts only if its results have the sizes that those of the
call itself would have.
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
BELOW = 4  # whole numbers, which may be indices
FEW = 4  # what takes the place of a number that may count heads or groups
COUNTS = 8  # the smallest of such numbers; a smaller one may be the number of a dim
LARGEST = 1 << 18  # elements of a small call

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """One way to make a call small.

    Attributes:
        sizes: of dims, the real ones → small ones.
        numbers: whole numbers among the arguments → what stands for them.
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
        """Whether results are scaled as operands are: equal sizes are equal, and others are not."""
        if [one is None for one in large] != [one is None for one in small]:
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
        """Other small sizes, which are odd."""
        values = itertools.count(ODD, 2)
        sizes = {n: m if n == m else next(values) for n, m in self.sizes.items()}
        return Scale(sizes, {n: sizes[n] if n != m == self.sizes.get(n) else m for n, m in self.numbers.items()})


def scales(args: Sequence[Any], kwargs: Mapping[str, Any], *, related: bool = False) -> list[Scale]:
    """Ways to make a call small, the better ones first.

    The last one is the call itself, if it is small enough; else the one where numbers are small too: any of them may be a
    threshold along a dim.

    Args:
        related: what may be the product of sizes, or a multiple of one, stays so; else that comes second.
    """
    leaves = _leaves(args, kwargs)
    types = [leaf for leaf in leaves if isinstance(leaf, TensorType)]
    sizes = list(dict.fromkeys(n for type in types for n in type.shape if n > 1))
    numbers = {leaf: leaf for leaf in leaves if type(leaf) is int}
    plain = dict(zip(sizes, itertools.count(EVEN, 2)))
    first = {type.shape[0] for type in types if type.shape}
    counted = {n: FEW for n in numbers if n >= COUNTS and n not in sizes}
    found: list[Scale] = []
    for small in (_with_products(sizes), plain) if related else (plain, _with_products(sizes)):
        following = {n: small[n] for n in numbers if n in small}
        found += [Scale(small, numbers), Scale(small, {**numbers, **following})]
    multiples = dict(zip(sizes, itertools.count(EVEN, FEW)))
    found += [Scale(multiples, {**numbers, **{n: multiples[n] for n in numbers if n in multiples}, **counted})]
    if _safe(types):
        found += [Scale({n: plain[n] if n in first else n for n in sizes}, numbers), Scale({n: n for n in sizes}, numbers)]
    distinct = {(tuple(scale.sizes.items()), tuple(scale.numbers.items())): scale for scale in found}
    return [scale for scale in distinct.values() if sum(math.prod(scale.sizes.get(n, n) for n in type.shape) for type in types) <= LARGEST]


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return pytree.tree_leaves((tuple(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, TensorType))


def _safe(types: Sequence[TensorType]) -> bool:
    """Whether dims may keep their sizes: an index might else be outside of a piece, and not every kernel looks."""
    indices = any(not (type.dtype.is_floating_point or type.dtype.is_complex or type.dtype == torch.bool) for type in types)
    return not indices or all(n >= EVEN or n == 1 for type in types for n in type.shape)


def _with_products(sizes: Sequence[int]) -> dict[int, int]:
    """What is the product of two sizes, a multiple of one or one more than one, stays so."""
    found: dict[int, int] = {}
    rest = itertools.count(EVEN, 4)
    for n in sorted(sizes):
        pair = next(((p, q) for p, q in itertools.combinations_with_replacement(found, 2) if p * q == n), None)
        before = found.get(n - 1)
        factor = next((p for p in reversed(found) if n % p == 0), None)
        if pair is not None:
            found[n] = found[pair[0]] * found[pair[1]]
        elif before is not None:
            found[n] = before + 1
        elif factor is not None:
            found[n] = n // factor * found[factor]
        else:
            found[n] = next(rest)
    return found


# -- values ------------------------------------------------------------------------------------------------------


Fill = Callable[[Sequence[int], int, torch.Generator], torch.Tensor]  # whole numbers below the second argument; 0: any


def _normal(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    if not below:
        return torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.randint(below, shape, generator=random)


def _shares(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    """Within (0, 1); one index is above all the others, one truth is true."""
    if not below:
        return torch.rand(shape, generator=random, dtype=torch.float64) * 0.9 + 0.05
    return _but_one(shape, 0, below - 1, random)


def _wide(shape: Sequence[int], below: int, random: torch.Generator) -> torch.Tensor:
    """Large, one by far the largest; one index is below all the others, one truth is false."""
    if not below:
        return _but_one(shape, torch.randn(shape, generator=random, dtype=torch.float64) * 50, 1e4, random)
    return _but_one(shape, below - 1, 0, random)


def _but_one(shape: Sequence[int], most: Any, one: float, random: torch.Generator) -> torch.Tensor:
    found = most if isinstance(most, torch.Tensor) else torch.full(shape, most)
    if found.numel():
        found.view(-1)[int(torch.randint(found.numel(), (), generator=random))] = one
    return found


FILLS: tuple[Fill, ...] = (_normal, _shares, _wide)


def drawn(call: Arguments, fill: Fill) -> Arguments:
    """A call with real tensors, the same ones in every process: numbers in double precision, whole ones as they are."""
    random = torch.Generator().manual_seed(0)
    below = min([BELOW, *(leaf for leaf in _leaves(*call) if type(leaf) is int and leaf > 1)])  # it may say how many there are

    def draw(value: Any) -> Any:
        return _drawn(value, fill, below, random) if isinstance(value, TensorType) else value

    return pytree.tree_map(draw, call, is_leaf=lambda value: isinstance(value, TensorType))


def _drawn(type: TensorType, fill: Fill, below: int, random: torch.Generator) -> torch.Tensor:
    if type.dtype.is_complex:
        return torch.complex(*(fill(type.shape, 0, random) for _ in range(2)))
    if type.dtype.is_floating_point:
        return fill(type.shape, 0, random)
    return fill(type.shape, 2 if type.dtype == torch.bool else below, random).to(type.dtype)
