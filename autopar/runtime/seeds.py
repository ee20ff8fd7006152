"""Draw a step's seed of random ops from torch's global generator: ``torch.manual_seed`` reproduces it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from autopar.ir.ops.seeded_random import Draw, Random, single_device_states
from autopar.runtime.current_slot import waiting_for
from autopar.torch_private import default_generator

SEEDS = "the seeds of random ops"


def step_seed(
    draws: Sequence[Draw], random: Random, device: torch.device, control: distributed.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the value of the placeholder ``seed`` in a list, which is empty if the step has no seed.

    It is the same on all ranks.

    Args:
        random: ``"parallel"``: one number. ``"single"``: the generator's state before each draw; the generator advances
            as on a single device.
        control: a group of all ranks; ``None`` if there is only one process. The first rank's generator is used.
    """
    return seeds_of_calls(1, draws, random, device, control)


def seeds_of_calls(
    count: int, draws: Sequence[Draw], random: Random, device: torch.device, control: distributed.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the seeds of several calls in their order, as ``step_seed`` returns them one by one; in one broadcast."""
    if not draws:
        return []
    if random == "single":
        generator = default_generator(device)
        generator.set_state(_of_first(generator.get_state(), control))
        return [single_device_states(draws, device) for _ in range(count)]
    drawn = [torch.randint(2**63 - 1, (), dtype=torch.int64) for _ in range(count)]
    return list(_of_first(torch.stack(drawn), control).unbind())


def _of_first(tensor: torch.Tensor, control: distributed.ProcessGroup | None) -> torch.Tensor:
    if control is not None:
        with waiting_for(distributed.get_process_group_ranks(control), SEEDS, is_collective=True):
            distributed.broadcast(tensor, group=control, group_src=0)
    return tensor
