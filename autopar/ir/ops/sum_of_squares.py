"""The sum of a tensor's squares, of which the norm of all gradients is made: an op that comes apart along every dim."""

from __future__ import annotations

import torch

from autopar.ir.ops.sharded_lookup import LIBRARY

LIBRARY.define("sum_of_squares(Tensor x) -> Tensor")


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """``[…] → []``, of half precision in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dtype=wide).square()


LIBRARY.impl("sum_of_squares", sum_of_squares, "CompositeExplicitAutograd")
SUM_OF_SQUARES = torch.ops.autopar.sum_of_squares.default
