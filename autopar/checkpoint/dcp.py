"""Read and write folders of ``torch.distributed.checkpoint`` (DCP), as FSDP2 and torchtitan write them.

    autopar.checkpoint.import_dcp("dcp/step-100", "checkpoints", allow_pickle=True)
    autopar.checkpoint.export_dcp("checkpoints", "dcp/step-101")

One process converts a folder, a tensor at a time. A DCP folder describes its contents in ``.metadata``, which is a
pickle: a file that can run code when it is read. It is read only with ``allow_pickle=True``, and then by an unpickler
that accepts only the classes of DCP's own descriptions; everything else is read as torch reads weights. A folder of
safetensors, as ``HuggingFaceStorageWriter`` writes, has no pickle.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.collective_errors import is_single_process, torch_failures
from autopar.checkpoint.dcp_trees import as_saved, as_torchtitan
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.newest import newest_whole
from autopar.checkpoint.pieces import Piece
from autopar.checkpoint.saving import write_checkpoint
from autopar.checkpoint.tensors import check_dtype
from autopar.checkpoint.values import decode_state, encode_state
from autopar.errors import CheckpointError


def import_dcp(source: str | os.PathLike[str], folder: str | os.PathLike[str], *, allow_pickle: bool = False,
               skip: Sequence[str] = (), keep: int | None = 2) -> Path:  # fmt: skip
    """Read a DCP folder, and write its contents as a checkpoint into a folder of checkpoints.

    The checkpoint has the form of ``step.state_dict()``: ``model``; ``optimizer`` with ``state`` and ``param_groups``
    by the names of parameters, even if DCP flattened it; ``step``, from ``train_state`` or the optimizer; and ``rng``,
    the state of a fresh generator, because DCP keeps none. All other entries keep their names.

    Args:
        source: a folder that ``torch.distributed.checkpoint.save`` has written.
        folder: as for ``save``.
        allow_pickle: read ``.metadata``, which is a pickle; anything in it that is not a description of DCP is still
            refused.
        skip: globs over DCP's names, such as ``dataloader*``, of entries to leave out.
        keep: as for ``save``.

    Returns:
        The path of the new checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is no DCP folder; it needs ``allow_pickle``; or it has a value that a checkpoint cannot
            keep.
        RuntimeError: there are several processes.
    """
    _refuse_several("import_dcp")
    from autopar.checkpoint.dcp_source import Source

    source = folder_of(source)
    stored = Source(source, allow_pickle)
    names = [name for name in stored.paths if not any(fnmatch.fnmatchcase(name, glob) for glob in skip)]
    try:
        tensors, tree = encode_state(as_saved(stored.nested(names)))
        for name, tensor in tensors.items():
            check_dtype(name, tensor)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source} has an entry that a checkpoint cannot keep: {error}; or leave it out with skip"
        ) from error
    pieces = {name: [Piece((0,) * tensor.dim(), tensor)] for name, tensor in tensors.items()}
    return write_checkpoint(folder_of(folder), tree, tensors, pieces, keep, stored.values)


def export_dcp(source: str | os.PathLike[str], folder: str | os.PathLike[str], *, torchtitan: bool = False) -> Path:
    """Write a checkpoint as a DCP folder, which ``torch.distributed.checkpoint.load`` reads.

    It has the names of the state that was saved: ``step.state_dict()`` gives ``model``, and ``optimizer`` as
    ``get_optimizer_state_dict`` returns it.

    Args:
        source: a checkpoint, or a folder of checkpoints, whose newest complete one is used.
        folder: a new folder.
        torchtitan: use the names of torchtitan: the model's names at the top, a flattened optimizer, ``train_state``.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged; the folder exists already; or two values would have the same name.
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
    stored = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in manifest.tensors.items()
    }
    names = {id(tensor): name for name, tensor in stored.items()}
    state = decode_state(manifest.tree, stored)

    class Planner(DefaultSavePlanner):
        """Reads each tensor from the checkpoint when DCP writes it."""

        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return read_tensor(path, manifest.tensors[names[id(value)]]) if id(value) in names else value

    try:
        with torch_failures(f"{folder} was not written", None):
            checkpoint.save(
                as_torchtitan(state) if torchtitan else state,
                storage_writer=FileSystemWriter(folder),
                planner=Planner(),
                no_dist=True,
            )
    except (TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} was not written: {error}") from error
    return folder


def _refuse_several(function: str) -> None:
    if not is_single_process():
        raise RuntimeError(
            f"autopar.checkpoint.{function} is for one process, and there are several; call it in a script of its "
            f"own, or as autopar checkpoint"
        )
