"""The updates of ``in_place`` on the host, where the optimizer's state is kept.

    device    parameters, gradients ──┐                                            ┌──→ parameters
    host                              └──→ copies ── a wait ── IN_PLACE[op] ── copies, and the states where they are

As in ZeRO-Offload (Ren et al., USENIX ATC 2021) and with FSDP2's ``CPUOffloadPolicy``; but parameters stay on the device, and travel both
ways, so that whoever has written to one in between is heard. The copies are pinned; states are not, because they never travel.
A bucket's copies, of pieces and gradients, are in host memory while it is updated.

This is for an accelerator. Where the device is the CPU, the same is done from memory to memory, with the same bits and for no gain.
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
    """Copies in host memory, which can be read when this returns: all are under way before the device is waited for, once."""
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=tensor.device != HOST) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.device != HOST):
        torch.accelerator.current_stream(device).synchronize()
    return copies


def to_device(copies: Tensors, tensors: Tensors) -> None:
    """Write copies over tensors. Nobody waits: what reads these comes later on the device, and pinned memory is given to others after that."""
    for copy, tensor in zip(copies, tensors, strict=True):
        tensor.copy_(copy, non_blocking=True)


def _offloaded(op: OpOverload, lying: int, returns: bool) -> Callable[..., None]:
    """``lying``: how many of the states are on the host; ``returns``: whether what is written first travels, or is one of them."""

    @torch.no_grad()
    def update(written: Tensors, read: Tensors, states: Sequence[Tensors], *shared: torch.Tensor | None, **options: Any) -> None:
        away = [*written] if returns else []
        counts = states[lying:]
        numbers = {id(one): one for some in (*counts, shared) for one in some if one is not None}  # steps are one tensor for many
        copies = to_host([*away, *read, *numbers.values()])
        here = dict(zip(numbers, copies[len(away) + len(read) :], strict=True))
        new, others = copies[: len(away)], copies[len(away) : len(away) + len(read)]
        told = [[here[id(one)] for one in some] for some in counts]
        IN_PLACE[op](new if returns else written, others, [*states[:lying], *told], *(None if one is None else here[id(one)] for one in shared), **options)
        to_device(new, away)

    return update


#: op → the function of ``IN_PLACE``, with the states that lie as the parameter does in host memory, and so the averages of ``averaged``.
#: Gradients stay as they are. What has no such state is done where the parameter is.
OFFLOADED: dict[OpOverload, Callable[..., None]] = {
    op: _offloaded(op, lying, True) if (lying := len(SIGNATURES[name][0].split())) else IN_PLACE[op] for name, op in UPDATES.items()
}
OFFLOADED[AVERAGED] = _offloaded(AVERAGED, 0, False)
