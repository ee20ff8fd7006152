"""Capture: the model's step, forward and backward, as one static graph of functional ATen ops.

One ``make_fx`` trace under fake tensors. Every argument is a fake tensor of its own, so that the same tensor passed
twice stays two inputs; tied parameters are the only aliases kept. A second trace functionalizes, only where an op that
writes in place appears. The joint graph holds both phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.arguments import bind_arguments
from autopar.borrow import ONE_AT_A_TIME
from autopar.capture.assemble import Captured, assemble
from autopar.capture.trace import Tracer
from autopar.collector import collector_paused
from autopar.progress import doing

__all__ = ["Captured", "capture"]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    random: str = "parallel",
) -> Captured:
    """Trace ``model(*args, **kwargs)`` and its backward.

    Outputs that require gradients get one tangent each. Under ``torch.no_grad()`` there is no backward. The model and
    the arguments are only read: whatever forward does to the model is undone. One capture runs at a time. ``random`` is that of
    ``parallelize``.

    Raises:
        CaptureError: control flow on the values of tensors, a random op whose numbers cannot be those of a stream, an argument that cannot be flattened, a tensor
            that forward writes or keeps where it cannot be followed.
    """
    with ONE_AT_A_TIME, collector_paused():
        tracer = Tracer(model, bind_arguments(model, args, kwargs or {}), random)
        with doing(tracer.doing):
            return assemble(tracer.run(), random)
