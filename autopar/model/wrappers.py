"""Refuse what would wrap a model that is on a mesh already: it cuts and reduces once more what autopar has cut and reduces.

Nobody tells a module that it is wrapped. It notices what the wrapper does first: ``DistributedDataParallel``, which Accelerate
puts around a model too, asks for an attribute; ``fully_shard`` notes itself in ``__dict__`` and asks for the parameters.
"""

from __future__ import annotations

import torch

from autopar.capture.provenance import user_line
from autopar.torch_private import ASKED_BY_DDP, NOTED_BY_COMPOSABLE

DDP = (
    "DistributedDataParallel cannot wrap a model that is on a mesh: autopar averages its gradients over the processes already; call the model as it is\n"
    "    {line}\n  with Accelerate, leave the model and its optimizer out of accelerator.prepare(…)"
)
FULLY_SHARD = (
    "{name} cannot be put on a model that is on a mesh: its parameters are DTensors that autopar has cut already; for parameters, gradients and the "
    "optimizer's state that are split over the data axis, use parallel.train_step(optimizer, zero=3)\n    {line}"
)

COMPILE = (
    "torch.compile and torch.export cannot take a model that is on a mesh: its step is a captured program already, which runs as it is; call the model as it is"
)


def refuse_compile() -> None:
    """``TypeError`` where torch.export traces a call. torch.compile swallows it, and runs the call as it is, or fails at what it meets there."""
    if torch.compiler.is_compiling():
        raise TypeError(COMPILE)


def refuse_ddp(attribute: str) -> None:
    """``TypeError`` where a missing attribute is one that DistributedDataParallel asks a module for."""
    if attribute == ASKED_BY_DDP:
        raise TypeError(DDP.format(line=user_line("accelerate")))


def refuse_composable(module: torch.nn.Module) -> None:
    """``TypeError`` where ``fully_shard`` or its like has noted itself on a module; the note is taken away, so that the module is as before."""
    notes = [key for key in vars(module) if key.startswith(NOTED_BY_COMPOSABLE)]
    if not notes:
        return
    taken = [vars(module).pop(key) for key in notes]
    name = next((str(key) for note in taken for key in note if isinstance(key, str)), "fully_shard")
    raise TypeError(FULLY_SHARD.format(name=name, line=user_line("accelerate")))
