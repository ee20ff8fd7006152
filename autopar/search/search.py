"""Search the cheapest Layouts of a traced program."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from autopar.costs.machine import Machine
from autopar.errors import shown
from autopar.gc_pause import gc_paused
from autopar.plan.boundary import Boundary
from autopar.report.progress import doing
from autopar.search.certificate import bytes_text
from autopar.search.memory.limited import NothingFits, within
from autopar.search.memory.memory_errors import too_little_memory
from autopar.search.memory.usage import usage_of
from autopar.search.problem.build import build
from autopar.search.problem.dearer import refuse_dearer
from autopar.search.problem.ending import Ending
from autopar.search.problem.narrowing import FEW
from autopar.search.problem.optimizer_states import cheapest_states
from autopar.search.problem.problem import Problem
from autopar.search.solutions.found import Found, found_by
from autopar.search.solver.solver import Answer, solve
from autopar.search.starts.started import Comparison, Greedy, Start, Starts
from autopar.search.transfer_prices.chains import Tables

LEAST_SECONDS = 5.0  # of any time limit, for the prices of transfers: without them only starting points are compared
SOLVING = 0.8  # of the time limit, where starting points are compared in the rest of it
LEAST_FOR_STARTS = 2.0  # seconds, where the prices of transfers took all the time that there was
MORE = 0.25  # of the time limit, at least, for a limit of memory that the cheapest plan exceeds
NOT_TIGHT = "the bound of plans within a limit of memory is not tight"


class Find(Protocol):
    """Finds the layouts of a traced program, as ``search`` does."""

    def __call__(self, boundary: Boundary, machine: Machine, *, strict: bool, time_limit: float) -> Found: ...


def check_time_limit(time_limit: float) -> None:
    """Raise ``ValueError`` if a time limit is no number of seconds."""
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit >= 0:
        raise ValueError(f"time_limit={shown(time_limit)} is not a number of seconds from 0 on")


def check_memory(memory: float | None) -> None:
    """Raise ``ValueError`` if a limit of memory is no number of bytes."""
    if memory is None or (isinstance(memory, (int, float)) and not isinstance(memory, bool) and memory > 0):
        return
    raise ValueError(
        f"memory={shown(memory)} is not a number of bytes above 0, such as 80e9; math.inf sets no limit, and None that "
        f"of the machine"
    )


@gc_paused()
def search(
    boundary: Boundary,
    machine: Machine,
    *,
    strict: bool = False,
    time_limit: float = 60.0,
    memory: float | None = None,
    reserve: float = 0.0,
    ending: Ending | None = None,
    starts: Starts = (),
    greedy: Greedy | None = None,
    below: float = math.inf,
    tables: Tables | None = None,
) -> Found:
    """Return the cheapest layouts of a traced program for the mesh of a machine, and a bound.

    Args:
        boundary: the program, its mesh and its constraints.
        strict: refuse ops without a rule; else they run on whole operands on every rank.
        time_limit: seconds, after which the best layouts so far are returned.
        memory: the most bytes that a rank may use; by default the capacity of the machine, if it is known.
        reserve: how many of these bytes to leave free, for what the estimate of a plan's memory does not count.
        ending: what ends the step, if the program is a micro-batch: then the price is that of the whole step.
        starts: names and layouts (node → DistAttr) of plans that the result is never dearer than, as
            ``starting_points`` gives them. They are placed one after the other where they can matter: when the result
            is not proven, or where a start has a home that the search does not try.
        greedy: places the starts; without it there are none.
        below: only plans that cost less nanoseconds are wanted, because a dearer one is known.
        tables: prices of transfers that further searches share.

    Raises:
        NotCheaper: no plan costs less than ``below``.
        PlanError: constraints contradict each other.
        MemoryLimitError: no plan was found that fits.
        ValueError: the time limit is no number of seconds, or the memory no number of bytes.
    """
    check_time_limit(time_limit)
    check_memory(memory)
    start = time.monotonic()
    solving = time_limit if greedy is None else time_limit * SOLVING
    deadline = start + max(solving, LEAST_SECONDS)
    problem = build(
        boundary, machine, strict=strict, ending=ending, deadline=deadline, below=below, tables=tables
    )  # fmt: skip
    answer = _answer(problem, start + solving)
    if not answer.exact and problem.floor is not None and not problem.late and problem.pairs <= FEW:
        known = min(problem.explicit_price(answer.states.tolist()), below) / problem.microbatches
        more = build(
            boundary, machine, strict=strict, ending=ending, deadline=deadline, cheaper=known, tables=tables
        )  # fmt: skip
        other = _answer(more, start + solving)
        if other.cost < answer.cost or (other.cost == answer.cost and other.bound > answer.bound):
            problem, answer = more, other
    refuse_dearer(answer.bound * problem.microbatches, below)
    limit = machine.capacity if memory is None else memory
    room = None if limit is None or limit == math.inf else limit - reserve
    usage = None if room is None else usage_of(problem, answer.states.tolist(), ending)
    binds = room is not None and usage is not None and usage.bytes > room
    lacking = None
    if binds:
        assert limit is not None and room is not None
        until = max(start + solving, time.monotonic() + time_limit * MORE)
        try:
            with doing(f"search within {bytes_text(limit)}"):
                answer, usage = within(problem, ending, answer, limit, room, until)
            answer = problem.bounded(answer)
        except NothingFits as error:
            lacking = too_little_memory(error.usage, limit, reserve, boundary.mesh, ending)
            lacking.least = answer.bound * problem.microbatches
    if lacking is not None and greedy is None:
        raise lacking
    if not binds:
        answer = replace(answer, states=cheapest_states(problem, answer.states))
    found = found_by(answer, problem, machine, start, solving, constrained=boundary.constrained)
    if room is not None and usage is not None:
        reason = NOT_TIGHT if binds and found.reason and found.search_seconds < solving else found.reason
        found = replace(found, reason=reason, memory=limit, bytes=usage.bytes)
    if greedy is None:
        return found
    deadline = max(start + time_limit, time.monotonic() + LEAST_FOR_STARTS * (time_limit > 0))
    exact = found.exact and lacking is None
    compared = Comparison(problem, boundary, machine, greedy, strict, ending, exact, deadline, room)
    cheaper = compared.cheapest(starts, found.nanoseconds if lacking is None else math.inf)
    if cheaper is None and lacking is not None:
        raise lacking
    seconds = time.monotonic() - start
    return replace(found, search_seconds=seconds) if cheaper is None else _started(found, cheaper, seconds)


def _answer(problem: Problem, deadline: float) -> Answer:
    if problem.late:
        return _whole(problem)
    return problem.bounded(solve(problem.graph, problem.order, problem.labels, deadline))


def _whole(problem: Problem) -> Answer:
    """Return the plan in which all ranks compute everything, and what ops cost at least in any plan."""
    return Answer(np.zeros(len(problem.graph.costs), dtype=np.int64), math.inf, problem.least_of_ops)


def _started(found: Found, start: Start, seconds: float) -> Found:
    """Return what was found with the layouts of a start that costs less."""
    # a start that the search has not tried may cost less than the bound
    least = min(found.least, float(start.nanoseconds))
    states = found.again
    again = None if states is None or start.states is None else replace(states, states=start.states)
    return replace(
        found, nanoseconds=start.nanoseconds, least=least, search_seconds=seconds, types=start.types, uses=start.uses,
        again=again, start=start.name, bytes=start.bytes, optimizer_states=start.optimizer_states, inside=start.inside,
    )  # fmt: skip
