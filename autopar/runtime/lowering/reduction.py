"""Reduce partial values with the results that torch has on one device, on backends that compute others.

* gloo adds bools as bytes: two of them make the byte 2, and 256 wrap to ``False``. So their sum is a maximum and their
  product a minimum.
* The maximum or minimum of a backend may drop a NaN that only some ranks have. Floats are compared as integers of the
  same order, in which NaN comes after all numbers.
* A dtype that a backend does not reduce is reduced in a wider one (``transfers.REDUCED_AS``); an average is a sum and a
  division.
* No backend multiplies complex numbers. Each rank gathers the factors and multiplies them
  (``collectives.start_product``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autopar.ir import transfers

# autopar's name → the name of torch.distributed
REDUCE = {"sum": "sum", "avg": "sum", "max": "max", "min": "min", "prod": "product"}
OF_BOOLS = {"sum": "max", "prod": "min"}
ORDERED = {torch.float32: torch.int32, torch.float64: torch.int64}  # floats → integers of their width

# functions, with their arguments after the tensor
Calls = tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...]


class Reduction(NamedTuple):
    """How one kind of partial value of one dtype is reduced.

    Attributes:
        op: the op of the collective.
        before: functions to call on the operand, in order.
        after: functions to call on the received value, in order.
    """

    op: str
    before: Calls = ()
    after: Calls = ()

    @staticmethod
    def of(kind: str, dtype: torch.dtype, ranks: int) -> Reduction:
        if dtype is torch.bool:
            kind = OF_BOOLS.get(kind, kind)
        wide = transfers.reduced_as(kind, dtype)
        cast: Calls = ((torch.Tensor.to, (wide,)),) if wide != dtype else ()
        back: Calls = ((torch.Tensor.to, (dtype,)),) if wide != dtype else ()
        if kind in ("max", "min") and wide in ORDERED:
            return Reduction(kind, (*cast, (as_ordered, (kind == "max",))), ((from_ordered, (wide,)), *back))
        return Reduction(REDUCE[kind], cast, (*(((operator.truediv, (ranks,)),) if kind == "avg" else ()), *back))


def as_ordered(x: torch.Tensor, nan_is_largest: bool) -> torch.Tensor:
    """Convert floats to integers of the same order; NaN becomes the largest integer, or the smallest."""
    limits = torch.iinfo(ORDERED[x.dtype])
    bits = x.contiguous().view(ORDERED[x.dtype])
    # the larger bits of two negative numbers are the smaller number
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(x.isnan(), limits.max if nan_is_largest else limits.min, ordered)


def from_ordered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the integers back to floats; the largest and the smallest integer are NaN."""
    return torch.where(x < 0, x ^ torch.iinfo(x.dtype).max, x).view(dtype)
