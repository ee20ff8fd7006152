"""Save the pieces of this rank to a new checkpoint, while the caller waits or in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from autopar.checkpoint.collective_errors import Group, agree, is_single_process, torch_failures
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.tensors import check_tensor, describe_tensor, describe_values
from autopar.checkpoint.values import Tree, encode_state, leaves
from autopar.errors import shown
from autopar.runtime.processes.groups import CHECKPOINT, process_groups


def save(
    folder: str | os.PathLike[str], state: Mapping[str, Any], *, keep: int | None = 2, group: Group = None
) -> Path:
    """Write a checkpoint into a folder of checkpoints. All ranks call this.

    When it returns, the checkpoint is complete and forced to disk.

    Args:
        folder: a folder on a file system that all ranks share; it is made if it does not exist.
        state: nested dicts and lists of tensors, DTensors, numbers, texts, bytes, NumPy arrays, ``None``. Every value
            but a DTensor must be the same on all ranks, and is stored once.
        keep: how many complete checkpoints stay in the folder, with the new one; ``None``: all.
        group: the ranks that save; ``None``: all.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError, ValueError: a value of the state is no data, or a tensor has no values.
        CheckpointError: ranks pass different states, or one of them cannot write. The older checkpoints are unchanged.
    """
    _wait()
    return _written(_prepared(folder, state, keep, group), group)


def async_save(folder: str | os.PathLike[str], state: Mapping[str, Any], *, keep: int | None = 2) -> Future[Path]:
    """``save`` a copy, which a thread writes: the state may change when this returns. All ranks call this.

    The copy has this rank's pieces, in host memory. The next save waits for this one, and so does the end of the
    process.

    Returns:
        A future; its ``result()`` waits and returns the path of the new checkpoint. It raises the errors of ``save``
        about ranks that cannot write; errors about the state are raised by this call.
    """
    _wait()
    group = _group_of_its_own()
    prepared = _prepared(folder, state, keep, group)
    pieces = {
        name: [Piece(piece.start, piece.data.to("cpu", copy=True)) for piece in own_pieces]
        for name, own_pieces in prepared.pieces.items()
    }
    folder = prepared.folder.absolute()  # the working directory may have changed when the thread writes
    _last[:] = [_thread.submit(_written, replace(prepared, folder=folder, pieces=pieces), group)]
    return _last[0]


@dataclass(frozen=True)
class _Prepared:
    """A state that all ranks agree on, and this rank's pieces of it."""

    folder: Path
    keep: int | None
    tree: Tree
    tensors: dict[str, torch.Tensor]
    pieces: dict[str, list[Piece]]


def _prepared(folder: str | os.PathLike[str], state: Mapping[str, Any], keep: int | None, group: Group) -> _Prepared:
    prepared: list[_Prepared] = []

    def outline() -> dict[str, str]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={shown(keep)} would leave no checkpoint; keep 1 or more, or all with keep=None")
        tensors, tree = encode_state(state)
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        prepared.append(
            _Prepared(
                folder_of(folder),
                keep,
                tree,
                tensors,
                {name: pieces_of(name, tensor) for name, tensor in tensors.items()},
            )
        )
        words = {name: describe_tensor(tensor) + describe_values(tensor) for name, tensor in tensors.items()}
        return {
            "folder": str(folder),
            "keep": str(keep),
            **words,
            **{name: repr(value) for name, value in leaves(tree)},
        }

    agree(group, outline)
    return prepared[0]


def _written(prepared: _Prepared, group: Group) -> Path:
    return write_checkpoint(
        prepared.folder, prepared.tree, prepared.tensors, prepared.pieces, prepared.keep, group=group
    )


def write_checkpoint(folder: Path, tree: Tree, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, list[Piece]],
                     keep: int | None,
            values: Callable[[torch.Tensor], torch.Tensor] | None = None, group: Group = None) -> Path:  # fmt: skip
    """Write the pieces of this rank to a new checkpoint. ``values`` reads the values of a piece when it is written."""
    from torch.distributed import checkpoint  # imported here because it takes half a second

    from autopar.checkpoint.writing import WritePlanner, Writer

    writer = Writer(folder, tree, keep)
    planner = WritePlanner(tensors, pieces, values)
    try:
        with torch_failures(f"no checkpoint was written to {folder}", group):
            checkpoint.save(
                dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=is_single_process()
            )
    except BaseException:
        writer.abandon()
        raise
    return writer.path


# -- in a thread --------------------------------------------------------------------------------------------------

_thread = ThreadPoolExecutor(1, "autopar checkpoint")
_last: list[Future[Path]] = []


def _wait() -> None:
    """Wait until nothing is being written; an error is reported to the caller of that save."""
    wait(_last)


def _group_of_its_own() -> Group:
    """Make a group for saves, so that their messages do not mix with the collectives of a step. All ranks call this."""
    if is_single_process():
        return None
    return process_groups().take(CHECKPOINT, [tuple(range(distributed.get_world_size()))], [])
