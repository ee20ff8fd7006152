"""Starting points of a search: presets under assignments of axes, and that what is found is not dearer than they."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from named_models import OnePair, random_named
from searched import FAST, MACHINES, SLOW
from searched import price as searched_price
from torch import nn

import autopar
from autopar import Mesh, Program
from autopar.capture import Captured, capture
from autopar.capture.naming import Names
from autopar.costs.machine import Machine
from autopar.costs.program_price import price, price_of_ops
from autopar.ir.layout import WHOLE, DistAttr
from autopar.ir.nodes import operands
from autopar.ir.record import TensorType
from autopar.model.planner import GreedyPasses
from autopar.passes import Fold, Follow, Levels, Lift, Place, Reshard, Share, run_passes
from autopar.plan.boundary import OPEN, Boundary
from autopar.plan.constraints import constraints
from autopar.search import search as searching
from autopar.search.search import search
from autopar.search.solver.solver import Answer
from autopar.search.starts import starting_points as starting
from autopar.search.starts.copied import Copied
from autopar.search.starts.starting_points import assignments, on_fewer_axes, starting_points

GREEDY = GreedyPasses()


def of_pair(small: int = 0) -> tuple[nn.Module, Captured]:
    model, x = random_named(random.Random(small), small=True)
    return model, capture(model, (x,))


# -- assignments ---------------------------------------------------------------------------------------------------


def test_every_assignment_of_two_axes() -> None:
    found = assignments(Mesh(a=8, one=1, b=8))
    assert found[:4] == [
        {"dp": ("a", "b")},
        {"tp": ("a", "b")},
        {"dp": ("a",), "tp": ("b",)},
        {"dp": ("b",), "tp": ("a",)},
    ]
    assert {"tp": ("a",)} in found and {"dp": ("b",), "cp": ("a",)} in found
    assert len(found) == len({str(sorted(roles.items())) for roles in found}) == 4**2 - 1
    assert found == assignments(Mesh(a=8, one=1, b=8))


@pytest.mark.parametrize("axes", [0, 1, 3])
def test_their_number(axes: int) -> None:
    assert len(assignments(Mesh({f"a{k}": 2 for k in range(axes)}))) == 4**axes - 1


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        (Mesh(a=2), ["a"]),
        (Mesh(a=2, b=3), ["ab", "b", "a"]),
        (Mesh(a=2, one=1, b=2, c=2), ["abc", "bc", "c"]),
        (Mesh(a=4, b=2, c=2), ["abc", "ac", "bc", "c"]),
        (Mesh(one=1), []),
    ],
    ids=str,
)
def test_one_assignment_for_each_number_of_ranks(mesh: Mesh, axes: list[str]) -> None:
    assert ["".join(roles["dp"]) for roles in on_fewer_axes(mesh)] == axes
    assert all(roles.keys() == {"dp"} for roles in on_fewer_axes(mesh))


def test_plans_on_fewer_axes_come_first() -> None:
    model, captured = of_pair()
    names = [name for name, _ in starting_points(model, captured, Mesh(a=2, b=2))]
    assert names[:3] == ["ddp, dp=a+b", "ddp, dp=b", "fsdp, dp=a+b"] and len(names) == len(set(names))


def test_presets_on_the_axes_of_a_mesh() -> None:
    model, captured = of_pair()
    points = dict(starting_points(model, captured, Mesh(a=2, b=2)))
    both = points["fsdp+tp, dp=a tp=b"]
    assert both["up_proj_weight"] == DistAttr.split("b", "a") and both["x"] == DistAttr.split("a", None, None)
    over_both = points["megatron, tp=a+b"]
    assert over_both["down_proj_weight"] == DistAttr.split(None, ("a", "b")) and "x" not in over_both
    assert points["ddp, dp=a cp=b"] == {"x": DistAttr.split("a", "b", None)}
    assert points["ddp, dp=b"] == {"x": DistAttr.split("b", None, None)}
    layouts = [frozenset(point.items()) for point in points.values()]
    assert len(set(layouts)) == len(layouts)
    assert list(points) == [name for name, _ in starting_points(model, captured, Mesh(a=2, b=2))]


def test_they_are_what_a_mesh_with_these_names_has() -> None:
    model, captured = of_pair(1)
    mesh = Mesh(tp=2, dp=2)
    for name in ("ddp", "fsdp", "megatron", "megatron+sp", "fsdp+tp"):
        attrs, _ = constraints(name, model, mesh, captured)
        assert attrs in [point for _, point in starting_points(model, captured, mesh)], name


# -- the search ----------------------------------------------------------------------------------------------------


def explicit_price(program: Program, mesh: Mesh, machine: Machine, attrs: Any) -> int:
    made = program.copy()
    placing = [Place(mesh, attrs, machine=machine), Follow(machine), Lift()]
    run_passes(made, [*placing, Reshard(machine=machine), Fold(machine=machine), Share(), Levels(machine)])
    return autopar.price(made, machine).nanoseconds


CASES = [
    *[(Mesh(a=2), False, seed) for seed in range(3)],
    *[(Mesh(a=4), False, seed) for seed in range(3)],
    (Mesh(a=2, b=2), True, 0),
    *[
        pytest.param(Mesh(a=2, b=2), True, seed, marks=pytest.mark.sweep("the first seed runs on two axes"))
        for seed in (1, 2)
    ],
]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "small", "seed"), CASES, ids=str)
def test_no_preset_is_cheaper_than_what_is_found(mesh: Mesh, small: bool, seed: int) -> None:
    model, x = random_named(random.Random(seed), small)
    captured, machine = capture(model, (x,)), MACHINES[seed % len(MACHINES)]
    points = list(starting_points(model, captured, mesh))
    found = search(Boundary(captured.program, mesh), machine, starts=points, greedy=GREEDY)
    prices = {name: explicit_price(captured.program, mesh, machine, attrs) for name, attrs in points}
    assert found.nanoseconds <= min(prices.values()), (found.nanoseconds, prices)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """A pair of products for which splits are worth their transfers."""
    with torch.device("meta"):
        model = OnePair(random.Random(0))
        model.up_proj, model.down_proj = nn.Linear(6, 64), nn.Linear(64, 6)
        return model, torch.empty(256, 64, 6)


@pytest.fixture
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds only the plan in which all ranks compute everything."""

    def solve(graph: Any, *_: object) -> Answer:
        return Answer(np.zeros(len(graph.costs), dtype=np.int64), math.inf, 1.0)

    monkeypatch.setattr(searching, "solve", solve)


