"""Read and write folders of ``torch.distributed.checkpoint`` (DCP), as FSDP2 and torchtitan write them.

    autopar.checkpoint.import_dcp("dcp/step-100", "checkpoints", allow_pickle=True)
    autopar.checkpoint.export_dcp("checkpoints", "dcp/step-101")

One process does it, a tensor at a time. A DCP folder describes itself in ``.metadata``, which is a pickle: a file that can run
code when it is read. It is read only with the user's word, and then by an unpickler that makes DCP's own descriptions and
nothing else; all else is read as torch reads weights. A folder of safetensors, as ``HuggingFaceStorageWriter`` writes, has no
pickle.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.dcp_trees import as_saved, as_torchtitan
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.newest import newest_whole
from autopar.checkpoint.pieces import Piece
from autopar.checkpoint.saving import written
from autopar.checkpoint.tensors import check_dtype
from autopar.checkpoint.together import alone, torch_failures
from autopar.checkpoint.values import put_together, taken_apart
from autopar.errors import CheckpointError


def import_dcp(source: str | os.PathLike[str], folder: str | os.PathLike[str], *, allow_pickle: bool = False, skip: Sequence[str] = (),
               keep: int | None = 2) -> Path:  # fmt: skip
    """Read a DCP folder, and write what it holds as a checkpoint into a folder of checkpoints.

    The checkpoint has the form of ``step.state_dict()``: ``model``; ``optimizer`` with ``state`` and ``param_groups`` by the
    names of parameters, also where it was flattened; ``step``, from ``train_state`` or the optimizer; and ``rng``, the state
    of a fresh generator, since DCP keeps none. What else is there keeps its name.

    Args:
        source: that ``torch.distributed.checkpoint.save`` has written.
        folder: as for ``save``.
        allow_pickle: read ``.metadata``, which is a pickle; what is no description of DCP's in it is refused all the same.
        skip: globs over DCP's names, as ``dataloader*``, of what is left out.
        keep: as for ``save``.

    Returns:
        The path of the new checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is no DCP folder; it needs ``allow_pickle``; or it has what a checkpoint cannot keep.
        RuntimeError: there are several processes.
    """
    _refuse_several("import_dcp")
    from autopar.checkpoint.dcp_source import Source

    source = folder_of(source)
    read = Source(source, allow_pickle)
    names = [name for name in read.paths if not any(fnmatch.fnmatchcase(name, glob) for glob in skip)]
    try:
        tensors, tree = taken_apart(as_saved(read.nested(names)))
        for name, tensor in tensors.items():
            check_dtype(name, tensor)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source} has what a checkpoint cannot keep: {error}; or leave it out with skip") from error
    pieces = {name: [Piece((0,) * tensor.dim(), tensor)] for name, tensor in tensors.items()}
    return written(folder_of(folder), tree, tensors, pieces, keep, read.values)


def export_dcp(source: str | os.PathLike[str], folder: str | os.PathLike[str], *, torchtitan: bool = False) -> Path:
    """Write a checkpoint as a DCP folder, which ``torch.distributed.checkpoint.load`` reads.

    It has the names of the state that was saved: ``step.state_dict()`` gives ``model``, and ``optimizer`` as
    ``get_optimizer_state_dict`` has it.

    Args:
        source: a checkpoint, or a folder of them, of which the newest whole one is taken.
        folder: a new one.
        torchtitan: with the names of torchtitan: the model's at the top, a flattened optimizer, ``train_state``.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged; the folder is there already; or two values would have one name.
        RuntimeError: there are several processes.
    """
    _refuse_several("export_dcp")
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    from autopar.checkpoint.reading import read_tensor

    folder = folder_of(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already, and not empty; name a new folder")
    path, manifest, _ = newest_whole(folder_of(source), lambda *_: None, None)
    stored = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in manifest.tensors.items()}
    names = {id(tensor): name for name, tensor in stored.items()}
    state = put_together(manifest.tree, stored)

    class Planner(DefaultSavePlanner):
        """Reads a tensor when it is written."""

        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return read_tensor(path, manifest.tensors[names[id(value)]]) if id(value) in names else value

    try:
        with torch_failures(f"{folder} was not written", None):
            checkpoint.save(as_torchtitan(state) if torchtitan else state, storage_writer=FileSystemWriter(folder), planner=Planner(), no_dist=True)
    except (TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} was not written: {error}") from error
    return folder


def _refuse_several(what: str) -> None:
    if not alone():
        raise RuntimeError(f"autopar.checkpoint.{what} is for one process, and there are several; call it in a script of its own, or as autopar checkpoint")


