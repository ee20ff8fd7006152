"""Start an example on its ranks, as torchrun does, and compare its numbers with those of a single device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from os import environ

import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.runtime.processes.launch import launch

RANKS = 4


def on_ranks(example: Callable[[], None]) -> None:
    """Run an example on this rank; where no launcher has started the process, start four ranks that do."""
    if "RANK" in environ:
        example()
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "start an example with python -m autopar.examples.NAME"
    try:
        launch([sys.executable, "-m", spec.name], RANKS)
    except LaunchError as error:
        sys.exit(str(error))


def is_first() -> bool:
    """Return whether this is the first rank, which prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def leave_job() -> None:
    """Leave the processes that were started together: what follows runs as in a process that was started by itself."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environ.pop(name, None)


def compare(
    what: str, on_mesh: Sequence[float], on_one_device: Sequence[float], names: Sequence[str] = (),
    tolerance: float = 1e-5,
) -> None:  # fmt: skip
    """Print the numbers of both side by side. The process ends with status 1 if they differ by more than rounding."""
    print(f"{what:<16}    the mesh  one device")
    for k, (ours, single) in enumerate(zip(on_mesh, on_one_device, strict=True)):
        name = names[k] if names else f"step {k + 1}"
        print(f"  {name:<14}{ours:12.6f}{single:12.6f}", flush=True)
        if not math.isclose(ours, single, rel_tol=tolerance):
            sys.exit(f"{what} of {name} differ: {ours!r} on the mesh, {single!r} on one device")
