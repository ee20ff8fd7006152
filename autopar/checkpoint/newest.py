"""Find the checkpoint to load: the newest checkpoint of a folder that is complete for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.checkpoint.collective_errors import Group, on_all_ranks, on_first_rank, rank_in, ranks_of
from autopar.checkpoint.files import verify
from autopar.checkpoint.folder import checkpoints_at, read_manifest
from autopar.checkpoint.manifest import DamageError, Manifest, StoredFile, problem_of
from autopar.errors import CheckpointError


def newest_whole(path: Path, check: Callable[[Path, Manifest], None], group: Group) -> tuple[Path, Manifest, list[str]]:
    """Return the checkpoint at a path: the path itself, or the newest undamaged checkpoint in it. All ranks call this.

    Each rank reads a share of the files. If one rank finds damage, no rank loads that checkpoint, and all take the one
    before.

    Args:
        check: raises if a checkpoint does not fit the state. That is no damage, so no other checkpoint is tried.

    Returns:
        Its path, its manifest, and descriptions of the damage of newer ones.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: all are damaged; describes each. Or ``check`` raised, on any rank.
    """
    paths = on_first_rank(group, lambda: checkpoints_at(path))
    damages: list[str] = []
    for checkpoint in paths:
        manifest, error = _examined(checkpoint, check, group)
        if manifest is not None:
            return checkpoint, manifest, damages
        assert error is not None
        if checkpoint == path:
            raise error
        damages.append(problem_of(error))
    lines = "".join(f"\n    {damage}" for damage in damages)
    raise CheckpointError(
        f"{path} has no complete checkpoint{lines}\n  restore the files from a copy, or name a folder with another "
        f"checkpoint"
    )


def _examined(
    checkpoint: Path, check: Callable[[Path, Manifest], None], group: Group
) -> tuple[Manifest | None, CheckpointError | None]:
    """Return the manifest of a checkpoint if it is complete for all ranks, or else the error."""
    manifest, error = on_first_rank(group, lambda: _read(checkpoint))
    if manifest is None:
        return None, error
    on_all_ranks(group, lambda: check(checkpoint, manifest))
    share = manifest.files[rank_in(group) :: len(ranks_of(group))]
    error = next(filter(None, on_all_ranks(group, lambda: _damage(checkpoint, share))), None)
    return (manifest if error is None else None), error


def _read(checkpoint: Path) -> tuple[Manifest | None, CheckpointError | None]:
    """Return the manifest, or the error."""
    try:
        return read_manifest(checkpoint), None
    except CheckpointError as error:
        return None, error


def _damage(checkpoint: Path, share: Sequence[StoredFile]) -> CheckpointError | None:
    try:
        verify(checkpoint, share)
    except DamageError as error:
        return error
    return None
