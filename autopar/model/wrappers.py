"""Refuse wrappers that would shard the tensors of a model on a mesh, or reduce its gradients, a second time.

A module does not learn that it is wrapped. It notices the first thing that a wrapper does: ``DistributedDataParallel``,
which Accelerate puts around a model too, reads an attribute; ``fully_shard`` writes an entry to ``__dict__`` and reads
the parameters.
"""

from __future__ import annotations

import torch

from autopar.capture.provenance import user_line
from autopar.torch_private import ASKED_BY_DDP, NOTED_BY_COMPOSABLE

DDP = (
    "DistributedDataParallel cannot wrap a model that is on a mesh: autopar averages its gradients over the processes "
    "already; call the model as it is\n"
    "    {line}\n  with Accelerate, leave the model and its optimizer out of accelerator.prepare(…)"
)
FULLY_SHARD = (
    "{name} cannot be put on a model that is on a mesh: its parameters are DTensors that autopar has cut already; for "
    "parameters, gradients and the optimizer's state that are split over the data axis, use "
    "parallel.train_step(optimizer, zero=3)\n    {line}"
)

COMPILE = (
    "torch.compile and torch.export cannot take a model that is on a mesh: its step is a captured program "
    "already, which runs as it is; call the model as it is"
)


def refuse_compile() -> None:
    """Raise ``TypeError`` if torch.export traces a call.

    torch.compile drops the error, and runs the call without compiling it, or fails inside.
    """
    if torch.compiler.is_compiling():
        raise TypeError(COMPILE)


def refuse_ddp(attribute: str) -> None:
    """Raise ``TypeError`` if a missing attribute is the one that DistributedDataParallel reads."""
    if attribute == ASKED_BY_DDP:
        raise TypeError(DDP.format(line=user_line("accelerate")))


def refuse_composable(module: torch.nn.Module) -> None:
    """Raise ``TypeError`` if ``fully_shard`` or a similar function has written its entry to a module.

    The entry is removed, so that the module is as before.
    """
    notes = [key for key in vars(module) if key.startswith(NOTED_BY_COMPOSABLE)]
    if not notes:
        return
    taken = [vars(module).pop(key) for key in notes]
    name = next((str(key) for note in taken for key in note if isinstance(key, str)), "fully_shard")
    raise TypeError(FULLY_SHARD.format(name=name, line=user_line("accelerate")))
