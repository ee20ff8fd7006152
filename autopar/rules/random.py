"""Shard random ops, as twins that take a seed and a stream (``autopar.ir.ops.seeded_random``).

Ranks with different pieces have different seeds. If the seed is a table of a single device's generator states, all
stays whole: its numbers have one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.ops.seeded_random import twin_of, with_seed
from autopar.rules.registry import RULES, Rule, op_name
from autopar.torch_private import op_named


def _alike(count: int = 1, results: int = 1) -> Callable[..., str]:
    """Return the pattern of an op that works element by element on operands that broadcast."""

    def bound(*args: Any, **_: Any) -> str:
        tensors = [a for a in args if hasattr(a, "shape")][:count]
        ndim = max(len(t.shape) for t in tensors)
        shape = [max((t.shape[d] for t in tensors if len(t.shape) >= -d), default=1) for d in range(-ndim, 0)]
        sides = [
            " ".join(
                "1" if n == 1 != shape[d] else f"d{-d}" for d, n in zip(range(-len(t.shape), 0), t.shape, strict=True)
            )
            or "()"
            for t in tensors
        ]
        return f"{', '.join(sides)} -> {', '.join([' '.join(f'd{-d}' for d in range(-ndim, 0)) or '()'] * results)}"

    return bound


def _shaped(position: int) -> Callable[..., str]:
    return lambda *args, **_: "-> " + (" ".join(f"d{k}" for k in range(len(args[position]))) or "()")


def _multinomial(weights: Any, *_: Any) -> str:
    return "c! -> s!" if len(weights.shape) == 1 else "b c! -> b s!"


for pattern, ops, sizes in (
    (_alike(), "bernoulli bernoulli.p uniform normal_functional exponential random random.from random.to cauchy "
               "geometric log_normal "
               "rand_like randn_like randint_like randint_like.low_dtype poisson _standard_gamma "
               "normal.Tensor_float", {}),
    (_alike(2), "bernoulli.Tensor normal.Tensor_Tensor binomial", {}),
    (_alike(), "normal.float_Tensor", {}),
    (_alike(2, 2), "rrelu_with_noise_functional", {}),
    (_alike(1, 2), "native_dropout", {}),
    (_shaped(0), "rand randn", {0: "*"}),
    (_shaped(1), "randint", {1: "*"}),
    (_shaped(2), "randint.low normal.float_float", {2: "*"}),
    (lambda n, **_: "-> d!", "randperm", {}),
    (_multinomial, "multinomial", {}),
):  # fmt: skip
    for op in filter(None, map(op_named, ops.split())):
        twin = twin_of(op)
        RULES[twin] = Rule(op_name(twin), with_seed(pattern), sizes=sizes)
