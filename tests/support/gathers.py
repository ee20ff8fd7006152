"""Which gathers run in a process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_private import start_gather


def coalesced_in(function: Callable[..., Any], *args: Any) -> list[str]:
    """Who began the coalesced gather that is DTensor's own; the caller's last lines."""
    lines: list[str] = []

    def kernel(piece: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        lines.append("".join(traceback.format_stack(limit=16)[:-1]))
        return start_gather(piece, ranks, group)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", kernel, "CPU")
    try:
        function(*args)
    finally:
        library._destroy()
    return lines


def by_dtensor() -> None:
    """What is counted."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)]).full_tensor()
