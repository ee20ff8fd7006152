"""Checkpoints: a nested state of tensors and plain values, whole on disk or not there, for any mesh.

    autopar.checkpoint.save(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 7})
    state = autopar.checkpoint.load(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 0})

A checkpoint says nothing of the mesh that wrote it. Tensors are filled in place, each rank's pieces and nothing else, a few
MiB at a time; files are checked before anything is filled. Loading runs no code: there are numbers, and JSON.
"""

from __future__ import annotations

from autopar.checkpoint.dcp import export_dcp, import_dcp
from autopar.checkpoint.folder import latest
from autopar.checkpoint.loading import load
from autopar.checkpoint.saving import async_save, save

__all__ = ["async_save", "export_dcp", "import_dcp", "latest", "load", "save"]
