"""Print last words and end a process, even if its main thread is blocked forever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn


def say(text: str, prefix: str = "") -> None:
    """Write to stderr past Python's buffers and their locks, which a blocked thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, "".join(prefix + line for line in text.splitlines(keepends=True)).encode(errors="replace"))


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