@pytest.mark.simulated
@pytest.mark.usefixtures("nothing_found")
def test_a_cheaper_start_becomes_the_answer() -> None:
    model, x = wide()
    captured, mesh = capture(model, (x,)), Mesh(a=2)
    points = list(starting_points(model, captured, mesh))
    prices = {name: explicit_price(captured.program, mesh, SLOW, attrs) for name, attrs in points}
    cheapest = min(prices, key=lambda name: prices[name])
    boundary = Boundary(captured.program, mesh)
    alone = search(boundary, SLOW, starts=points)
    assert alone.start == "" and alone.nanoseconds > prices[cheapest]
    found = search(boundary, SLOW, starts=iter(points), greedy=GREEDY)
    assert found.start == cheapest and found.nanoseconds == prices[cheapest] and found.idle_axes(mesh) == []
    assert searched_price(captured.program, mesh, SLOW, found) == found.nanoseconds >= found.least
    assert search(boundary, SLOW, starts=points, greedy=GREEDY, time_limit=0.0).start == ""


@pytest.mark.simulated
@pytest.mark.usefixtures("nothing_found")
@pytest.mark.parametrize("mesh", [
    Mesh(a=2, b=3), pytest.param(Mesh(a=2, b=2, c=2), marks=pytest.mark.sweep("two axes have starts to try, too"))
], ids=str)  # fmt: skip
def test_a_time_limit_that_prices_have_used_up_leaves_time_for_starts(mesh: Mesh) -> None:
    model, x = wide()
    captured = capture(model, (x,))
    points = list(starting_points(model, captured, mesh))[:4]
    prices = [explicit_price(captured.program, mesh, SLOW, attrs) for _, attrs in points]
    found = search(Boundary(captured.program, mesh), SLOW, starts=points, greedy=GREEDY, time_limit=1e-6)
    assert found.nanoseconds == min(prices) and found.start and "time limit" in found.certificate


