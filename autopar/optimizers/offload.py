"""Update parameters on the host, where the optimizer's state is kept, with the functions of ``in_place``.

    device    parameters, gradients ──┐                                            ┌──→ parameters
    host                              └──→ copies ── a wait ── IN_PLACE[op] ── copies, and the states where they are

As in ZeRO-Offload (Ren et al., USENIX ATC 2021) and with FSDP2's ``CPUOffloadPolicy``; but parameters stay on the
device. They are copied both ways, so that changes that other code makes in between take effect. The copies are pinned;
states are not, because they are never copied. A bucket's copies, of pieces and gradients, are in host memory while it
is updated.

This is for an accelerator. If the device is the CPU, copies go from memory to memory, with the same bits and no gain.
It has not been run on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.optimizers.average import AVERAGED
from autopar.optimizers.in_place import IN_PLACE
from autopar.optimizers.ops import SIGNATURES, UPDATES
from autopar.torch_private import OpOverload

Tensors = Sequence[torch.Tensor]

HOST = torch.device("cpu")


def to_host(tensors: Tensors) -> list[torch.Tensor]:
    """Return copies in host memory, ready to read. All copies are started before the device is waited for, once."""
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=tensor.device != HOST)
        for tensor in tensors
    ]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.device != HOST):
        torch.accelerator.current_stream(device).synchronize()
    return copies


def to_device(copies: Tensors, tensors: Tensors) -> None:
    """Write copies over tensors without waiting.

    Later reads on the device are ordered after, and so is the reuse of pinned memory.
    """
    for copy, tensor in zip(copies, tensors, strict=True):
        tensor.copy_(copy, non_blocking=True)


def _offloaded(op: OpOverload, sharded: int, returns: bool) -> Callable[..., None]:
    """Return the update of an op. ``sharded``: how many of its states are on the host.

    ``returns``: whether ``written`` is copied to the host and back; else it is a state on the host.
    """

    @torch.no_grad()
    def update(
        written: Tensors, read: Tensors, states: Sequence[Tensors], *shared: torch.Tensor | None, **options: Any
    ) -> None:
        away = [*written] if returns else []
        counts = states[sharded:]
        # steps are one tensor for many
        numbers = {
            id(number): number
            for numbers_of_state in (*counts, shared)
            for number in numbers_of_state
            if number is not None
        }
        copies = to_host([*away, *read, *numbers.values()])
        host_numbers = dict(zip(numbers, copies[len(away) + len(read) :], strict=True))
        new, others = copies[: len(away)], copies[len(away) : len(away) + len(read)]
        host_counts = [[host_numbers[id(number)] for number in numbers_of_state] for numbers_of_state in counts]
        IN_PLACE[op](
            new if returns else written,
            others,
            [*states[:sharded], *host_counts],
            *(None if number is None else host_numbers[id(number)] for number in shared),
            **options,
        )
        to_device(new, away)

    return update


# : op → the function of ``IN_PLACE``, with states in host memory that are sharded like the parameter, and so the
# averages of ``averaged``. : Gradients stay where they are. Ops without such a state run where the parameter is.
OFFLOADED: dict[OpOverload, Callable[..., None]] = {
    op: _offloaded(op, sharded, True) if (sharded := len(SIGNATURES[name][0].split())) else IN_PLACE[op]
    for name, op in UPDATES.items()
}
OFFLOADED[AVERAGED] = _offloaded(AVERAGED, 0, False)
