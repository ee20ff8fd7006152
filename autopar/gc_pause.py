"""Pause Python's garbage collector while many long-lived nodes are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable full garbage collections in a block that makes many long-lived nodes.

    In a process that has torch loaded, each collection takes a fifth of a second or more at a random time, and finds
    nothing.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
