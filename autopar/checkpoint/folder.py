"""Manage a folder of checkpoints on disk, in which every checkpoint is complete, even if a process is killed at any
time.

    checkpoint-000011/     checkpoint.json  rank-00000.safetensors  rank-00001.safetensors
    checkpoint-000012/     …
    latest                 checkpoint-000012
    .writing-000013-9f2c01ab/  an unfinished save: never read, removed by the next save

A checkpoint is written under a temporary name. Its files and then its folder are forced to disk, and only then is the
folder renamed, which a file system does atomically. So a folder ``checkpoint-…`` is complete. Old checkpoints are
renamed before they are removed, for the same reason. ``latest`` is for people and scripts; a load searches for the
newest checkpoint itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopar.checkpoint import files
from autopar.checkpoint.manifest import NAME, DamageError, Manifest, problem_of
from autopar.checkpoint.parsing import parse
from autopar.errors import CheckpointError

COMPLETE, WRITING, REMOVING = "checkpoint-", ".writing-", ".removing-"
LATEST = "latest"
NUMBERED = re.compile(rf"({COMPLETE}|{re.escape(WRITING)}|{re.escape(REMOVING)})(\d+)(?:-[0-9a-f]+)?")


# -- reading ------------------------------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, or ``None``. Checks the manifest's SHA-256 and the sizes of
    its files, and reads no tensor."""
    return next((path for path in checkpoints_in(folder_of(folder)) if not incompleteness_of(path)), None)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` replaced by the user's folder. ``CheckpointError`` if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} begins with the home folder of an unknown user; write the path in full"
        ) from error


def no_folder(path: Path) -> str:
    """Return the error for a path that is not a folder."""
    problem = f"{path} is a file, and no folder" if path.exists() else f"there is no folder {path}"
    return f"{problem}; name the folder that you passed to autopar.checkpoint.save, or a checkpoint in it"


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints at a path, the newest first: the path itself, or the checkpoints in it.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; name the folder that you passed to autopar.checkpoint.save"
        ) from error
    if not is_folder:
        raise FileNotFoundError(no_folder(path))
    if (path / NAME).is_file() or NUMBERED.fullmatch(path.name):
        return [path]
    if checkpoints := checkpoints_in(path):
        return checkpoints
    raise FileNotFoundError(
        f"{path} has no complete checkpoint\n  name the folder that you passed to autopar.checkpoint.save"
    )


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that its files exist and have the sizes that they were written with.

    Raises:
        CheckpointError: it is no checkpoint, has a newer version, or has changed since it was written.
    """
    try:
        path = checkpoint / NAME
        if not path.is_file():
            raise CheckpointError(
                f"{checkpoint} has no {NAME}, so it is no checkpoint; load a folder that autopar.checkpoint.save has "
                f"written"
            )
        manifest = parse(path.read_bytes(), path)
        for file in manifest.files:
            path = checkpoint / file.name
            if not path.is_file():
                raise DamageError(f"{path} is missing")
            if (size := path.stat().st_size) != file.bytes:
                raise DamageError(f"{path} has {size} bytes, and was written with {file.bytes}")
        return manifest
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error.strerror}") from error


def incompleteness_of(checkpoint: Path) -> str:
    """Describe why a checkpoint is not complete; empty if it is."""
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        return problem_of(error)
    return ""


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders that have the name of a complete checkpoint, the newest first."""
    return [path for number, kind, path in sorted(_entries(folder), reverse=True) if kind == COMPLETE and path.is_dir()]


def _entries(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield number, kind and path of the entries that this module has made in a folder."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := NUMBERED.fullmatch(path.name):
            yield int(match[2]), match[1], path


# -- writing ------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """Make a temporary folder to write a checkpoint to; unfinished saves are removed."""
    files.make(folder)
    entries = list(_entries(folder))
    for _, kind, path in entries:
        if kind != COMPLETE:
            files.remove(path)
    number = 1 + max((number for number, _, _ in entries), default=0)
    # differs from the name of an interrupted save, which may still be writing
    place = folder / f"{WRITING}{number:06}-{secrets.token_hex(4)}"
    files.make(place)
    return place


def finished_name(place: Path) -> Path:
    """Return the path that a checkpoint gets when it is complete."""
    return place.with_name(COMPLETE + place.name.removeprefix(WRITING).partition("-")[0])


def finish(place: Path, manifest: Manifest) -> Path:
    """Turn the files that were written to ``place`` and forced to disk into a checkpoint.

    Raises:
        CheckpointError: a file is missing or has another size; or another save has taken the name.
    """
    check_place(place)
    for file in manifest.files:
        path = place / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise CheckpointError(
                f"{path} is not the file that a rank has written there; let all ranks have the same folder, on a file "
                f"system that they share"
            )
    files.write(place / NAME, manifest.text())
    files.force_names(place)
    path = finished_name(place)
    if path.exists():
        raise CheckpointError(
            f"{path} is there already: another job may be saving into {place.parent}; give each a folder of its own"
        )
    files.rename(place, path)
    try:
        files.force_names(path.parent)
    except OSError:
        files.rename(path, place)  # the new name may be lost if the machine stops, so it is taken back
        raise
    return path


def check_place(place: Path) -> None:
    """Raise ``CheckpointError`` if the temporary folder of a save has been removed."""
    if not place.is_dir():
        raise CheckpointError(
            f"{place} was removed while it was written, as a save of another job does; give each job a folder of its "
            f"own"
        )


def tidy(checkpoint: Path, keep: int | None) -> None:
    """Point ``latest`` to a new checkpoint, and remove all but the ``keep`` newest complete ones.

    The new checkpoint is complete, so a failure here is only a warning.
    """
    folder = checkpoint.parent
    try:
        pointer = folder / f".{LATEST}"
        files.write(pointer, f"{checkpoint.name}\n")
        files.rename(pointer, folder / LATEST)
        files.force_names(folder)
        whole = [path for path in checkpoints_in(folder) if not incompleteness_of(path)]
        for path in whole[keep:] if keep is not None else ():
            removed = path.with_name(REMOVING + path.name.removeprefix(COMPLETE))
            files.rename(path, removed)
            files.force_names(folder)
            files.remove(removed)
    except OSError as error:
        warnings.warn(f"{checkpoint} is complete, but old checkpoints could not be removed: {error}", stacklevel=2)


def abandon(place: Path) -> None:
    """Remove an unfinished save, if possible."""
    with contextlib.suppress(OSError):
        files.remove(place)
