"""Note beside the checkpoints how far a job has come, so that its next start can say how many steps were lost.

The first rank of each host writes the number of its last step to a file of a few bytes, which is not forced to disk: a
system call a step. What a lost host has written may be lost, too; the hosts that are left have theirs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autopar.checkpoint.collective_errors import on_all_ranks, on_first_rank
from autopar.checkpoint.folder import folder_of

PREFIX = ".reached-"  # no name of a checkpoint, so saves and loads leave it alone
WIDTH = 20  # digits, so that a shorter number overwrites a longer one


class Reached:
    """The numbers of the last steps. All ranks make one, and call ``newest`` alike."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder_of(folder)
        self._file: int | None = None

    def newest(self) -> int:
        """Return the last step that any host has noted, 0 if there is none, and forget it. All ranks call it."""
        step = max(on_all_ranks(None, self._read))
        on_first_rank(None, self._forget)  # before any rank writes: a host that is gone must not count twice
        return step

    def note(self, step: int) -> None:
        """Note that a step has ended. Only the first rank of a host writes."""
        if int(os.environ.get("LOCAL_RANK") or 0) == 0:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"{PREFIX}{int(os.environ.get('GROUP_RANK') or 0):05}"
                self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self._file, f"{step:{WIDTH}}".encode(), 0)

    def close(self) -> None:
        """Close the file, if this rank has one."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{PREFIX}*"))

    def _read(self) -> int:
        steps = [0]
        for file in self._files():
            with contextlib.suppress(OSError, ValueError):  # of a host that was lost while it wrote
                steps.append(int(file.read_text()))
        return max(steps)

    def _forget(self) -> None:
        for file in self._files():
            with contextlib.suppress(OSError):
                file.unlink()
