"""Write a plain loop to TensorBoard on all ranks of a mesh."""

from __future__ import annotations

import torch
from models import Block

import autopar
from autopar import Mesh
from autopar.step.reports.log import _LOGS


def logged(folder: str) -> list[str]:
    """The ranks that have a writer have these tags, and the others none."""
    parallel = autopar.parallelize(Block(), Mesh(dp=2), outputs="global")
    for _ in range(2):
        loss = parallel(torch.ones(6, 8)).square().mean()
        loss.backward()
        autopar.log(folder, parallel, loss=loss, seconds=0.5, machine="cpu")
    for log in _LOGS.get(parallel, {}).values():
        log.writer.close()
    return [str(log.ranks) for log in _LOGS.get(parallel, {}).values()]
