"""Checkpoints: a nested state of tensors and plain values, whole on disk or not there, for any mesh.

    autopar.checkpoint.save(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 7})
    state = autopar.checkpoint.load(folder, {"model": parallel.state_dict(), "optimizer": ..., "step": 0})

A checkpoint says nothing of the mesh that wrote it. Tensors are filled in place, each rank's pieces and nothing else, a few
MiB at a time; files are checked before anything is filled. Loading runs no code: there are numbers, and JSON.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.fit import check_fit
from autopar.checkpoint.folder import chosen, latest, read_manifest
from autopar.checkpoint.manifest import DTYPES, described
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.together import Group, agree, alone, everywhere, from_first, lost, rank_in, ranks_of
from autopar.checkpoint.values import Tree, leaves, put_together, taken_apart
from autopar.errors import CheckpointError
from autopar.shards import is_dtensor

__all__ = ["latest", "load", "save"]

SMALL = 2**20  # bytes of a tensor of whole numbers that is compared between ranks


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
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    tree: Tree = None

    def outline() -> dict[str, str]:
        nonlocal tensors, tree
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={keep!r} would leave no checkpoint; keep 1 or more, or all with keep=None")
        tensors, tree = taken_apart(state)
        pieces.update((name, _pieces(name, tensor)) for name, tensor in tensors.items())
        words = {name: _in_words(tensor) + _values_in_words(tensor) for name, tensor in tensors.items()}
        return {"folder": str(folder), "keep": str(keep), **words, **{name: repr(value) for name, value in leaves(tree)}}

    agree(group, outline)
    from torch.distributed import checkpoint  # late: it takes half a second

    from autopar.checkpoint.writing import Planner, Writer

    writer = Writer(Path(folder), tree, keep)
    try:
        with _told(f"no checkpoint was written to {folder}", group):
            checkpoint.save(dict(tensors), storage_writer=writer, planner=Planner(tensors, pieces), process_group=group, no_dist=alone())
    except BaseException:
        writer.abandon()
        raise
    return writer.path


def load(folder: str | os.PathLike[str], state: Mapping[str, Any], *, strict: bool = True, group: Group = None) -> Any:
    """Fill a state from the newest whole checkpoint of a folder, or from the one that is named. All ranks call it.

    Args:
        folder: that ``save`` was given, or one of the checkpoints in it.
        state: of the form that was saved, on any mesh, with any placements. Its tensors are filled in place.
        strict: what only one of both has is an error; else it is left as it is.
        group: of the ranks that load; ``None``: all.

    Returns:
        The state as it was saved: its plain values, and at their places the tensors of ``state``; ``None`` for those that
        it lacks.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it does not fit the state, has been changed, or is of a newer version; or ranks bring different
            states. No tensor has been touched then. Or a rank cannot read on.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    tree: Tree = None

    def outline() -> dict[str, str]:
        nonlocal tensors, tree
        tensors, tree = taken_apart(state)
        return {"folder": str(folder), "strict": str(strict), **{name: _in_words(tensor) for name, tensor in tensors.items()}}

    agree(group, outline)
    path, manifest = from_first(group, lambda: (path := chosen(folder), read_manifest(path)))

    from torch.distributed import checkpoint  # late: it takes half a second

    from autopar.checkpoint.reading import Planner, Reader, verify

    def check() -> None:
        check_fit(path, manifest, tensors, tree, strict)
        pieces.update((name, _pieces(name, tensor)) for name, tensor in tensors.items() if name in manifest.tensors)
        verify(path, manifest.files[rank_in(group) :: len(ranks_of(group))])

    everywhere(group, check)
    with _told(f"{path} could not be loaded", group):
        checkpoint.load(dict(tensors), storage_reader=Reader(path, manifest), planner=Planner(pieces), process_group=group, no_dist=alone())
    return put_together(manifest.tree, tensors)


def _pieces(name: str, tensor: torch.Tensor) -> list[Piece]:
    """``TypeError`` and ``ValueError`` where a tensor is none that a checkpoint can keep."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a checkpoint keeps plain tensors and DTensors")
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        kind = described(tensor.dtype, tuple(tensor.shape)) if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} is {kind}, which a checkpoint cannot keep; it keeps dense tensors of {', '.join(str(one).removeprefix('torch.') for one in DTYPES)}")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; to_empty() and init it")
    return pieces_of(name, tensor)


def _in_words(tensor: torch.Tensor) -> str:
    """The same on all ranks that hold the same tensor."""
    words = described(tensor.dtype, tuple(tensor.shape))
    return f"{words} {tuple(tensor.placements)} on {tuple(tensor.device_mesh.shape)}" if is_dtensor(tensor) else words  # type: ignore[attr-defined]


def _values_in_words(tensor: torch.Tensor) -> str:
    """Of a whole tensor of whole numbers, such as the state of a generator: the ranks' may differ, and one would be lost."""
    if is_dtensor(tensor) or tensor.is_floating_point() or tensor.is_complex() or tensor.nbytes > SMALL:
        return ""
    return f" with the CRC-32 {zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()):08x}"


@contextmanager
def _told(what: str, group: Group) -> Iterator[None]:
    """What fails inside of torch's checkpoints is an error of ours: theirs is none that ``except Exception`` sees.

    Raises:
        CheckpointError: names the first rank that failed.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process may be alone
            yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if isinstance(failure.failures.get(rank_in(group), (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise CheckpointError(f"{what}: rank {ranks_of(group)[rank]}: {error}") from error
    except RuntimeError as error:
        raise lost(error, what) from error
