"""Refuse wrappers that would shard the tensors of a model on a mesh, or reduce its gradients, a second time.

A module does not learn that it is wrapped. It notices the first thing that a wrapper does: ``DistributedDataParallel``,
which Accelerate puts around a model too, reads an attribute; ``fully_shard`` writes an entry to ``__dict__`` and reads
the parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autopar.capture.provenance import user_line
from autopar.torch_private import ASKED_BY_DDP, DYNAMO, NOTED_BY_COMPOSABLE

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
    "already, which runs as it is; call the model as it is, and pass compile=True to parallelize to compile it"
)

T = TypeVar("T")


def never_traced(function: Callable[..., T]) -> Callable[..., T]:
    """Run a function as it is, also where torch.compile would trace it: a captured program is nothing to trace.

    While torch.compile traces the call, it meets a ``TypeError``, drops it and runs the call without compiling it; with
    ``fullgraph=True`` it raises an error of its own. torch.export raises it. Dynamo is not imported for this.
    """
    disabled: list[Callable[..., T]] = []  # made when Dynamo is there

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if torch.compiler.is_compiling():
            raise TypeError(COMPILE)
        if DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


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
