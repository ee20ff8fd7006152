"""Give the layouts of a plan to its program at other sizes: each value is split as it was, and nothing is searched.

    x : f32[32/dp 64]               x : f32[8/dp 64]
    view : f32[2048/dp 64]     →    view : f32[512/dp 64]         of 3 rows: f32[(3/dp 64) 64]

Each op takes the strategy whose layouts are nearest to those that it had: the same where its rule has it, and over
fewer axes where a dim has become too short for them. An op that the plan has not, because forward takes another way at
these sizes, reads its operands as they are, if it can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import PlanError
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.text.tokens import Cursor
from autopar.ir.text.types import read_placed
from autopar.plan.boundary import Boundary
from autopar.search.memory.usage import usage_of
from autopar.search.problem.build import build, tangent_states
from autopar.search.problem.ending import Ending
from autopar.search.problem.problem import Problem
from autopar.search.problem.strategies import Placed
from autopar.search.solutions.found import Found, found_by
from autopar.search.solutions.planned import Planned, layout_text
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.value_names import value_names
from autopar.search.solver.solver import Answer

REASON = "the layouts are those of the first capture, of other sizes, so nothing is proven"
NEAR, FAR = 1, 4  # how far two layouts are apart that split over the same axes, and over others
OTHER = 10_000  # how far apart two ops are that read or make other values
Axes = tuple[str, ...]
Split = tuple[tuple[tuple[Axes, ...], ...], tuple[tuple[str, str], ...]]  # dims, pending


@gc_paused()
def at_other_sizes(
    solution: Solution, boundary: Boundary, machine: Machine, *, strict: bool, ending: Ending | None,
    memory: float | None, reserve: float,
) -> Found | None:  # fmt: skip
    """Return the layouts of a plan for its program at other sizes, or a part of it; ``None`` if it is of another.

    Also ``None`` if constraints want other layouts, or a rank needs more memory. All ranks come to the same result.

    Args:
        ending: what ends the step, if the program is a micro-batch.
        memory: the most bytes that a rank may use; ``None``: the capacity of the machine, if it is known.
        reserve: how many of these bytes to leave free.
    """
    start, names = time.monotonic(), value_names(boundary.program)
    if any(names[n] not in solution.values for n in boundary.program.placeholders if record_of(n).role == "param"):
        return None
    problem = build(boundary, machine, strict=strict, ending=ending, priced=False)
    states = _states(problem, {node: solution.values.get(name) for node, name in names.items()}, solution)
    for node, states_of in tangent_states(problem, boundary).items():
        states[problem.variables[node]] = states_of[states[problem.value(boundary.tangents[node]).variable]]
    try:
        found = found_by(Answer(states, math.inf, 0.0), problem, machine, start, math.inf)
    except PlanError:
        return None
    limit = machine.capacity if memory is None else memory
    if limit is None or limit == math.inf:
        return replace(found, again=None, least=0.0, reason=REASON)
    bytes = int(usage_of(problem, states.tolist(), ending).bytes)  # of this call's sizes
    if bytes > limit - reserve:
        return None
    return replace(found, again=None, least=0.0, reason=REASON, memory=limit, bytes=bytes)


def _states(problem: Problem, planned: Mapping[fx.Node, Planned | None], solution: Solution) -> np.ndarray:
    """Return the state of each variable whose layouts are nearest to the planned ones."""
    states = np.zeros(len(problem.graph.costs), dtype=np.int64)
    allowed = dict(problem.allowed)
    known: dict[object, int] = {}
    for node, variable in problem.variables.items():
        options: Sequence[Any] = problem.homes.get(variable) or problem.placed[variable]
        plan = planned[node] or _as_read(problem, node, states)
        key = id(options), plan, variable if variable in allowed else None
        if key not in known:
            fits = range(len(options)) if variable not in allowed else np.flatnonzero(allowed[variable]).tolist()
            apart = {k: _distance(options[k], plan) for k in fits}
            known[key] = min(apart, key=apart.__getitem__)
        states[variable] = known[key]
    for parameter, state in problem.chosen_states.items():
        text = solution.optimizer_states.get(name_of(parameter))
        if text is not None:
            states[state.variable] = min(range(len(state.layouts)), key=lambda k: _apart(state.layouts[k], text))
    return states


def _as_read(problem: Problem, node: fx.Node, states: np.ndarray) -> Planned:
    """Return the layouts with which an op reads what its operands give; results may have any."""
    values = [problem.value(operand) for operand in operands(node)]
    have = [value.states[states[value.variable]][0] for value in values]
    needs = [layout_text(value.type.shape, attr) for value, attr in zip(values, have, strict=True)]
    return Planned((), tuple(needs))


def _distance(option: DistAttr | Placed, plan: Planned) -> int:
    """Return how far a strategy of an op, or a home, is from what a plan has."""
    if isinstance(option, DistAttr):
        return _apart_in_all([option], plan.gives) if plan.gives else 0
    if not plan.gives:
        return OTHER * (option.inside is not None) or _apart_in_all(option.needs, plan.needs)
    inside = () if option.inside is None else option.inside.steps
    if len(inside) != len(plan.inside):
        return OTHER + _apart_in_all(option.gives, plan.gives)
    needs = 0 if inside else _apart_in_all(option.needs, plan.needs)
    return needs + _apart_in_all(option.gives, plan.gives) + sum(
        _apart_in_all(step.needs, each.needs) + _apart_in_all(step.gives, each.gives)
        for step, each in zip(inside, plan.inside, strict=True)
    )  # fmt: skip


def _apart_in_all(attrs: Sequence[DistAttr | None], texts: Sequence[str | None]) -> int:
    return sum(map(_apart, attrs, texts)) if len(attrs) == len(texts) else OTHER


def _apart(attr: DistAttr | None, text: str | None) -> int:
    if attr is None or text is None:
        return FAR * (attr is not None or text is not None)
    (dims, pending), (its, planned) = _split(attr), _read(text)
    if (dims, pending) == (its, planned):
        return 0
    same = pending == planned and list(map(_axes, dims)) == list(map(_axes, its))
    return NEAR if same else FAR


def _axes(parts: Iterable[Axes]) -> Axes:
    return tuple(axis for axes in parts for axis in axes)


@lru_cache(maxsize=65536)
def _split(attr: DistAttr) -> Split:
    """Return which axes split each dim, without sizes: parts that no axis splits count once, and not at the end."""
    dims = []
    for dim in attr.dims:
        parts: list[Axes] = []
        for _, axes in dim:
            if axes or not parts or parts[-1]:
                parts.append(axes)
        if not parts[-1]:
            parts.pop()
        dims.append(tuple(parts))
    return tuple(dims), tuple(attr.pending)


@lru_cache(maxsize=65536)
def _read(text: str) -> Split:
    cursor = Cursor()
    cursor.open(1, text)
    return _split(read_placed(cursor).attr)
