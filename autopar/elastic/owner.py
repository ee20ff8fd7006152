"""Let one start of a job own the folder of its checkpoints, so that two cannot train side by side without knowing it.

torchrun gives up a host whose keep-alives come too late, and starts the job on the others. If the host is only slow,
its ranks go on. Both would write checkpoints into one folder. So each start writes its own sign into the folder, and
looks for it before each save.
"""

from __future__ import annotations

import os
import uuid

from autopar.checkpoint.collective_errors import on_first_rank
from autopar.checkpoint.folder import folder_of
from autopar.errors import CheckpointError

NAME = ".owner"


class Owner:
    """The sign of this start of a job. All ranks make the same calls."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder_of(folder)
        self._sign = ""

    def claim(self) -> None:
        """Own the folder from now on."""
        self._sign = on_first_rank(None, self._written)

    def check(self) -> None:
        """Raise ``CheckpointError`` on all ranks if another start has claimed the folder since."""
        on_first_rank(None, self._compare)

    def _written(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        sign = uuid.uuid4().hex
        written = self._folder / f"{NAME}-{sign}"
        written.write_text(sign)
        os.replace(written, self._folder / NAME)
        return sign

    def _compare(self) -> None:
        file = self._folder / NAME
        if file.exists() and file.read_text() != self._sign:
            raise CheckpointError(
                f"another start of this training has taken {self._folder} and goes on without these ranks, which end "
                f"here\n  under torchrun they join it; if it happens again, raise keep_alive_max_attempt in "
                f"--rdzv-conf; and give each training a folder of its own"
            )
