"""Compute the exponential moving average of a parameter (Polyak, Juditsky 1992), as an op and on a whole list in place.

    new_count   = counted(count, found_inf)
    new_average = averaged(average, param, new_count, found_inf, decay=0.999)

    decay * average + (1 - decay) * param; the first average is the parameter itself

This is ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, using ``lerp``. ``param`` is the
parameter after the optimizer's step, ``count`` includes this average; ``count`` and ``found_inf`` have no dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.ops.sharded_lookup import LIBRARY
from autopar.optimizers.ops import unless
from autopar.torch_private import interpolate_each

LIBRARY.define("averaged(Tensor average, Tensor param, Tensor count, Tensor? found_inf, *, float decay) -> Tensor")


def _averaged(
    average: torch.Tensor, param: torch.Tensor, count: torch.Tensor, found_inf: torch.Tensor | None, *, decay: float
) -> torch.Tensor:
    return unless(found_inf, torch.where(count == 1, param, average.lerp(param, 1 - decay)), average)


LIBRARY.impl("averaged", _averaged, "CompositeExplicitAutograd")
AVERAGED = torch.ops.autopar.averaged.default


@torch.no_grad()
def average(averages: Sequence[torch.Tensor], params: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]],
            count: torch.Tensor, found_inf: torch.Tensor | None, *, decay: float) -> None:  # fmt: skip
    """Apply ``autopar::averaged`` to each, in place; ``states`` is empty."""
    if count.is_cpu and not (found_inf is not None and found_inf != 0) and count != 1:
        interpolate_each(list(averages), list(params), 1 - decay)
        return
    for old, param in zip(averages, params, strict=True):  # without waiting for values of an accelerator
        old.copy_(_averaged(old, param, count, found_inf, decay=decay))
