"""Compare how fast the ranks of a job are: how long each computes in a step, and what it spends between two steps.

All ranks end a step together, because they exchange gradients. A slow rank shows only in that it waits less than the
others. So each rank counts its waits, and sends what is left of its step with the comparison of the next call. On an
accelerator events mark the waits of each eighth step; they are read before the next such step, without waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from rich.table import Table

from autopar.ir.hosts import Hosts
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.model.calls import Calls
from autopar.notebook import TableReport, printed, right
from autopar.report.passes import PassReport, Reports
from autopar.runtime.marks import HostMarks, Waits, mark_waits, marks_of
from autopar.runtime.processes.agreement import UNKNOWN, Agreement, Pace

STEPS = 64  # the latest, of which a report has medians
SLOWER = 1.2  # times the median of the other ranks, from which a rank is called slow …
NOTICED = 5e-4  # … if it is slower by so many seconds, too
SHOWN = 16  # ranks at most, the slowest ones

NO_HOSTS = Hosts((), ())
KINDS = ("computes", "spends between two steps")  # the two numbers of a pace
UNMEASURED = (
    "nothing is known of the ranks: they compare their steps from the third one on, and on accelerators each eighth "
    "one, on processes\n"
)


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than the others.

    Attributes:
        kind: what it does: one of ``KINDS``.
        seconds: the median of its latest steps.
        others: the median of the other ranks that do the same.
    """

    rank: int
    host: str
    kind: str
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on host {self.host} {self.kind} {self.seconds * 1e3:.1f} ms a step, "
            f"{self.others * 1e3:.1f} ms is the median of the others"
        )


@dataclass(frozen=True, repr=False)
class RankPaces(TableReport):
    """How fast the ranks are. Prints as a table of the slowest ranks.

    Attributes:
        steps: the number of steps that the figures are medians of.
        paces: rank → seconds that it computes in a step, and that it spends between two steps.
        hosts: the host of each rank.
        slow: the ranks that take longer than the others, the slowest first.
    """

    steps: int = 0
    paces: Mapping[int, Pace] = field(default_factory=dict)
    hosts: Hosts = NO_HOSTS
    slow: tuple[SlowRank, ...] = ()

    def __str__(self) -> str:
        if not self.paces:
            return UNMEASURED
        table = Table("rank", "host", right("computes, ms"), right("between steps, ms"))
        slowest = sorted(self.paces, key=lambda rank: -sum(self.paces[rank]))[:SHOWN]
        for rank in sorted(slowest):
            table.add_row(str(rank), self.hosts.name(rank), *(f"{seconds * 1e3:.1f}" for seconds in self.paces[rank]))
        left = len(self.paces) - len(slowest)
        return (
            f"medians of {self.steps} steps\n{printed(table, width=100)}"
            + f"and {left} faster ranks\n" * (left > 0)
            + "".join(f"{slow}\n" for slow in self.slow)
        )

    def after(self, reports: Reports) -> Reports:
        """Return reports with a row that names the slow ranks, if there are any."""
        notes = tuple(map(str, self.slow))
        return Reports((*reports, PassReport("ranks", 0.0, notes=notes))) if notes else reports


@dataclass
class _Measured:
    """A step that is measured.

    Attributes:
        between: the seconds of the host between the step before and this one.
        begin, end: its marks.
        waits: the marks of its waits.
    """

    between: float
    begin: object
    waits: Waits
    end: object = None

    def computed(self, marks: HostMarks) -> float:
        """Return the seconds without waits. All marks have passed."""
        return max(0.0, marks.seconds(self.begin, self.end) - sum(marks.seconds(*wait) for wait in self.waits))


