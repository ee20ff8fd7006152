"""Draw a step's seed of random ops from torch's global generator: ``torch.manual_seed`` reproduces it.

And let all ranks draw with the first rank's generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from autopar.ir.ops.seeded_random import Draw, Random, single_device_states
from autopar.runtime.current_slot import waiting_for
from autopar.torch_private import default_generator

if TYPE_CHECKING:
    from autopar.runtime.processes.job import Job

SEEDS = "the seeds of random ops"


def seeds_of_calls(
    count: int, draws: Sequence[Draw], random: Random, device: torch.device, control: distributed.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the values of the placeholder ``seed`` in several calls, in their order; in one broadcast.

    The list is empty if a call has no seed. It is the same on all ranks.

    Args:
        random: ``"parallel"``: one number. ``"single"``: the generator's state before each draw; the generator advances
            as on a single device.
        control: a group of all ranks; ``None`` if there is only one process. The first rank's generator is used.
    """
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


@contextlib.contextmanager
def first_ranks_generator(
    job: Job | None, device: torch.device, given: Sequence[torch.Generator] | None = None
) -> Iterator[None]:
    """Let all ranks draw with the first rank's generator state. Other ranks get their own state back afterwards.

    ``given``: generators to take in the place of torch's own.
    """
    if job is None:
        yield
        return
    generators = generators_of(device) if given is None else given
    states = [generator.get_state() for generator in generators]
    unchanged = []
    for generator, state in zip(generators, states, strict=True):
        first = state.clone()
        distributed.broadcast(first, int(job.device_mesh.mesh.flatten()[0]), group=job.control)
        generator.set_state(first)
        unchanged.append(torch.equal(first, state))
    try:
        yield
    finally:
        for generator, state, is_unchanged in zip(generators, states, unchanged, strict=True):
            if not is_unchanged:
                generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators that ops on a device draw from: the device's, and the CPU's."""
    kinds = [device] if device.type == "cpu" else [device, torch.device("cpu")]
    return [default_generator(kind) for kind in kinds]
