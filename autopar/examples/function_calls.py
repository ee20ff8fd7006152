"""Count the functions that Python enters: a measure of work that does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def function_calls(function: Callable[[], object], builtins: bool = False) -> int:
    """Return how many Python functions are entered while ``function()`` runs; with ``builtins``, those of C too."""
    events = ("call", "c_call") if builtins else ("call",)
    count = 0

    def entered(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in events

    sys.setprofile(entered)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
