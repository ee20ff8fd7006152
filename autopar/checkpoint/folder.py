"""A folder of checkpoints on disk: each is whole or not there at all, whenever the processes are ended.

    checkpoint-000011/     checkpoint.json  rank-00000.safetensors  rank-00001.safetensors
    checkpoint-000012/     …
    latest                 checkpoint-000012
    .writing-000013-9f2c/  what a save has not finished: never looked at, removed by the next one

A checkpoint is written under a name that nobody looks for; its files, then the folder of them, are forced to disk, and only
then is it renamed, which a file system does at once or not at all. So a name ``checkpoint-…`` means a whole one. Old ones are
renamed before they are removed, for the same reason. ``latest`` is for people and scripts: here the newest is looked for.
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
from autopar.checkpoint.manifest import NAME, DamageError, Manifest, what_of
from autopar.checkpoint.parsing import parse
from autopar.errors import CheckpointError

WHOLE, WRITING, REMOVING = "checkpoint-", ".writing-", ".removing-"
LATEST = "latest"
NUMBERED = re.compile(rf"({WHOLE}|{re.escape(WRITING)}|{re.escape(REMOVING)})(\d+)(?:-[0-9a-f]+)?")


# -- reading ------------------------------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a folder, ``None`` where there is none. Looks at the sizes of its files, and no further."""
    return next((path for path in checkpoints_in(folder_of(folder)) if not missing_from(path)), None)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of that name; ``~`` is the user's own. ``CheckpointError`` where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path} begins with the folder of a user whom this machine does not know; write the path in full") from error


def meant_by(path: Path) -> list[Path]:
    """The checkpoints that a path may mean: itself, or those of a folder, the newest first.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        there = path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; name the folder that autopar.checkpoint.save was given") from error
    if not there:
        raise FileNotFoundError(f"there is no folder {path}; name the one that autopar.checkpoint.save was given, or a checkpoint in it")
    if (path / NAME).is_file() or NUMBERED.fullmatch(path.name):
        return [path]
    if found := checkpoints_in(path):
        return found
    raise FileNotFoundError(f"{path} has no whole checkpoint\n  name the folder that autopar.checkpoint.save was given")


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there, with the sizes that they were written with.

    Raises:
        CheckpointError: it is no checkpoint, of a newer version, or not as it was written.
    """
    try:
        path = checkpoint / NAME
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no {NAME}, so it is no checkpoint; load a folder that autopar.checkpoint.save has written")
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


def missing_from(checkpoint: Path) -> str:
    """What a checkpoint lacks to be whole, in words; empty where it is."""
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        return what_of(error)
    return ""


def checkpoints_in(folder: Path) -> list[Path]:
    """Those that have the name of a whole one, the newest first."""
    return [path for number, kind, path in sorted(_entries(folder), reverse=True) if kind == WHOLE and path.is_dir()]


def _entries(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Number, kind and path of what this module has made in a folder."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := NUMBERED.fullmatch(path.name):
            yield int(match[2]), match[1], path


# -- writing ------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """A fresh place to write a checkpoint to; what was not finished before is removed."""
    files.make(folder)
    there = list(_entries(folder))
    for _, kind, path in there:
        if kind != WHOLE:
            files.remove(path)
    number = 1 + max((number for number, _, _ in there), default=0)
    place = folder / f"{WRITING}{number:06}-{secrets.token_hex(4)}"  # another than that of a save which was ended, and may go on
    files.make(place)
    return place


def finished_name(place: Path) -> Path:
    """The path that a checkpoint has when it is whole."""
    return place.with_name(WHOLE + place.name.removeprefix(WRITING).partition("-")[0])


def finish(place: Path, manifest: Manifest) -> Path:
    """Make what was written to ``place``, and forced to disk, a checkpoint.

    Raises:
        CheckpointError: a file is not there, or has another size; or another save has taken its name.
    """
    check_place(place)
    for file in manifest.files:
        path = place / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise CheckpointError(f"{path} is not what a rank has written there; let all ranks have the same folder, on a file system that they share")
    files.write(place / NAME, manifest.text())
    files.force_names(place)
    path = finished_name(place)
    if path.exists():
        raise CheckpointError(f"{path} is there already, so two jobs save into {place.parent}; give each a folder of its own")
    files.rename(place, path)
    try:
        files.force_names(path.parent)
    except OSError:
        files.rename(path, place)  # it may be gone when the machine stops: there is none
        raise
    return path


def check_place(place: Path) -> None:
    """``CheckpointError`` where a save's place is not there any more."""
    if not place.is_dir():
        raise CheckpointError(f"{place} was removed while it was written, as a save of another job does; give each job a folder of its own")


def tidy(checkpoint: Path, keep: int | None) -> None:
    """Point ``latest`` to a new checkpoint, and remove old ones: but the ``keep`` newest that are whole. The new one is
    whole, so what fails here is a warning."""
    folder = checkpoint.parent
    try:
        fresh = folder / f".{LATEST}"
        files.write(fresh, f"{checkpoint.name}\n")
        files.rename(fresh, folder / LATEST)
        files.force_names(folder)
        whole = [path for path in checkpoints_in(folder) if not missing_from(path)]
        for path in whole[keep:] if keep is not None else ():
            gone = path.with_name(REMOVING + path.name.removeprefix(WHOLE))
            files.rename(path, gone)
            files.force_names(folder)
            files.remove(gone)
    except OSError as error:
        warnings.warn(f"{checkpoint} is whole, but the folder could not be tidied: {error}", stacklevel=2)


def abandon(place: Path) -> None:
    """Remove what was not finished, as far as that is possible."""
    with contextlib.suppress(OSError):
        files.remove(place)
