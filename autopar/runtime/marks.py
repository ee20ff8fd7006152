"""Mark moments on the device that computes: by the clock of the host, or by events of an accelerator.

An event is passed when the work that the present stream was given before is done, and the host goes on at once. So the
seconds between two marks are those of the device: what a line computes, or what the stream waits for a message. Where
the device has nothing to do, the seconds are those in which the host launches.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostMarks:
    """Moments by the clock of the host.

    Attributes:
        every: of so many steps, one is marked where nobody asks for it.
    """

    every = 1

    def mark(self) -> Any:
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that have passed."""
        seconds: float = end - begin
        return seconds

    def have_passed(self, last: Any) -> bool:
        """Return whether a mark has passed, and with it those before it. Does not wait."""
        return True

    def settle(self) -> None:
        """Wait until all marks have passed."""


class EventMarks(HostMarks):
    """Moments by events on the present stream of an accelerator."""

    every = 8  # events around each wait take microseconds of the host

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def have_passed(self, last: Any) -> bool:
        passed: bool = last.query()
        return passed

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)


def marks_of(device: torch.device) -> HostMarks:
    """Return the marks of a device."""
    return HostMarks() if device.type in ("cpu", "meta") else EventMarks(device)


# -- waits for other ranks ---------------------------------------------------------------------------------------------
#
# Mark the waits of this process for other ranks, in the steps that are measured.
#
# On an accelerator the host does not wait for data, the stream does. A wait of the host counts there as the time in
# which the device has nothing to do.


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
