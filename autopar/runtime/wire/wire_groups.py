"""Say which backend a process group has, which groups are on the emulated wire, and which complete in order.

A group completes in order if its collectives end in the order of issue, so that a simulation with one queue for each
group is exact.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import distributed


class OnTheWire(Protocol):
    """The methods of a process group on the wire that autopar calls, besides those that torch calls."""

    def start_scatter(self, rows: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce ``rows`` in place, charged as a reduce-scatter."""


BACKEND = "autopar_wire"
IN_ORDER = {BACKEND: True, "nccl": True, "xccl": True, "fake": True, "gloo": False}  # others count as not in order
WIRE_GROUPS: dict[str, OnTheWire] = {}  # by the name of the group
EMULATED: list[Any] = []  # none or one: the wire that new groups are on


def backend_of(group: distributed.ProcessGroup | None, device_type: str) -> str:
    """Return the backend that a group has for a type of device, ``""`` if it has none. ``None``: the default group.

    A group has one for each type; what ``get_backend`` says is "undefined" where a group was made without a name.
    """
    pairs = (pair.partition(":") for pair in distributed.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type, "")


def check_default_group() -> None:
    """Raise ``RuntimeError`` if a wire is emulated, and the default process group was made beside it."""
    world = distributed.group.WORLD
    if EMULATED and world is not None and world.group_name not in WIRE_GROUPS:
        raise RuntimeError(
            f"autopar.emulate was called, but the default process group has the backend "
            f"{backend_of(world, 'cpu')!r}; call init_process_group without a backend, or with {BACKEND!r}"
        )


def completes_in_order(group: str, backend: str) -> bool:
    """Return whether the collectives of a group end in the order of issue.

    Args:
        group: its name.
        backend: the name of its backend, for a group that is not on the wire.
    """
    return group in WIRE_GROUPS or IN_ORDER.get(backend, False)
