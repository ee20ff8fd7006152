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

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopar.checkpoint.files import force, write
from autopar.checkpoint.manifest import NAME, Manifest, changed, parse
from autopar.errors import CheckpointError

WHOLE, WRITING, REMOVING = "checkpoint-", ".writing-", ".removing-"
LATEST = "latest"
NUMBERED = re.compile(rf"({WHOLE}|{re.escape(WRITING)}|{re.escape(REMOVING)})(\d+)(?:-[0-9a-f]+)?")


# -- reading ------------------------------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a folder, ``None`` where there is none. Looks at the sizes of its files, and no further."""
    return next((path for path in checkpoints_in(Path(folder)) if not missing_from(path)), None)


def chosen(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a folder of them.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is not whole.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}; name the one that autopar.checkpoint.save was given, or a checkpoint in it")
    if (path / NAME).is_file() or NUMBERED.fullmatch(path.name):
        if said := missing_from(path):
            raise CheckpointError(said)
        return path
    there = checkpoints_in(path)
    newest = latest(path)
    if newest is None:
        said = "".join(f"\n    {missing_from(one)}" for one in there)
        raise FileNotFoundError(f"{path} has no whole checkpoint{said}\n  name the folder that autopar.checkpoint.save was given")
    for damaged in there[: there.index(newest)]:
        warnings.warn(f"{missing_from(damaged)}; {newest.name} is taken, which is the newest whole one", stacklevel=2)
    return newest


def read_manifest(checkpoint: Path) -> Manifest:
    """``CheckpointError`` where it is no checkpoint, or not as it was written."""
    path = checkpoint / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {NAME}, so it is no checkpoint; load a folder that autopar.checkpoint.save has written") from None
    except UnicodeDecodeError:
        raise changed(path, "it is no text") from None
    return parse(text, path)


def missing_from(checkpoint: Path) -> str:
    """What a checkpoint lacks to be whole, in words; empty where it is."""
    try:
        for file in read_manifest(checkpoint).files:
            path = checkpoint / file.name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != file.bytes:
                return f"{path} has {path.stat().st_size} bytes, and was written with {file.bytes}"
    except CheckpointError as error:
        return str(error)
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
    folder.mkdir(parents=True, exist_ok=True)
    there = list(_entries(folder))
    for _, kind, path in there:
        if kind != WHOLE:
            shutil.rmtree(path)
    number = 1 + max((number for number, _, _ in there), default=0)
    place = folder / f"{WRITING}{number:06}-{secrets.token_hex(4)}"  # another than that of a save which was ended, and may go on
    place.mkdir()
    return place


def finished_name(place: Path) -> Path:
    """The path that a checkpoint has when it is whole."""
    return place.with_name(WHOLE + place.name.removeprefix(WRITING).partition("-")[0])


def finish(place: Path, manifest: Manifest) -> Path:
    """Make what was written to ``place``, and forced to disk, a checkpoint.

    Raises:
        CheckpointError: a file is not there, or has another size.
    """
    for file in manifest.files:
        path = place / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise CheckpointError(f"{path} is not what a rank has written there; let all ranks have the same folder, on a file system that they share")
    write(place / NAME, manifest.text())
    force(place)
    path = finished_name(place)
    os.rename(place, path)
    force(path.parent)
    return path


def tidy(checkpoint: Path, keep: int | None) -> None:
    """Point ``latest`` to a new checkpoint, and remove old ones: but the ``keep`` newest that are whole. The new one is
    whole, so what fails here is a warning."""
    folder = checkpoint.parent
    try:
        fresh = folder / f".{LATEST}"
        write(fresh, f"{checkpoint.name}\n")
        os.replace(fresh, folder / LATEST)
        force(folder)
        whole = [path for path in checkpoints_in(folder) if not missing_from(path)]
        for path in whole[keep:] if keep is not None else ():
            gone = path.with_name(REMOVING + path.name.removeprefix(WHOLE))
            os.rename(path, gone)
            shutil.rmtree(gone)
    except OSError as error:
        warnings.warn(f"{checkpoint} is whole, but the folder could not be tidied: {error}", stacklevel=2)


def abandon(place: Path) -> None:
    """Remove what was not finished, as far as that is possible."""
    shutil.rmtree(place, ignore_errors=True)
