"""Decide a schedule: run a policy, simulate what it says, and compare it with the bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from autopar.errors import ScheduleError
from autopar.gc_pause import gc_paused
from autopar.scheduling import buckets, dispatch
from autopar.scheduling.bounds import bound
from autopar.scheduling.exact import MOST, best_order
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft, Line
from autopar.scheduling.longest_tail import LongestTail
from autopar.scheduling.memory import peak
from autopar.scheduling.op import Op
from autopar.scheduling.placement import by_deadline, hoisted
from autopar.scheduling.policies import POLICIES, ByteScheduler, by_layer, named
from autopar.scheduling.priorities import numbers_of
from autopar.scheduling.scheduled import Schedule
from autopar.scheduling.simulation import Issue, Startup, Times, issue_of, number, spans_of, startup_of, times
from autopar.scheduling.verify import draft_of

EARLY = 0.01  # of the bound: a collective that can begin before it needs next to no computation
BELOW = 1e-9  # of the bound: sums of floats are not exact


@gc_paused()
def schedule(
    ops: Iterable[Op],
    policy: str | ByteScheduler = "longest-tail",
    issue: Issue = "enqueue",
    *,
    startup: Startup = 0.0,
    priorities: Mapping[str, int] | None = None,
    memory: int | None = None,
    interference: float = 0.0,
) -> Schedule:
    """Return the schedule of a policy. Up to 8 ops, ``"longest-tail"`` finds the shortest order of whole collectives.

    Args:
        ops: what is scheduled, in the order of the program.
        policy: a name in ``POLICIES``, or ``ByteScheduler(partition, credit)``.
        issue: ``"enqueue"``, as a GPU runs lines, or ``"direct"``, as a CPU does; see ``simulation``.
        startup: θ, the fixed seconds of each collective, of all or by name, which are part of its seconds. A message of
            several pays them once, and each chunk pays them again.
        priorities: glob over names of ops → an integer; smaller goes first. For ``"priorities"``, and for
            ``"longest-tail"``, which then decides among equal ones.
        memory: the most bytes of results that may be alive in a line.
        interference: while a collective is under way, an op takes (1 + interference) times as long.

    Raises:
        ScheduleError: a name, number or glob is wrong, priorities contradict each other or the order, or the memory is
            less than every order that was found needs.
        TypeError: a value has the wrong type.
    """
    name = "bytescheduler" if isinstance(policy, ByteScheduler) else named(policy)
    if name == "priorities" and priorities is None:
        raise ScheduleError("the policy 'priorities' needs priorities={glob: int}")
    if priorities is not None and name not in ("priorities", "longest-tail"):
        raise ScheduleError(f"the policy {name!r} takes no priorities; 'priorities' and 'longest-tail' do")
    limit = inf if memory is None else number("memory", memory)
    graph = Graph(ops, startup_of(startup))
    made = _Decision(graph, issue_of(issue), number("interference", interference), limit)
    numbers = None if priorities is None else numbers_of(graph, priorities)
    draft = made.longest_tail(numbers) if name == "longest-tail" else made.fixed(name, policy, numbers)
    return made.finished(name, draft)


@gc_paused()
def judge(ops: Iterable[Op], lines: Iterable[Line], policy: str, issue: Issue = "enqueue", *, startup: Startup = 0.0,
          interference: float = 0.0) -> Schedule:  # fmt: skip
    """Return the schedule with the given lines: they are verified, simulated and compared with the bound.

    Args:
        policy: what the schedule is called.

    The others are those of ``schedule`` and of ``simulate``, and so are the errors.
    """
    graph = Graph(ops, startup_of(startup))
    made = _Decision(graph, issue_of(issue), number("interference", interference), inf)
    return made.finished(policy, draft_of(graph, lines))


class _Decision:
    """One graph, and how its lines run.

    Attributes:
        smallest: bytes; the least that any order so far needs.
    """

    def __init__(self, graph: Graph, issue: Issue, interference: float, memory: float) -> None:
        self.graph, self.issue, self.interference, self.memory = graph, issue, interference, memory
        self.bound = bound(graph)
        self.smallest = inf

    def run(self, draft: Draft) -> tuple[Draft, Times]:
        """Return the draft as it is issued, and its times; these are endless if it does not fit into the memory."""
        if self.issue == "direct":
            early = hoisted(draft)
            if self.fits(early):
                return early, times(early, self.issue, self.interference)
        return draft, self.times(draft)

    def times(self, draft: Draft) -> Times:
        found = times(draft, self.issue, self.interference)
        return found if self.fits(draft) else found._replace(makespan=inf)

    def fits(self, draft: Draft) -> bool:
        if self.memory == inf:
            return True
        needs = peak(draft)
        self.smallest = min(self.smallest, needs)
        return needs <= self.memory

    def fixed(self, name: str, policy: object, numbers: list[int] | None) -> Draft:
        """Return the lines of a policy that has one order."""
        if isinstance(policy, ByteScheduler):
            draft = by_layer(self.graph, policy.rule)
        elif numbers is not None:
            draft = dispatch.two_levels(self.graph, blocking_first=False, numbers=numbers)
        else:
            order = POLICIES[name].order
            assert order is not None
            draft = order(self.graph)
        if POLICIES[name].by_time:
            draft, _ = self.run(draft)
        if not self.fits(draft):
            raise ScheduleError(
                f"the order of {name!r} needs {self.smallest:,} bytes, and the limit is {self.memory:,.0f}; "
                f"'longest-tail' looks for an order that fits"
            )
        return draft

    def longest_tail(self, numbers: list[int] | None) -> Draft:
        """Return the shortest lines of all that are tried."""
        tries = LongestTail(self.graph, self.bound, self.run, numbers, self.memory)
        best, seconds = tries.found(), tries.seconds
        if numbers is None or best is None:
            for order in (dispatch.in_order, dispatch.just_in_time, buckets.fifo):
                draft = order(self.graph)
                for variant in (draft, self.run(draft)[0]):
                    if (then := self.times(variant).makespan) < seconds * (1 - BELOW):
                        best, seconds = variant, then
        if numbers is None and len(self.graph) <= MOST and seconds > self.bound.seconds * (1 + BELOW):
            best = self.exact(seconds) or best
        if best is None:
            raise ScheduleError(
                f"no order fits into {self.memory:,.0f} bytes; the smallest that was found needs {self.smallest:,} "
                f"bytes: raise the limit, or recompute"
            )
        return self.deferred(best)

    def exact(self, seconds: float) -> Draft | None:
        return best_order(
            self.graph, self.bound, self.issue == "direct", seconds, lambda draft: self.times(draft).makespan
        )

    def deferred(self, draft: Draft) -> Draft:
        """Return the lines with gathers started by deadline, if nothing takes longer."""
        early = [
            self.graph.stream[i] > 0 and self.graph.memory[i] > 0 and head <= EARLY * self.bound.seconds
            for i, head in enumerate(self.bound.heads)
        ]
        if not any(early):
            return draft
        before = self.times(draft)
        later = by_deadline(draft, before, early)
        return later if self.times(later).makespan <= before.makespan * (1 + BELOW) else draft

    def finished(self, name: str, draft: Draft) -> Schedule:
        found = times(draft, self.issue, self.interference)
        if found.makespan < self.bound.seconds * (1 - BELOW):
            raise ScheduleError(
                f"{name}: the simulated {found.makespan!r} s are below the bound of {self.bound.seconds!r} s, which is "
                f"a defect of the simulation or of the bound; please report it with the ops"
            )
        return Schedule(
            name, self.issue, draft.written(), spans_of(draft, found), self.bound.seconds, peak(draft)
        )  # fmt: skip
