"""The constraint solver is an oracle: it agrees with all orders of few ops, and no policy is below it."""

from __future__ import annotations

import builtins
import random
from typing import Any

import pytest
from small_steps import random_step, shortest

from autopar.errors import ScheduleError
from autopar.scheduling import Op, schedule, simulate
from autopar.scheduling.cpsat import MOST, solve
from autopar.scheduling.simulation import ISSUES, Issue


@pytest.fixture
def solver() -> None:
    pytest.importorskip("ortools", reason="needs OR-Tools: pip install autopar[cpsat]")


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("seed", range(10))
def test_it_finds_the_shortest_of_all_orders(issue: Issue, seed: int) -> None:
    draw = random.Random(seed)
    ops = random_step(draw, draw.randint(2, 6), whole=True)
    found, best = solve(ops, issue), shortest(ops, issue, 0.0)
    assert found.schedule.makespan == pytest.approx(best)
    assert found.bound == pytest.approx(best) and found.is_optimal


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("count", [20, 40, 60])
def test_the_default_is_near_the_shortest(issue: Issue, count: int) -> None:
    for seed in range(3):
        ops = random_step(random.Random(seed), count, whole=True)
        found, ours = solve(ops, issue, seconds=2.0), schedule(ops, issue=issue)
        assert simulate(ops, found.schedule.lines, issue).makespan == found.schedule.makespan >= found.bound
        assert ours.bound <= found.bound * (1 + 1e-9) <= ours.makespan * (1 + 2e-9), "collectives here are whole"
        assert found.schedule.makespan <= ours.makespan * (1 + 1e-9) <= 1.15 * found.schedule.makespan


@pytest.mark.usefixtures("solver")
def test_it_tells_what_nothing_can_gain() -> None:
    """An op and a collective that each depend on the other's end leave a gap that Jackson's bound does not see."""
    ops = [
        Op("first", "compute", 2.0),
        Op("second", "compute", 3.0),
        Op("sum", "dp", 4.0, ("first",)),
        Op("late", "dp", 3.0, ("second",)),
        Op("read", "compute", 3.0, ("sum",)),
        Op("last", "compute", 1.0, ("late",)),
    ]
    found = solve(ops)
    assert found.is_optimal and found.schedule.makespan == shortest(ops, "enqueue", 0.0) >= found.schedule.bound
    assert found.schedule.policy == "cp-sat"


@pytest.mark.usefixtures("solver")
def test_the_same_input_gives_the_same_order() -> None:
    ops = random_step(random.Random(5), 30, whole=True)
    assert solve(ops, seconds=1.0) == solve(list(ops), seconds=1.0)


@pytest.mark.usefixtures("solver")
def test_nothing_takes_no_time() -> None:
    assert solve([]).schedule.makespan == 0 and solve([]).is_optimal
    assert solve([Op("op", "compute", 0.0)]).is_optimal


@pytest.mark.usefixtures("solver")
def test_it_refuses_what_is_too_large() -> None:
    ops = [Op(f"op{k}", "compute", 1.0) for k in range(MOST + 1)]
    with pytest.raises(ScheduleError, match=r"cp-sat orders at most 80 ops, and there are 81; use 'longest-tail'"):
        solve(ops)
    with pytest.raises(ScheduleError, match=r"seconds=-1; give a finite number from 0"):
        solve(ops[:2], seconds=-1)
    with pytest.raises(ScheduleError, match=r"issue='late'; there are"):
        solve(ops[:2], "late")  # type: ignore[arg-type]


def test_without_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def missing(name: str, *args: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "ortools":
            raise ModuleNotFoundError("No module named 'ortools'", name="ortools")
        return imported(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"need OR-Tools: pip install autopar\[cpsat\], or use the policy"):
        solve([Op("op", "compute", 1.0)])
