"""Saving: from the pieces of this rank to a new checkpoint, while all wait for it or in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.tensors import check_tensor, in_words, values_in_words
from autopar.checkpoint.together import Group, agree, alone, torch_failures
from autopar.checkpoint.values import Tree, leaves, taken_apart
from autopar.errors import shown
from autopar.runtime.processes.groups import CHECKPOINT, process_groups


def save(folder: str | os.PathLike[str], state: Mapping[str, Any], *, keep: int | None = 2, group: Group = None) -> Path:
    """Write a checkpoint into a folder of them. All ranks call it; when it returns, it is whole and forced to disk.

    Args:
        folder: on a file system that all ranks share; it is made if it is not there.
        state: nested dicts and lists of tensors, DTensors, numbers, texts, bytes, NumPy arrays, ``None``. What is no
            DTensor is the same on all ranks, and is kept once.
        keep: how many whole checkpoints stay there, the new one among them; ``None``: all.
        group: of the ranks that save; ``None``: all.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError, ValueError: something in the state is no data, or has no values.
        CheckpointError: ranks bring different states, or one of them cannot write. The checkpoints that were there are
            as they were.
    """
    _wait()
    return _written(_prepared(folder, state, keep, group), group)


def async_save(folder: str | os.PathLike[str], state: Mapping[str, Any], *, keep: int | None = 2) -> Future[Path]:
    """``save``, of a copy that is written in a thread: the state may change when this returns. All ranks call it.

    The copy is of this rank's pieces, in the memory of the host. A save that is asked for while this one is written waits
    for it, and so does the end of the process.

    Returns:
        Its ``result()`` waits, and is the path of the new checkpoint. It raises what ``save`` raises of ranks that cannot
        write; what is wrong with the state is raised here.
    """
    _wait()
    group = _group_of_its_own()
    prepared = _prepared(folder, state, keep, group)
    pieces = {name: [Piece(piece.start, piece.data.to("cpu", copy=True)) for piece in some] for name, some in prepared.pieces.items()}
    folder = prepared.folder.absolute()  # the directory of the process may be another when the thread comes to it
    _last[:] = [_thread.submit(_written, replace(prepared, folder=folder, pieces=pieces), group)]
    return _last[0]


@dataclass(frozen=True)
class _Prepared:
    """What all ranks have agreed on, and this rank's pieces of it."""

    folder: Path
    keep: int | None
    tree: Tree
    tensors: dict[str, torch.Tensor]
    pieces: dict[str, list[Piece]]


def _prepared(folder: str | os.PathLike[str], state: Mapping[str, Any], keep: int | None, group: Group) -> _Prepared:
    found: list[_Prepared] = []

    def outline() -> dict[str, str]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={shown(keep)} would leave no checkpoint; keep 1 or more, or all with keep=None")
        tensors, tree = taken_apart(state)
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        found.append(_Prepared(folder_of(folder), keep, tree, tensors, {name: pieces_of(name, tensor) for name, tensor in tensors.items()}))
        words = {name: in_words(tensor) + values_in_words(tensor) for name, tensor in tensors.items()}
        return {"folder": str(folder), "keep": str(keep), **words, **{name: repr(value) for name, value in leaves(tree)}}

    agree(group, outline)
    return found[0]


def _written(prepared: _Prepared, group: Group) -> Path:
    return written(prepared.folder, prepared.tree, prepared.tensors, prepared.pieces, prepared.keep, group=group)


def written(folder: Path, tree: Tree, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, list[Piece]], keep: int | None,
            values: Callable[[torch.Tensor], torch.Tensor] | None = None, group: Group = None) -> Path:  # fmt: skip
    """Write the pieces of this rank. ``values``: of a piece whose values are elsewhere until they are written."""
    from torch.distributed import checkpoint  # late: it takes half a second

    from autopar.checkpoint.writing import WritePlanner, Writer

    writer = Writer(folder, tree, keep)
    planner = WritePlanner(tensors, pieces, values)
    try:
        with torch_failures(f"no checkpoint was written to {folder}", group):
            checkpoint.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=alone())
    except BaseException:
        writer.abandon()
        raise
    return writer.path


# -- in a thread --------------------------------------------------------------------------------------------------

_thread = ThreadPoolExecutor(1, "autopar checkpoint")
_last: list[Future[Path]] = []


def _wait() -> None:
    """Until nothing is being written; whether that went well, its own caller asks."""
    wait(_last)


def _group_of_its_own() -> Group:
    """So that what is said there does not come between the collectives of a step. All ranks call it."""
    if alone():
        return None
    return process_groups().take(CHECKPOINT, [tuple(range(distributed.get_world_size()))], [])
