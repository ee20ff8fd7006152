"""Load the files of one checkpoint into the pieces of this rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.collective_errors import Group, agree, is_single_process, rank_in, torch_failures
from autopar.checkpoint.fit import check_fit
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.newest import newest_whole
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.tensors import check_tensor, describe_tensor
from autopar.checkpoint.values import Tree, decode_state, encode_state


def load(folder: str | os.PathLike[str], state: Mapping[str, Any], *, strict: bool = True, group: Group = None) -> Any:
    """Fill a state from the newest complete checkpoint of a folder, or from a named one. All ranks call this.

    A damaged checkpoint in a folder, even by a single bit, is skipped with a warning.

    Args:
        folder: the folder that was passed to ``save``, or one of the checkpoints in it.
        state: a state of the form that was saved, on any mesh, with any placements. Its tensors are filled in place.
        strict: whether an entry that only the checkpoint or only the state has is an error; else it is ignored.
        group: the ranks that load; ``None``: all.

    Returns:
        The state as it was saved: its plain values, and the tensors of ``state`` in their places; ``None`` for tensors
        that ``state`` lacks.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint does not fit the state, is damaged (in a folder: all are), or has a newer
            version; or ranks pass different states. In these cases no tensor has been touched. Or a rank cannot read a
            file to its end.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    tree: Tree = None

    def outline() -> dict[str, str]:
        nonlocal tensors, tree
        tensors, tree = encode_state(state)
        return {
            "folder": str(folder),
            "strict": str(strict),
            **{name: describe_tensor(tensor) for name, tensor in tensors.items()},
        }

    def check(path: Path, manifest: Manifest) -> None:
        check_fit(str(path), manifest, tensors, tree, strict)
        for name in filter(manifest.tensors.__contains__, tensors):
            check_tensor(name, tensors[name])
            pieces[name] = pieces_of(name, tensors[name])

    agree(group, outline)
    path, manifest, damages = newest_whole(folder_of(folder), check, group)

    from torch.distributed import checkpoint  # imported here because it takes half a second

    from autopar.checkpoint.reading import CheckpointReader, ReadPlanner

    with torch_failures(f"{path} could not be loaded", group):
        checkpoint.load(
            dict(tensors),
            storage_reader=CheckpointReader(path, manifest),
            planner=ReadPlanner(pieces),
            process_group=group,
            no_dist=is_single_process(),
        )
    if damages and rank_in(group) == 0:  # last, because where warnings are errors no other rank may wait for this one
        warnings.warn(f"{'; '.join(damages)}; {path.name} is taken, which is the newest whole one", stacklevel=2)
    return decode_state(manifest.tree, tensors)
