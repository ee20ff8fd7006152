"""The bytes of files: forced to disk, and read again as they were written."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from autopar.checkpoint.manifest import StoredFile, changed
from autopar.checkpoint.pieces import STRETCH


def write(path: Path, text: str) -> None:
    """Write a file and force it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def force(folder: Path) -> None:
    """Force the names in a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have nothing to force there
            raise
    finally:
        os.close(opened)


def fill(file: BinaryIO, view: memoryview) -> None:
    """Read as many bytes as ``view`` has; ``EOFError`` where there are fewer."""
    got = 0
    while got < len(view):
        count = file.readinto(view[got:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it ends before what the manifest says is in it")
        got += count


def verify(checkpoint: Path, files: Sequence[StoredFile]) -> None:
    """Read files from end to end, and compare their checksums.

    Raises:
        CheckpointError: one is not as it was written.
    """
    buffer = memoryview(bytearray(STRETCH))
    for stored in files:
        path, checksum, left = checkpoint / stored.name, 0, stored.bytes
        with open(path, "rb", buffering=0) as file:
            while left:
                view = buffer[: min(left, STRETCH)]
                try:
                    fill(file, view)
                except EOFError:
                    raise changed(path, "it is shorter") from None
                checksum, left = zlib.crc32(view, checksum), left - len(view)
        if checksum != stored.crc32:
            raise changed(path, "its CRC-32 is another")
