"""Time calls: some to warm up, then so many as a limit of seconds allows, and the median of these.

Several processes time a call together: all begin at once, and the time of a call is that of its slowest rank. They
agree on the number of calls, so that none waits for another in a collective.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed

from autopar.runtime.marks import marks_of

Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long one call is timed.

    Attributes:
        warm: calls before those that are timed.
        seconds: about the seconds of the timed calls together.
        least, most: of the timed calls, whatever their time.
    """

    warm: int = 2
    seconds: float = 0.05
    least: int = 3
    most: int = 25

    def __post_init__(self) -> None:
        if self.warm < 0 or not 1 <= self.least <= self.most or not self.seconds >= 0:
            raise ValueError(f"{self}: it takes 0 or more warm calls and seconds, and 1 ≤ least ≤ most")

    def calls(self, seconds: float) -> int:
        """Return how often a call of so many seconds is timed."""
        return int(max(self.least, min(self.most, self.seconds / max(seconds, 1e-9))))


class Clock:
    """Times calls on one device.

    Args:
        device: the device; what runs on an accelerator is timed by its events.
        effort: how long one call is timed.
        group: the processes that time together, on the host; ``None``: this process alone.
    """

    def __init__(
        self, device: torch.device, effort: Effort | None = None, group: distributed.ProcessGroup | None = None
    ) -> None:
        self.device, self.effort, self.group = device, effort or Effort(), group

    def median(self, call: Call) -> float:
        """Return the seconds of a call: the median over the calls, each on its slowest rank. All ranks call it."""
        for _ in range(self.effort.warm):
            call()
        first = self.agreed(self.each(call, 1))[0]
        return statistics.median(self.agreed(self.each(call, self.effort.calls(first))))

    def each(self, call: Call, count: int) -> list[float]:
        """Begin with all ranks, and return the seconds of each call on this one."""
        if self.group is not None:
            distributed.barrier(self.group)
        marks = marks_of(self.device)
        passed = [marks.mark()]
        for _ in range(count):
            call()
            passed.append(marks.mark())
        marks.settle()
        return [marks.seconds(begin, end) for begin, end in itertools.pairwise(passed)]

    def agreed(self, seconds: list[float]) -> list[float]:
        """Return for each number the largest of all ranks."""
        if self.group is None:
            return seconds
        largest = torch.tensor(seconds, dtype=torch.float64)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
        return largest.tolist()
