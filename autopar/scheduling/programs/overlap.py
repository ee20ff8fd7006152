"""Check the argument ``overlap=``: the policy, or the priorities, that decide the order of communication."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import ScheduleError, shown
from autopar.ir.nodes import is_getitem
from autopar.ir.program import Program
from autopar.scheduling.policies import ByteScheduler, named
from autopar.scheduling.priorities import matches_nothing
from autopar.scheduling.simulation import Issue

TODAY, LONGEST_TAIL, TWO_STREAMS, PRIORITIES = "today", "longest-tail", "two-streams", "priorities"
Given = str | ByteScheduler | Mapping[str, int]  # the values of ``overlap=``


@dataclass(frozen=True)
class Overlap:
    """The policy that decides an order.

    Attributes:
        policy: a name in ``POLICIES``, or ``ByteScheduler(…)``.
        priorities: for the policy ``priorities``: globs over names of values, and an integer for each; smaller goes
            first. Each glob matches a value of some program of the call or the step (``check_priorities``).
        issue: how the device issues lines.
    """

    policy: str | ByteScheduler = LONGEST_TAIL
    priorities: tuple[tuple[str, int], ...] | None = None
    issue: Issue = "direct"

    @property
    def is_searched(self) -> bool:
        """Whether many orders are tried, and the shortest within a limit of memory is taken."""
        return self.policy in (LONGEST_TAIL, TWO_STREAMS)

    def __str__(self) -> str:
        return str(self.policy if self.priorities is None else dict(self.priorities))

    def priorities_of(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the priorities that match some of these names; ``None`` if there are no priorities at all."""
        if self.priorities is None:
            return None
        names = list(names)
        return {glob: number for glob, number in self.priorities if fnmatch.filter(names, glob)}


def check_priorities(overlap: Overlap, programs: Iterable[Program]) -> None:
    """Check that each glob matches an op or a transfer of some program.

    Args:
        programs: all explicit programs of a call or a step.

    Raises:
        ScheduleError: a glob matches nothing; the error lists the nearest names.
    """
    if overlap.priorities is None:
        return
    names = list(dict.fromkeys(
        node.name for program in programs for node in program.nodes
        if node.op == "call_function" and not is_getitem(node)
    ))  # fmt: skip
    matched = overlap.priorities_of(names) or {}
    for glob, _ in overlap.priorities:
        if glob not in matched:
            raise matches_nothing(glob, names)


def overlap_of(given: Given, issue: Issue) -> Overlap:
    """Return the policy that ``overlap=`` names.

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
        raise ScheduleError("overlap='priorities' needs the priorities: give a dict, as in overlap={'*_grad_dp': 1}")
    return Overlap(given, issue=issue)
