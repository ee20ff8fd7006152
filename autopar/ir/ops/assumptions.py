"""Register an op that checks a truth which the program was captured for.

    y : f32[8/dp 4] = autopar::assumed(x, broken, 'the step was captured for another answer to …')

It returns its operand. If ``broken`` is not 0, it raises an error with this message.
"""

from __future__ import annotations

import torch

from autopar.ir.ops.sharded_lookup import op
from autopar.torch_private import assert_without_sync


@op("assumed(Tensor x, Tensor broken, str message) -> Tensor")
def assumed(x: torch.Tensor, broken: torch.Tensor, message: str) -> torch.Tensor:
    """Return a copy of ``x``; ``RuntimeError`` if ``broken``, one whole number, is not 0."""
    if broken.device.type == "cpu" and bool(broken):
        raise RuntimeError(message)
    assert_without_sync(broken == 0, message)
    return x.clone()
