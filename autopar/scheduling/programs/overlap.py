"""Check what a user says about the order of communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ScheduleError, shown
from autopar.scheduling.policies import ByteScheduler, named
from autopar.scheduling.simulation import Issue

TODAY, LONGEST_TAIL, PRIORITIES = "today", "longest-tail", "priorities"
Given = str | ByteScheduler | Mapping[str, int]  # what ``overlap=`` takes


@dataclass(frozen=True)
class Overlap:
    """What decides an order.

    Attributes:
        policy: a name in ``POLICIES``, or ``ByteScheduler(…)``.
        priorities: for the policy ``priorities``: globs over names of values, and an integer for each; smaller goes
            first.
        issue: how the device issues lines.
    """

    policy: str | ByteScheduler = LONGEST_TAIL
    priorities: tuple[tuple[str, int], ...] | None = None
    issue: Issue = "direct"

    def __str__(self) -> str:
        return str(self.policy if self.priorities is None else dict(self.priorities))


def overlap_of(given: Given, issue: Issue) -> Overlap:
    """Return what ``overlap=`` means.

    Raises:
        ScheduleError: there is no such policy; the error names the nearest.
        TypeError: it is neither a policy nor a dict of priorities.
    """
    if isinstance(given, ByteScheduler):
        return Overlap(given, issue=issue)
    if isinstance(given, Mapping):
        wrong = [
            (glob, number)
            for glob, number in given.items()
            if not isinstance(glob, str) or isinstance(number, bool) or not isinstance(number, int)
        ]
        if wrong or not given:
            raise TypeError(f"overlap={shown(given)}: priorities are globs over names of values, and integers")
        return Overlap(PRIORITIES, tuple(given.items()), issue)
    if named(given) == PRIORITIES:
        raise ScheduleError("overlap='priorities' needs the priorities: give a dict, as in overlap={'*_tp': 0, '*': 1}")
    return Overlap(given, issue=issue)
