"""Mark the waits of this process for other ranks, in the steps that are measured.

On an accelerator the host does not wait for data, the stream does. A wait of the host counts there as the time in which
the device has nothing to do.
"""

from __future__ import annotations

from typing import Any

from autopar.runtime.marks import HostMarks

Waits = list[tuple[Any, Any]]  # the marks of their begins and ends

_measured: list[tuple[HostMarks, Waits]] = []  # none or one: of the step that is measured


def wait_begins() -> Any:
    """Return the mark of a wait that begins now."""
    return _measured[0][0].mark() if _measured else None


def wait_ends(begun: Any) -> None:
    """Keep a wait that ends now, which ``begun`` marks, if a step is measured."""
    if _measured and begun is not None:
        marks, waits = _measured[0]
        waits.append((begun, marks.mark()))


def mark_waits(marks: HostMarks | None) -> Waits:
    """Mark the waits from now on. Returns the list that receives them. ``None``: mark no more."""
    waits: Waits = []
    _measured[:] = [] if marks is None else [(marks, waits)]
    return waits
