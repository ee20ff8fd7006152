"""Check that the files which a command will write can be written, before it works for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autopar.cli.train.refused import Refused


def check_writable(option: str, path: str | None) -> None:
    """Raise ``Refused`` if a file cannot be written: there is no such folder, it is one, or it takes no files."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise Refused(f"there is no folder {folder} for {option} {path}; make it first")
    if Path(path).is_dir():
        raise Refused(f"{option} {path} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(
            f"the folder {folder} for {option} {path} cannot be written: {error.strerror}; name a file in another one"
        ) from None