@pytest.mark.simulated
@pytest.mark.usefixtures("nothing_found")
def test_a_start_meets_the_constraints_of_the_user() -> None:
    model, x = wide()
    captured, mesh = capture(model, (x.flatten(0, 1),)), Mesh(a=2)
    kept = DistAttr.split(None, "a")
    asked = {"up_proj_weight": kept, "x": DistAttr((OPEN, WHOLE)), "relu": DistAttr((OPEN, WHOLE))}
    seen = set()
    for point in starting_points(model, captured, mesh):
        found = search(Boundary(captured.program, mesh, asked), FAST, starts=[point], greedy=GREEDY)
        if not found.start:
            continue
        seen.add(found.start.partition(",")[0])
        home, given = (found.types[captured.program.node(name)] for name in ("up_proj_weight", "x"))
        assert isinstance(home, TensorType) and isinstance(given, TensorType)
        assert home.attr == kept and given.attr.dims[1] == WHOLE
        node = captured.program.node("relu")
        for user in node.users:
            for value, need in zip(operands(user), found.uses[user], strict=True):
                assert value is not node or need is None or need.placed.attr.dims[1] == WHOLE, found.start
    assert "ddp" in seen and len(dict(starting_points(model, captured, mesh))) > len(seen)


def halves(mesh: Mesh) -> tuple[Captured, list[tuple[str, dict[str, DistAttr]]]]:
    """A program whose dims are too short for four ranks: the search tries no split that leaves half of them idle."""

    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().sin()

    captured = capture(Exp(), (torch.empty((2,) * 14, device="meta"),))
    return captured, list(starting_points(Exp(), captured, mesh))


def test_a_start_that_the_search_does_not_try() -> None:
    """It is compared also where the search has its proof."""
    mesh = Mesh(a=4)
    captured, points = halves(mesh)
    boundary = Boundary(captured.program, mesh)
    bare = search(boundary, SLOW)
    assert bare.exact and bare.idle_axes(mesh) == ["a"]
    found = search(boundary, SLOW, starts=points, greedy=GREEDY)
    assert found.start.startswith("ddp, ") and found.nanoseconds < bare.nanoseconds
    assert found.least <= found.nanoseconds and found.again is None
    assert searched_price(captured.program, mesh, SLOW, found) == found.nanoseconds


def test_a_start_that_the_search_has_tried_is_not_placed_again() -> None:
    """Where there is a proof."""
    model, captured = of_pair()
    mesh, placed = Mesh(a=2), []

    class Counting(GreedyPasses):
        def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Program:
            placed.append(boundary)
            return super().placed(boundary, machine, strict=strict)

    points = list(starting_points(model, captured, mesh))
    assert search(Boundary(captured.program, mesh), SLOW, starts=points, greedy=Counting()).exact
    assert len(placed) < len(points)


def test_a_start_whose_ops_alone_cost_more_is_not_made_explicit() -> None:
    mesh, on = Mesh(a=4), MACHINES[-1]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))
        captured = capture(model, (torch.ones(2, 4096),))  # on four ranks two have no row
    made = {"placed": 0, "explicit": 0}

    class Counting(GreedyPasses):
        def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Copied:
            made["placed"] += 1
            copied = super().placed(boundary, machine, strict=strict)
            rows = price(super().explicit(copied.program, machine), machine).rows
            of_ops = sum(row.nanoseconds for row in rows if row.kind == "op")
            assert price_of_ops(copied.program, machine) == of_ops > 0
            return copied

        def explicit(self, placed: Program, machine: Machine) -> Program:
            made["explicit"] += 1
            return super().explicit(placed, machine)

    points = list(starting_points(model, captured, mesh))
    found = search(Boundary(captured.program, mesh), on, starts=points, greedy=Counting())
    assert found.exact and not found.start
    assert made["placed"] and not made["explicit"]


def test_the_layouts_of_a_preset_are_found_once_for_axes_of_equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured = of_pair()
    asked, asked_names = [], dict[str, Names]()

    def counting(name: str, model: nn.Module, mesh: Mesh, captured: Captured, names: Names) -> Any:
        asked.append((name, mesh))
        assert names is asked_names.setdefault("", names)
        return constraints(name, model, mesh, captured, names=names)

    monkeypatch.setattr(starting, "constraints", counting)
    points = list(starting_points(model, captured, Mesh(a=2, b=2)))
    assert len(asked) == len(set(asked)) < len(points)
