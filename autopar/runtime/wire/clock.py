"""Read the clock that all ranks of a host share, and sleep until a time."""

from __future__ import annotations

import time

now = time.monotonic  # CLOCK_MONOTONIC: one for all processes of a host


def sleep_until(deadline: float) -> None:
    """Sleep until ``deadline``, or at most some 0.1 ms longer on an idle machine. It does not spin."""
    while (left := deadline - now()) > 0:
        time.sleep(left)
