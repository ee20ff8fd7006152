"""Save and load checkpoints: nested states of tensors and plain values, for any mesh.

    autopar.checkpoint.save(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 7})
    state = autopar.checkpoint.load(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 0})

A checkpoint on disk is always complete. It does not depend on the mesh that wrote it. A load fills tensors in place,
only the pieces of each rank, a few MiB at a time, and checks all files first. Loading runs no code: a checkpoint holds
numbers and JSON.
"""

from __future__ import annotations

from autopar.checkpoint.dcp import export_dcp, import_dcp
from autopar.checkpoint.folder import latest
from autopar.checkpoint.loading import load
from autopar.checkpoint.saving import async_save, save

__all__ = ["async_save", "export_dcp", "import_dcp", "latest", "load", "save"]
