"""Write the files of a save by a few operations, and read and verify stored files.

A save touches the disk only through ``OPERATIONS``, so that tests can interrupt it before, within and after each of
them.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from autopar.checkpoint.manifest import DamageError, StoredFile
from autopar.checkpoint.pieces import STRETCH

OPERATIONS = ("make", "create", "append", "force", "force_names", "rename", "remove")

# -- writing ------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make a folder, and its parents."""
    folder.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> BinaryIO:
    """Create an empty file, open for writing."""
    return open(path, "wb")


def append(file: BinaryIO, block: bytes | memoryview) -> None:
    """Write bytes to the end of a file."""
    file.write(block)


def force(file: BinaryIO) -> None:
    """Force the bytes of a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def force_names(folder: Path) -> None:
    """Force the names in a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot force names
            raise
    finally:
        os.close(opened)


def rename(old: Path, new: Path) -> None:
    """Rename a file or a folder atomically; a file of the new name is replaced."""
    os.replace(old, new)


def remove(folder: Path) -> None:
    """Remove a folder and its contents; of a symbolic link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def remedy(error: OSError) -> str:
    """Return the remedy for an error of writing."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (
        f"{'make room, or ' * full}name another folder{', where this process may write' * (not full)}, and save again"
    )


def write(path: Path, text: str) -> None:
    """Write a file and force it to disk."""
    with create(path) as file:
        append(file, text.encode())
        force(file)


# -- reading ------------------------------------------------------------------------------------------------------


def fill(file: BinaryIO, view: memoryview) -> None:
    """Fill ``view`` with bytes of a file; ``EOFError`` if the file has fewer."""
    filled = 0
    while filled < len(view):
        count = cast(io.BufferedReader, file).readinto(view[filled:])
        if not count:
            raise EOFError("it is shorter than the manifest says")
        filled += count


def verify(checkpoint: Path, files: Sequence[StoredFile]) -> None:
    """Read files from end to end, and compare their checksums.

    Raises:
        DamageError: a file has changed since it was written, or cannot be read.
    """
    buffer = memoryview(bytearray(STRETCH))
    for stored in files:
        path, checksum, left = checkpoint / stored.name, 0, stored.bytes
        try:
            with open(path, "rb", buffering=0) as file:
                while left:
                    view = buffer[: min(left, STRETCH)]
                    fill(file, view)
                    checksum, left = zlib.crc32(view, checksum), left - len(view)
        except EOFError:
            raise DamageError.changed(path, "it is shorter") from None
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error.strerror}") from error
        if checksum != stored.crc32:
            raise DamageError.changed(path, "its CRC-32 differs")
