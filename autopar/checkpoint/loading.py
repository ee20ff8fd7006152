"""Loading: from the files of one checkpoint into the pieces of this rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.fit import check_fit
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.newest import newest_whole
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.tensors import check_tensor, in_words
from autopar.checkpoint.together import Group, agree, alone, rank_in, torch_failures
from autopar.checkpoint.values import Tree, put_together, taken_apart


def load(folder: str | os.PathLike[str], state: Mapping[str, Any], *, strict: bool = True, group: Group = None) -> Any:
    """Fill a state from the newest whole checkpoint of a folder, or from the one that is named. All ranks call it.

    A checkpoint of a folder that was damaged, by as little as a bit, is passed over with a warning.

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
        CheckpointError: it does not fit the state, is damaged (of a folder: all are), or is of a newer version; or ranks
            bring different states. No tensor has been touched then. Or a rank cannot read on.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    tree: Tree = None

    def outline() -> dict[str, str]:
        nonlocal tensors, tree
        tensors, tree = taken_apart(state)
        return {"folder": str(folder), "strict": str(strict), **{name: in_words(tensor) for name, tensor in tensors.items()}}

    def check(path: Path, manifest: Manifest) -> None:
        check_fit(str(path), manifest, tensors, tree, strict)
        for name in filter(manifest.tensors.__contains__, tensors):
            check_tensor(name, tensors[name])
            pieces[name] = pieces_of(name, tensors[name])

    agree(group, outline)
    path, manifest, damages = newest_whole(folder_of(folder), check, group)

    from torch.distributed import checkpoint  # late: it takes half a second

    from autopar.checkpoint.reading import Reader, ReadPlanner

    with torch_failures(f"{path} could not be loaded", group):
        checkpoint.load(dict(tensors), storage_reader=Reader(path, manifest), planner=ReadPlanner(pieces), process_group=group, no_dist=alone())
    if damages and rank_in(group) == 0:  # where warnings are errors, no other rank waits for this one any more
        warnings.warn(f"{'; '.join(damages)}; {path.name} is taken, which is the newest whole one", stacklevel=2)
    return put_together(manifest.tree, tensors)
