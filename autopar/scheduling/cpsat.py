"""Find the shortest order of up to 80 ops with a constraint solver, or bound what is left to gain (CP-SAT of OR-Tools).

Collectives are whole: none is cut, and none share a message. Each op is an interval of time. Intervals of one stream do
not overlap, and each begins after the ops that it reads. Where a CPU computes (``"direct"``), the host issues a
collective between two ops, and the collective begins then or later.

Intervals have whole ticks, rounded down, so that the bound of the solver is a bound of the seconds. The order that is
found is simulated. The solver's effort is counted and not timed, so that the same input gives the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import ScheduleError
from autopar.scheduling.decide import judge, schedule
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft, Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.simulation import Issue, Schedule, Startup, issue_of, number, startup_of

POLICY = "cp-sat"
MOST = 80  # ops
TICKS = 2**40  # of the sum of all seconds
CLOSE = 1e-9  # of the seconds: ticks are rounded


@dataclass(frozen=True)
class Solved:
    """The shortest order that was found.

    Attributes:
        schedule: the schedule of that order.
        bound: seconds; no order of whole collectives takes less.
    """

    schedule: Schedule
    bound: float

    @property
    def is_optimal(self) -> bool:
        return self.schedule.makespan <= self.bound * (1 + CLOSE)


def solve(ops: Iterable[Op], issue: Issue = "enqueue", *, startup: Startup = 0.0, seconds: float = 10.0) -> Solved:
    """Return the shortest order of whole collectives, or the shortest that was found and a bound.

    Args:
        ops: at most 80.
        issue: how lines are issued; see ``simulation``.
        startup: θ, the fixed seconds of each collective, which are part of its seconds. They change nothing here,
            because each collective is one message.
        seconds: the limit of the solver's effort, in about the seconds of one core.

    Raises:
        ScheduleError: there are more than 80 ops, or an option has a wrong value.
        ModuleNotFoundError: OR-Tools is missing.
    """
    cp_model = _cp_model()
    effort = number("seconds", seconds)
    graph = Graph(ops, startup_of(startup))
    if len(graph) > MOST:
        raise ScheduleError(f"{POLICY} orders at most {MOST} ops, and there are {len(graph)}; use 'longest-tail'")
    first = _whole(graph, issue, startup)
    if first.makespan <= first.bound * (1 + CLOSE):
        return Solved(first, first.bound)
    model = _Model(cp_model, graph, issue_of(issue) == "direct")
    model.begin_with(first)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        lines = model.draft([solver.value(tick) for tick in model.issued]).written()
        found = judge(graph.ops, lines, POLICY, issue, startup=startup)
        first = found if found.makespan < first.makespan else first
    bound = max(first.bound, solver.best_objective_bound * model.tick)
    return Solved(first, min(bound, first.makespan))


def _whole(graph: Graph, issue: Issue, startup: Startup) -> Schedule:
    """Return the schedule of the default policy, with whole collectives."""
    made = schedule([replace(op, bytes=0) for op in graph.ops], issue=issue)
    sizes = {op.name: 0 if op.computes else op.bytes for op in graph.ops}
    lines = [Line(line.kind, tuple(Part(name, 0, sizes[name]) for name, *_ in line.parts)) for line in made.lines]
    return judge(graph.ops, lines, POLICY, issue, startup=startup)


class _Model:
    """The constraints.

    Attributes:
        tick: the seconds of one tick.
        begins: op → the variable of its begin, in ticks.
        issued: op → the variable of the tick in which the host issues it; its begin, unless the host computes.
    """

    def __init__(self, cp_model: Any, graph: Graph, is_direct: bool) -> None:
        self.graph, self.model = graph, cp_model.CpModel()
        self.tick = sum(graph.seconds) / TICKS
        size = [int(seconds / self.tick) for seconds in graph.seconds]
        begins = [self.model.new_int_var(0, TICKS, f"begin of {op.name}") for op in graph.ops]
        self.issued = list(begins)
        queues: list[list[Any]] = [[] for _ in graph.streams]
        end = self.model.new_int_var(0, TICKS, "end")
        for i, begin in enumerate(begins):
            queues[graph.stream[i]].append(self.model.new_fixed_size_interval_var(begin, size[i], graph.ops[i].name))
            if is_direct and graph.stream[i]:
                self.issued[i] = issued = self.model.new_int_var(0, TICKS, f"issue of {graph.ops[i].name}")
                queues[0].append(self.model.new_fixed_size_interval_var(issued, 0, f"issue {graph.ops[i].name}"))
                self.model.add(begin >= issued)
            for j in graph.before[i]:
                self.model.add(self.issued[i] >= begins[j] + size[j])
            self.model.add(end >= begin + size[i])
        for queue in queues:
            self.model.add_no_overlap(queue)
        self.model.minimize(end)
        self.begins = begins

    def begin_with(self, made: Schedule) -> None:
        """Give the solver the begins of a schedule as hints."""
        for span in made.spans:
            for part in span.parts:
                self.model.add_hint(self.begins[self.graph.number[part.op]], int(span.begin / self.tick))

    def draft(self, ticks: list[int]) -> Draft:
        """Return the lines in the order of these ticks. Ops that take no time stand after the ops that they read."""
        graph, draft = self.graph, Draft(self.graph)
        keys = [(ticks[i], not graph.stream[i], graph.position[i], i) for i in range(len(graph))]
        missing = [len(before) for before in graph.before]
        ready = [keys[i] for i, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        while ready:
            *_, i = heapq.heappop(ready)
            draft.issue(i)
            for j in graph.readers[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, keys[j])
        return draft.finished()


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the shortest orders need OR-Tools: pip install autopar[cpsat], or use the policy 'longest-tail'",
            name="ortools",
        ) from None
    return cp_model
