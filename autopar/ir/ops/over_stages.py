"""Register the op that adds up numbers which lie on the stages of a pipeline, such as the squares of their gradients.

Each rank adds those that it has. So the result is on the whole mesh, and pending over the axis of the stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.ops.sharded_lookup import op


@op("over_stages(Tensor[] values, ScalarType dtype, Device device) -> Tensor")
def over_stages(values: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the sum of numbers, ``[], … → []``, in a dtype; 0 on a rank that has none of them."""
    if not values:
        return torch.zeros((), dtype=dtype, device=device)
    total, *others = (value.to(dtype) for value in values)
    for value in others:
        total = total + value
    return total.clone() if total is values[0] else total


OVER_STAGES = torch.ops.autopar.over_stages.default
