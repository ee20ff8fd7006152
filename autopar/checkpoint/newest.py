"""Find the checkpoint to load: the newest of a folder that all ranks find whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.checkpoint.files import verify
from autopar.checkpoint.folder import meant_by, read_manifest
from autopar.checkpoint.manifest import DamageError, Manifest, StoredFile, what_of
from autopar.checkpoint.together import Group, everywhere, from_first, rank_in, ranks_of
from autopar.errors import CheckpointError


def newest_whole(path: Path, check: Callable[[Path, Manifest], None], group: Group) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint that a path means: itself, or the newest of a folder that is as it was written. All ranks call it.

    Each rank reads a share of the files. What one of them finds damaged, no rank loads: all take the one before.

    Args:
        check: raises where a checkpoint does not fit what is loaded. It is no damage, so no other one is taken.

    Returns:
        Its path, its manifest, and what is wrong with newer ones.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: none is as it was written; tells of each why. Or what ``check`` raised, on all ranks.
    """
    paths = from_first(group, lambda: meant_by(path))
    damages: list[str] = []
    for checkpoint in paths:
        manifest, error = _examined(checkpoint, check, group)
        if manifest is not None:
            return checkpoint, manifest, damages
        assert error is not None
        if checkpoint == path:
            raise error
        damages.append(what_of(error))
    lines = "".join(f"\n    {damage}" for damage in damages)
    raise CheckpointError(f"{path} has no whole checkpoint{lines}\n  restore the files from a copy, or name a folder with another checkpoint")


def _examined(checkpoint: Path, check: Callable[[Path, Manifest], None], group: Group) -> tuple[Manifest | None, CheckpointError | None]:
    """The manifest of a checkpoint that is whole for all ranks, or what is wrong."""
    manifest, error = from_first(group, lambda: _described(checkpoint))
    if manifest is None:
        return None, error
    everywhere(group, lambda: check(checkpoint, manifest))
    share = manifest.files[rank_in(group) :: len(ranks_of(group))]
    error = next(filter(None, everywhere(group, lambda: _damage(checkpoint, share))), None)
    return (manifest if error is None else None), error


def _described(checkpoint: Path) -> tuple[Manifest | None, CheckpointError | None]:
    """The manifest, or what is wrong."""
    try:
        return read_manifest(checkpoint), None
    except CheckpointError as error:
        return None, error


def _damage(checkpoint: Path, share: Sequence[StoredFile]) -> CheckpointError | None:
    try:
        return verify(checkpoint, share)
    except DamageError as error:
        return error
