"""Decide a schedule: run a policy, simulate its lines, and compare their makespan with the bound."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from autopar.errors import ScheduleError, shown
from autopar.gc_pause import gc_paused
from autopar.scheduling.bounds import Bound, bound
from autopar.scheduling.exact import MOST, best_order
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import COMPUTE, Draft, Line
from autopar.scheduling.list_scheduling import peak
from autopar.scheduling.longest_tail import LongestTail, by_deadline, hoisted, least_need
from autopar.scheduling.op import Op
from autopar.scheduling.policies import (
    POLICIES,
    ByteScheduler,
    by_layer,
    fifo,
    in_order,
    just_in_time,
    named,
    two_levels,
)
from autopar.scheduling.priorities import numbers_of
from autopar.scheduling.simulation import (
    Issue,
    Schedule,
    Startup,
    Times,
    draft_of,
    issue_of,
    number,
    spans_of,
    startup_of,
    times,
)

# -- late streams ------------------------------------------------------------------------------------------------------
#
# Put late collectives on a second stream over the same ranks, so that urgent ones need not wait for their end.
#
#     reduce scatter of 4 ━━━━━━━━  gather of 1     one stream: the gather waits, and ends after 5
#     reduce scatter of 4 ══════════                two: they share the link,
#     gather of 1         ══                        and the gather ends after 2
#
# A collective is late if its tail is short, or its slack is large: the seconds between its head and the begin at which
# it would lengthen the bound. Both streams share a link, so no message moves faster. Cutting long messages has the same
# effect, but costs a start-up for each chunk, and some collectives cannot be cut.


WORTH = 0.01  # of the makespan: a smaller gain is not worth another process group
TAILS = (0.01, 0.1, 0.5)  # of the bound: a collective with a shorter tail is late
SLACKS = (0.5, 0.25, 0.1)  # of the bound: a collective with more slack is late


def on_late_streams(ops: Sequence[Op], late: Collection[str]) -> list[Op]:
    """Return the ops with some collectives on the late stream of their own stream, and on its link."""
    return [
        replace(op, stream=late_stream(op.stream), link=op.link or op.stream) if op.name in late else op for op in ops
    ]


def late_stream(stream: str) -> str:
    """Return the name of the late stream beside a stream."""
    return f"{stream} (late)"


def late_ones(graph: Graph) -> frozenset[str]:
    """Return the collectives that are on late streams."""
    return frozenset(op.name for op in graph.ops if op.link and op.stream == late_stream(op.link))


def splits(graph: Graph, bound: Bound) -> Iterator[frozenset[str]]:
    """Yield choices of late collectives, each once; a choice leaves at least one collective on each stream."""
    slack = [
        bound.seconds - head - seconds - tail
        for head, seconds, tail in zip(bound.heads, graph.seconds, bound.tails, strict=True)
    ]
    chosen = [
        *({i for i in graph.collectives if bound.tails[i] <= share * bound.seconds} for share in TAILS),
        *({i for i in graph.collectives if slack[i] >= share * bound.seconds} for share in SLACKS),
    ]
    known = {frozenset[str]()}
    for late in chosen:
        urgent = {graph.stream[i] for i in graph.collectives if i not in late}
        names = frozenset(graph.ops[i].name for i in late if graph.stream[i] in urgent)
        if names not in known:
            known.add(names)
            yield names


# -- decide ------------------------------------------------------------------------------------------------------------


EARLY = 0.01  # of the bound: a collective with a shorter head needs hardly any computation before it
PLAIN = 1e-3  # of the makespan: so much longer the order of the program may take, because it is easier to read
BELOW = 1e-9  # of the bound: sums of floats are not exact
IN_ORDER = (in_order, just_in_time, fifo)  # policies that keep the order of the program


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
    start_seconds: float = 0.0,
) -> Schedule:
    """Return the schedule of a policy. Up to 8 ops, ``"longest-tail"`` finds the shortest order of whole collectives.

    Args:
        ops: what is scheduled, in the order of the program.
        policy: a name in ``POLICIES``, or ``ByteScheduler(partition, credit)``.
        issue: ``"enqueue"``, as a GPU runs lines, or ``"direct"``, as a CPU does; see ``simulation``.
        startup: θ, the fixed seconds of each collective, for all or by name, which are part of its seconds. A bucket
            pays θ once, and each chunk pays it again. Names of other ops count for nothing.
        priorities: glob over names of ops → an integer; smaller goes first. For ``"priorities"``, and for
            ``"longest-tail"``, which then orders ops of equal priority by their tails.
        memory: the most bytes of results that may be alive in a line.
        interference: while a collective is under way, an op takes (1 + interference) times as long.
        start_seconds: the seconds of the host for each start of a message, for ``"direct"``: packing, and the threads
            that it wakes. With it, fewer messages are better, and ``"longest-tail"`` is not exact.

    Raises:
        ScheduleError: a name, number or glob is wrong; priorities contradict each other or the order; or every order
            that was found needs more than ``memory``.
        TypeError: a value has the wrong type.
    """
    name = "bytescheduler" if isinstance(policy, ByteScheduler) else named(policy)
    if name == "priorities" and priorities is None:
        raise ScheduleError("the policy 'priorities' needs priorities={glob: int}")
    if priorities is not None and name not in ("priorities", "longest-tail"):
        raise ScheduleError(f"the policy {name!r} takes no priorities; 'priorities' and 'longest-tail' do")
    limit = inf if memory is None else _bytes(memory)
    graph = Graph(ops, startup_of(startup), number("start_seconds", start_seconds) * (issue == "direct"))
    made = _Decision(graph, issue_of(issue), number("interference", interference), limit, startup_of(startup))
    numbers = None if priorities is None else numbers_of(graph, priorities)
    if name == "two-streams":
        return made.two_streams()
    draft = made.longest_tail(numbers) if name == "longest-tail" else made.fixed(name, policy, numbers)
    return made.finished(name, draft)


@gc_paused()
def judge(ops: Iterable[Op], lines: Iterable[Line], policy: str, issue: Issue = "enqueue", *, startup: Startup = 0.0,
          interference: float = 0.0, start_seconds: float = 0.0) -> Schedule:  # fmt: skip
    """Verify and simulate the given lines, and return them as a schedule with its bound.

    Args:
        policy: the name that the schedule gets.

    The other arguments and the errors are those of ``schedule`` and of ``simulate``.
    """
    graph = Graph(ops, startup_of(startup), number("start_seconds", start_seconds) * (issue == "direct"))
    made = _Decision(graph, issue_of(issue), number("interference", interference), inf)
    return made.finished(policy, draft_of(graph, lines), is_verified=True)


class _Decision:
    """Decides the schedule of one graph.

    Attributes:
        memory: the most bytes that may be alive in a line; ``inf`` without a limit.
        smallest: the least bytes that any order so far needs.
    """

    def __init__(self, graph: Graph, issue: Issue, interference: float, memory: float, startup: Startup = 0.0) -> None:
        self.startup = startup
        self.graph, self.issue, self.interference, self.memory = graph, issue, interference, memory
        self.bound = bound(graph)
        self.smallest = inf

    def run(self, draft: Draft) -> tuple[Draft, Times]:
        """Return the draft as it is issued, and its times. Where it does not fit into the memory, its gathers start by
        deadline; if it still does not fit, its makespan is ``inf``."""
        issued = hoisted(draft) if self.issue == "direct" else draft
        found = self.simulated(issued)
        if self.fits(issued):
            return issued, found
        later = self.later(issued, found)
        if later is None or not self.fits(later):
            later = draft
        return later, self.times(later)

    def simulated(self, draft: Draft) -> Times:
        return times(draft, self.issue, self.interference)

    def times(self, draft: Draft) -> Times:
        found = self.simulated(draft)
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
            draft = two_levels(self.graph, blocking_first=False, numbers=numbers)
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
        """Return the shortest draft of all that are tried."""
        tries = LongestTail(self.graph, self.bound, self.run, numbers, self.memory)
        best, seconds = tries.found(), tries.seconds
        if numbers is None or best is None:
            drafts = [] if best is None else [best]
            best, seconds = self.plainest([*drafts, *self.plain(tries)])
        few = len(self.graph) <= MOST and not self.graph.shares and not self.graph.start_seconds
        if numbers is None and few and seconds > self.bound.seconds * (1 + BELOW):
            best = self.exact(seconds) or best
        if best is None:
            needs = least_need(self.graph, self.memory, self.smallest)
            raise ScheduleError(
                f"no order fits into {self.memory:,.0f} bytes; the smallest that was found needs {needs:,} bytes: "
                f"raise the limit, or recompute"
            )
        return self.deferred(best)

    def plain(self, tries: LongestTail) -> Iterator[Draft]:
        """Yield drafts whose ops compute in the order of the program, each as it is and as it is issued."""
        for draft in (*(order(self.graph) for order in IN_ORDER), *tries.in_order()):
            yield from (draft, self.run(draft)[0])

    def plainest(self, drafts: Sequence[Draft]) -> tuple[Draft | None, float]:
        """Return the plainest of the shortest drafts, and its makespan; ``None`` if none fits into the memory.

        Plainest is a draft that keeps the order of the program, then the one with the fewest messages. It takes no
        longer than the policies in ``IN_ORDER``.
        """
        found = [(draft, self.times(draft).makespan) for draft in drafts]
        shortest = min(seconds for _, seconds in found)
        if shortest == inf:
            return None, inf
        most = shortest * (1 + (BELOW if len(self.graph) <= MOST else PLAIN))
        for order in IN_ORDER:
            most = min(most, max(shortest, self.times(order(self.graph)).makespan))
        near = [(draft, seconds) for draft, seconds in found if seconds <= most]
        return min(near, key=lambda one: (not _keeps_order(one[0]), len(one[0].messages), one[1]))

    def two_streams(self) -> Schedule:
        """Return the shortest schedule of all that are tried with and without late streams."""
        best = self.finished("two-streams", self.longest_tail(None))
        for late in splits(self.graph, self.bound):
            if best.makespan <= self.bound.seconds * (1 + WORTH):
                break
            graph = Graph(on_late_streams(self.graph.ops, late), self.startup, self.graph.start_seconds)
            split = _Decision(graph, self.issue, self.interference, self.memory, self.startup)
            with contextlib.suppress(ScheduleError):  # no order was found that fits into the memory
                other = split.finished("two-streams", split.longest_tail(None))
                if other.makespan < best.makespan * (1 - WORTH * (not best.late)):
                    best = other
        return best

    def exact(self, seconds: float) -> Draft | None:
        return best_order(
            self.graph, self.bound, self.issue == "direct", seconds, lambda draft: self.times(draft).makespan
        )

    def deferred(self, draft: Draft) -> Draft:
        """Return the lines with gathers started by deadline, if nothing takes longer."""
        before = self.times(draft)
        later = self.later(draft, before)
        if later is None:
            return draft
        return later if self.times(later).makespan <= before.makespan * (1 + BELOW) else draft

    @cached_property
    def early(self) -> list[bool]:
        """op → whether it is a collective that needs next to no computation, and whose result takes memory."""
        graph, most = self.graph, EARLY * self.bound.seconds
        return [graph.stream[i] > 0 and graph.memory[i] > 0 and head <= most for i, head in enumerate(self.bound.heads)]

    def later(self, draft: Draft, found: Times) -> Draft | None:
        """Return the lines with gathers started by deadline; ``None`` if there are none."""
        return by_deadline(draft, found, self.early) if any(self.early) else None

    def finished(self, name: str, draft: Draft, *, is_verified: bool = False) -> Schedule:
        found = times(draft, self.issue, self.interference)
        if found.makespan < self.bound.seconds * (1 - BELOW):
            raise ScheduleError(
                f"{name}: the simulated {found.makespan!r} s are below the bound of {self.bound.seconds!r} s, which is "
                f"a defect of the simulation or of the bound; please report it with the ops"
            )
        lines = draft.written()
        if not is_verified:
            draft_of(self.graph, lines)  # what no verifier has seen is not given to anybody
        return Schedule(
            name, self.issue, lines, spans_of(draft, found), self.bound.seconds, peak(draft),
            late_ones(self.graph), self.graph.start_seconds,
        )  # fmt: skip


def _bytes(memory: object) -> float:
    """Return a limit of memory, or raise."""
    if isinstance(memory, float) and not memory.is_integer():
        raise TypeError(f"memory={shown(memory)} is no whole number of bytes")
    return number("memory", memory)


def _keeps_order(draft: Draft) -> bool:
    """Return whether ops compute in the order of the program."""
    return [at for kind, at in draft.lines if kind == COMPUTE] == draft.graph.computations
