"""Loading: from the files of one checkpoint into the pieces of this rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from autopar.checkpoint.files import verify
from autopar.checkpoint.fit import check_fit
from autopar.checkpoint.folder import chosen, read_manifest
from autopar.checkpoint.pieces import Piece, pieces_of
from autopar.checkpoint.tensors import check_tensor, in_words
from autopar.checkpoint.together import Group, agree, alone, everywhere, from_first, rank_in, ranks_of, torch_failures
from autopar.checkpoint.values import Tree, put_together, taken_apart


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
        return {"folder": str(folder), "strict": str(strict), **{name: in_words(tensor) for name, tensor in tensors.items()}}

    agree(group, outline)
    path, manifest = from_first(group, lambda: (path := chosen(folder), read_manifest(path)))

    from torch.distributed import checkpoint  # late: it takes half a second

    from autopar.checkpoint.reading import Planner, Reader

    def check() -> None:
        check_fit(path, manifest, tensors, tree, strict)
        for name in filter(manifest.tensors.__contains__, tensors):
            check_tensor(name, tensors[name])
            pieces[name] = pieces_of(name, tensors[name])
        verify(path, manifest.files[rank_in(group) :: len(ranks_of(group))])

    everywhere(group, check)
    with torch_failures(f"{path} could not be loaded", group):
        checkpoint.load(dict(tensors), storage_reader=Reader(path, manifest), planner=Planner(pieces), process_group=group, no_dist=alone())
    return put_together(manifest.tree, tensors)
