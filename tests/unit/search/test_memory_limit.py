"""A limit of memory, beside all plans of small programs, each with the liveness of its explicit local program."""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_plans import choices, count, plans, random_plan
from random_traced import random_traced
from searched import MACHINES, MESHES, explicit, traced

from autopar import Mesh, Program
from autopar.costs.machine import Machine
from autopar.errors import MemoryLimitError
from autopar.plan.boundary import Boundary
from autopar.report.memory import memory_of
from autopar.runtime.localize import LocalPrograms
from autopar.search.memory.claims import memory_model
from autopar.search.memory.usage import usage_of
from autopar.search.problem.build import build
from autopar.search.problem.problem import Problem
from autopar.search.search import search
from autopar.search.solutions.found import Found, _layouts

MOST = 300  # plans that are made
SHAPES = [(MESHES[0], (8, 8)), (MESHES[0], (8,)), (MESHES[1], (8,))]


def peak_of_plan(problem: Problem, mesh: Mesh, machine: Machine, states: np.ndarray) -> int:
    """The peak of the largest rank's program, by the report that users see."""
    types, uses = _layouts(problem, states)
    program = explicit(problem.program, mesh, machine, Found(machine, 0, 0.0, 0.0, "", types, uses))
    return memory_of(LocalPrograms(program, lambda local: None)[0]).peak


def small(seed: int) -> tuple[Program, Mesh, Machine]:
    draw = random.Random(seed)
    mesh, shape = draw.choice(SHAPES)
    ops = draw.randint(2, 5) if mesh is MESHES[0] else draw.randint(1, 2)
    return traced(random_traced(draw, ops, shape)), mesh, MACHINES[seed % len(MACHINES)]


@functools.cache
def all_plans(seed: int) -> tuple[tuple[int, int], ...] | None:
    """The price and the peak of each plan; ``None`` if there are too many. Checks the estimates on the way."""
    program, mesh, machine = small(seed)
    boundary = Boundary(program, mesh)
    problem = build(boundary, machine)
    if math.prod(count(problem, v) for v in choices(problem)) > MOST:
        return None
    model = memory_model(problem)
    rows = []
    for states in plans(problem, boundary):
        chosen = states.tolist()
        peak = peak_of_plan(problem, mesh, machine, states)
        usage = usage_of(problem, chosen)
        assert model.held(states).max() <= peak, (seed, chosen, "the model counts more than the program has")
        assert usage.bytes == sum(usage.kinds.values())
        assert usage.bytes == peak, (seed, chosen, usage, peak)
        rows.append((problem.explicit_price(chosen), peak))
    return tuple(rows)


def check(seed: int) -> tuple[int, int]:
    """Compare with all plans, for each limit; return for how many, and for how many the search found no plan."""
    rows = all_plans(seed)
    if rows is None:
        return 0, 0
    program, mesh, machine = small(seed)
    boundary = Boundary(program, mesh)
    free = search(boundary, machine, memory=math.inf)
    peaks = sorted({peak for _, peak in rows})
    last = missed = 0
    for limit in reversed([peaks[0] - 1, *peaks]):
        fitting = [price for price, peak in rows if peak <= limit]
        try:
            found = search(boundary, machine, memory=limit)
        except MemoryLimitError:
            missed += bool(fitting)
            continue
        least = min(fitting)
        assert found.least <= least + 1e-6, (seed, limit, "the bound is above the best plan")
        assert least <= found.nanoseconds <= least * (1 + found.gap) + 1, (seed, limit)
        assert (found.nanoseconds, found.bytes) in rows and found.bytes <= limit == found.memory
        assert found.nanoseconds >= last, "less memory is not cheaper"
        last = least
        if limit == peaks[-1]:
            assert (found.nanoseconds, found.types, found.uses) == (free.nanoseconds, free.types, free.uses)
    return len(peaks), missed


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_the_best_of_all_plans_that_fit(first: int) -> None:
    compared, missed = map(sum, zip(*(check(seed) for seed in range(first, first + 20)), strict=True))
    assert compared >= 30
    assert missed <= compared / 20, "copies that live longer than one op are not priced: a plan may be missed"


@given(st.integers(0, 10_000), st.integers(1, 6))
@example(4, 4)  # two axes of a value that is read in several layouts
@example(889, 2)  # a view of a reduced value
@settings(max_examples=15, deadline=None)
@pytest.mark.simulated
def test_the_model_never_counts_more_than_a_plan_has(seed: int, ops: int) -> None:
    draw = random.Random(seed)
    program, mesh, machine = traced(random_traced(draw, ops, (8, 8))), MESHES[1], MACHINES[seed % len(MACHINES)]
    boundary = Boundary(program, mesh)
    problem = build(boundary, machine)
    model = memory_model(problem)
    for _ in range(3):
        states = random_plan(problem, boundary, draw)
        peak, usage = peak_of_plan(problem, mesh, machine, states), usage_of(problem, states.tolist())
        assert model.held(states).max() <= peak
        assert usage.bytes == pytest.approx(peak, rel=0.1)


def test_bytes_are_priced_alike_in_equal_blocks() -> None:
    """Interned costs: equal variables of equal blocks stay the same object, so that blocks can be folded."""
    lines = ["  x : f32[64 64] = input", *(f"  w{k} : f32[64 64] = param" for k in range(4)), "forward:"]
    lines += [f"  v{k} : f32[64 64] = mm({f'v{k - 1}' if k else 'x'}, w{k})" for k in range(4)]
    problem = build(Boundary(traced("\n".join([*lines, "  return v3"])), MESHES[1]), MACHINES[0])
    priced = memory_model(problem).weighted(problem.graph, {0: 1e-3, 8: 1e-3})
    homes = [problem.variables[problem.program.node(f"w{k}")] for k in range(4)]
    assert len({id(priced.costs[v]) for v in homes}) == 1
    assert (priced.costs[homes[0]] > problem.graph.costs[homes[0]]).all()
    assert (np.floor(priced.costs[homes[0]] * 2**20) == priced.costs[homes[0]] * 2**20).all()
