"""Register the op that sums a tensor's squares, which can be split along every dim.

The norm of all gradients is made of it.
"""

from __future__ import annotations

import torch

from autopar.ir.ops.sharded_lookup import LIBRARY

LIBRARY.define("sum_of_squares(Tensor x) -> Tensor")


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, ``[…] → []``; half precision is summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dtype=wide).square()


LIBRARY.impl("sum_of_squares", sum_of_squares, "CompositeExplicitAutograd")
SUM_OF_SQUARES = torch.ops.autopar.sum_of_squares.default