@dataclass
class RankClock:
    """Measures this rank's steps, and keeps the paces of all ranks in the latest steps.

    Args:
        ranks: compares the calls of the ranks.
        mesh, hosts: those of the job.
        marks: those of the device that computes.
    """

    ranks: Agreement
    mesh: Mesh
    hosts: Hosts
    marks: HostMarks = field(default_factory=HostMarks)
    _steps: deque[list[Pace]] = field(default_factory=lambda: deque(maxlen=STEPS))
    _count: int = 0  # of the steps that have ended
    _ended: float | None = None
    _measured: _Measured | None = None  # the latest step that is measured, and not read yet

    def begin(self) -> None:
        """Begin a step."""
        if not self._is_due():
            return
        between = 0.0 if self._ended is None else time.perf_counter() - self._ended
        self._measured = _Measured(max(0.0, between), self.marks.mark(), mark_waits(self.marks))

    def end(self, is_first: bool) -> None:
        """End a step. ``is_first``: it was captured, so that its time says nothing."""
        if self.ranks.paces and all(pace != UNKNOWN for pace in self.ranks.paces):
            self._steps.append(self.ranks.paces)
        step = self._measured
        if step is not None and step.end is None:
            mark_waits(None)
            step.end = self.marks.mark()
            self._measured = None if is_first or self._ended is None else step
        self._count, self._ended, self.ranks.pace = self._count + 1, time.perf_counter(), UNKNOWN
        if self._measured is not None and self._is_due():  # after the same step on all ranks
            step, self._measured = self._measured, None
            if self.marks.have_passed(step.end):
                self.ranks.pace = step.computed(self.marks), step.between

    def _is_due(self) -> bool:
        """Whether the next step is measured."""
        return self._count % self.marks.every == 1 % self.marks.every

    def paces(self) -> RankPaces:
        """Return the medians of the latest steps, and the slow ranks."""
        steps = [*self._steps]
        found: dict[int, Pace] = {
            rank: (median(step[k][0] for step in steps), median(step[k][1] for step in steps))
            for k, rank in enumerate(sorted(self.mesh.ranks))
            if steps
        }
        return RankPaces(len(steps), found, self.hosts, slow_ranks(found, self.mesh, self.hosts))


def slow_ranks(paces: Mapping[int, Pace], mesh: Mesh, hosts: Hosts) -> tuple[SlowRank, ...]:
    """Return the ranks that take longer than the others, the slowest first.

    Computing is compared among the ranks of one stage of a pipeline, because stages compute different things.
    """
    slow: list[SlowRank] = []
    for k, kind in enumerate(KINDS):
        for ranks in _alike(mesh) if k == 0 else [[*mesh.ranks]]:
            slow += _outliers({rank: paces[rank][k] for rank in ranks if rank in paces}, kind, hosts)
    return tuple(sorted(slow, key=lambda rank: rank.others - rank.seconds))


def _alike(mesh: Mesh) -> list[list[int]]:
    """Return the ranks of each stage."""
    stages: dict[int, list[int]] = {}
    for rank in mesh.ranks:
        stages.setdefault(mesh.coordinates(rank).get(PIPELINE, 0), []).append(rank)
    return [*stages.values()]


def _outliers(seconds: Mapping[int, float], kind: str, hosts: Hosts) -> Iterator[SlowRank]:
    """Yield the ranks that take longer than the median of the others."""
    ordered = sorted(seconds.items(), key=lambda row: row[1])
    others = len(ordered) - 1
    if others < 1:
        return
    for at, (rank, own) in enumerate(ordered):
        middle = (ordered[k + (k >= at)][1] for k in ((others - 1) // 2, others // 2))
        typical = sum(middle) / 2
        if own > SLOWER * typical and own - typical > NOTICED:
            yield SlowRank(rank, hosts.name(rank), kind, own, typical)


def clock_of(calls: Calls) -> RankClock | None:
    """Return what compares the ranks' steps; ``None`` where nobody waits."""
    if calls.job is None or calls.agreement.ranks is None:
        return None
    return RankClock(calls.agreement.ranks, calls.mesh, calls.job.hosts, marks_of(calls.device))
