"""Print last words and end a process, even if its main thread is blocked forever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

SAID = "autopar-last-message"  # an empty file, beside the error files of this host's ranks


def say(text: str, prefix: str = "") -> None:
    """Write to stderr past Python's buffers and their locks, which a blocked thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, "".join(prefix + line for line in text.splitlines(keepends=True)).encode(errors="replace"))


def say_for_host(text: str) -> None:
    """Say the last message of this host, unless another of its ranks has done so.

    The ranks of a host may have lost the store, and cannot agree through it. torchrun gives their error files a folder
    for each start of the job, and removes it at the end.
    """
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this start>/<local rank>/error.json
    if errors:
        try:
            os.close(os.open(Path(errors).parents[1] / SAID, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        except OSError:
            pass  # no such folder, or a full disk: rather two messages than none
    say(text)


def leave() -> NoReturn:
    """End this process now. Its printed output is flushed if possible."""
    flush = threading.Thread(target=_flush, daemon=True)  # it may wait for a lock of the main thread
    flush.start()
    flush.join(1.0)
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
