"""Return what an error says to whoever made a call that is refused."""

from __future__ import annotations

from typing import Any


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")
