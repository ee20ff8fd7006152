"""Draw the operands of calls that rules are proven on: random tensors of many kinds, the same in every run."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.torch_private import pytree

Maker = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Operand:
    """A random tensor of a call: its shape and how its values are drawn."""

    shape: tuple[int, ...]
    draw: Maker


def F(*shape: int) -> Operand:
    """Floats on both sides of zero."""
    return Operand(shape, lambda s, g: 2 * torch.randn(s, dtype=torch.float64, generator=g))


def P(*shape: int) -> Operand:
    """Floats between 0.1 and 0.9: probabilities, and what logarithms and roots are taken of."""
    return Operand(shape, lambda s, g: 0.1 + 0.8 * torch.rand(s, dtype=torch.float64, generator=g))


def W(*shape: int, dtype: torch.dtype = torch.float32) -> Operand:
    """Whole numbers in a narrow dtype: sums of them are exact."""
    return Operand(shape, lambda s, g: torch.randint(-8, 9, s, generator=g).to(dtype))


def I(*shape: int, below: int = 9) -> Operand:  # noqa: E743
    """Integers, as indices."""
    return Operand(shape, lambda s, g: torch.randint(0, below, s, generator=g))


def B(*shape: int) -> Operand:
    """Booleans."""
    return Operand(shape, lambda s, g: torch.rand(s, generator=g) < 0.5)


def K(values: list[Any], dtype: torch.dtype | None = None) -> Operand:
    """These very values."""
    given = torch.tensor(values, dtype=dtype)
    return Operand(tuple(given.shape), lambda s, g: given.double() if given.is_floating_point() else given.clone())


Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = list[tuple[str, list[Call]]]  # names of ops in a text, and calls of each of them


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def made(spec: Call, op: str) -> Call:
    """The call with real tensors, the same ones in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(op.encode()))
    return pytree.tree_map_only(Operand, lambda o: o.draw(o.shape, generator), spec)


SHAPES = [(4, 5), (6,), (), (2, 3, 4), (2, 1, 3, 5), (1, 4)]  # 2 and 3: a rank has one element


def unary(draw: Callable[..., Operand], *rest: Any, **options: Any) -> list[Call]:
    return [call(draw(*shape), *rest, **options) for shape in SHAPES]
