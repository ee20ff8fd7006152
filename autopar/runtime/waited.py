"""Count the seconds that this process waits for other ranks.

Waits on an accelerator are not counted: its host does not wait.
"""

from __future__ import annotations

import time

_seconds = 0.0


def waited() -> float:
    """Return the seconds that this process has waited so far."""
    return _seconds


def add_wait(begun: float) -> None:
    """Count a wait that ends now. ``begun``: ``time.perf_counter()`` when it began."""
    global _seconds
    _seconds += time.perf_counter() - begun
