"""Python's garbage collector, out of the way while many long-lived nodes are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No full garbage collections while many long-lived nodes are made: each takes a fifth of a second or more, at
    random, in a process that has torch loaded, and finds nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
