"""Start an example on its ranks, as torchrun does, and compare its numbers with those of a single device."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os import environ
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.runtime.processes.launch import launch

RANKS = 4


def on_ranks(example: Callable[[], None]) -> None:
    """Run an example on this rank; where no launcher has started the process, start four ranks that do."""
    if "RANK" in environ:
        dist.init_process_group()
        example()
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
    return dist.get_rank() == 0


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a temporary folder that all ranks share, and remove it when all have left the block."""
    with tempfile.TemporaryDirectory() if is_first() else nullcontext("") as made:
        name = [made]
        dist.broadcast_object_list(name)
        yield Path(name[0])
        dist.barrier()


def leave_job() -> None:
    """Hide the launcher's variables: what follows runs as in a process that was started by itself."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environ.pop(name, None)


def train_alone(
    loss_of: Callable[[Any], torch.Tensor], optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> list[float]:
    """Train on a single device with the plain loop of PyTorch, and return the losses."""
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
