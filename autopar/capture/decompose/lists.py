"""Decompose ops on lists of tensors into ops on tensors, because each tensor has its own Layout.

``_foreach_add(xs, ys)`` becomes ``[add(x, y), …]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.torch_private import OpOverload, op_named, present

UNARY = """
    abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 max neg reciprocal
    round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
"""
# list op → the op on one tensor, if the other operand is a list of tensors; one number or a list of numbers; one tensor
BINARY: dict[str, tuple[str, str, str | None]] = {
    **{op: (f"{op}.Tensor", f"{op}.Scalar", f"{op}.Tensor") for op in ("add", "div", "mul")},
    "sub": ("sub.Tensor", "sub.Scalar", None),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar", None),
    "clamp_max": ("clamp_max.Tensor", "clamp_max", None),
    "clamp_min": ("clamp_min.Tensor", "clamp_min", None),
    "minimum": ("minimum", "clamp_max", None),
    "maximum": ("maximum", "clamp_min", None),
}


def _each(op: OpOverload, lists: int) -> Callable[..., list[Any]]:
    """Apply the op to each position of the first ``lists`` arguments; the other arguments are the same for all."""

    def apart(*args: Any, **kwargs: Any) -> list[Any]:
        return [op(*row, *args[lists:], **kwargs) for row in zip(*args[:lists], strict=True)]

    return apart


def _with_value(op: OpOverload) -> Callable[..., list[Any]]:
    """Apply ``addcmul(x, y, z, value=v)`` to each position; ``value`` is one number or a list of numbers."""

    def apart(x: Sequence[Any], y: Sequence[Any], z: Sequence[Any], value: Any = 1) -> list[Any]:
        values = value if isinstance(value, (list, tuple)) else [value] * len(x)
        return [op(*row[:3], value=row[3]) for row in zip(x, y, z, values, strict=True)]

    return apart


def _lists() -> dict[OpOverload, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {op: _each(op_named(op), 1) for op in UNARY.split()}
    for name, (of_lists, of_number, of_tensor) in BINARY.items():
        table[f"{name}.List"] = _each(op_named(of_lists), 2)
        table[f"{name}.Scalar"] = _each(op_named(of_number), 1)
        table[f"{name}.ScalarList"] = _each(op_named(of_number), 2)
        if of_tensor:
            table[f"{name}.Tensor"] = _each(op_named(of_tensor), 1)
    for name in ("addcmul", "addcdiv"):
        table[f"{name}.Scalar"] = table[f"{name}.ScalarList"] = _with_value(op_named(name))
    table["lerp.List"] = _each(op_named("lerp.Tensor"), 3)
    table["lerp.Scalar"] = _each(op_named("lerp.Scalar"), 2)
    table["lerp.ScalarList"] = _each(op_named("lerp.Scalar"), 3)
    table["copy"] = _each(op_named("copy"), 2)
    power, norm = op_named("pow.Scalar"), op_named("linalg_vector_norm")
    table["pow.ScalarAndTensor"] = lambda base, exponents: [power(base, x) for x in exponents]
    table["norm.Scalar"] = lambda xs, order=2, dtype=None: [norm(x, order, dtype=dtype) for x in xs]
    return present({op_named(f"_foreach_{name}"): apart for name, apart in table.items()})


LISTS = _lists()
