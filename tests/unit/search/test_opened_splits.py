"""Opened splits: a search also splits what only an expansion can split, at the price of the expansion."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lookup_models import DEAR, Language, Lookups, tokens
from random_plans import random_plan, tie_tangents
from search_oracle import check, price_of_plan
from searched import MACHINES, MESHES, SLOW, explicit, price, traced

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.costs.machine import Machine
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.model.planner import GreedyPasses
from autopar.plan.boundary import Boundary
from autopar.search import search as searching
from autopar.search.problem import inside, narrowing, opened
from autopar.search.problem.build import build
from autopar.search.problem.problem import Problem
from autopar.search.search import search
from autopar.search.solutions.found import Found, _layouts
from autopar.search.solutions.solution import solution_from
from autopar.search.solver.solver import Answer
from autopar.search.starts.starting_points import starting_points
from autopar.search.transfer_prices.classes import UNREAD

PROGRAMS = {
    "softmax": """
  x : f32[4 16] = input
forward:
  s : f32[4 16] = _softmax(x, -1, False)
  return s
""",
    "softmax before a product": """
  x : f32[4 16] = input
  w : f32[16 8] = param
forward:
  s : f32[4 16] = _softmax(x, -1, False)
  y : f32[4 8] = mm(s, w)
  return y
""",
    "embedding": """
  w : f32[16 8] = param
  i : i64[4 8] = input
forward:
  y : f32[4 8 8] = embedding(w, i)
  return y
""",
    "two embeddings": """
  w : f32[16 8] = param
  v : f32[16 8] = param
  i : i64[8] = input
forward:
  y : f32[8 8] = embedding(w, i)
  z : f32[8 8] = embedding(v, i)
  return (y, z)
""",
    "loss": """
  x : f32[8 16] = input
  t : i64[8] = input
forward:
  l : f32[8 16] = _log_softmax(x, 1, False)
  n : (f32[8], f32[]) = nll_loss_forward(l, t, None, 0, -100)
  n0 : f32[8] = n[0]
  s : f32[] = sum.default(n0)
  return s
""",
}


@pytest.mark.simulated
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_of_all_plans(name: str, mesh: Mesh) -> None:
    for machine in (*MACHINES, DEAR):
        assert check(traced(PROGRAMS[name]), mesh, machine, name) or mesh.size > 2


EXPANDED = {  # the same programs with the ops of the expansion
    "softmax before a product": """
  x : f32[4 16] = input
  w : f32[16 8] = param
forward:
  m : f32[4 1] = amax(x, [-1], True)
  d : f32[4 16] = sub.Tensor(x, m)
  e : f32[4 16] = exp(d)
  t : f32[4 1] = sum.dim_IntList(e, [-1], True)
  s : f32[4 16] = div.Tensor(e, t)
  y : f32[4 8] = mm(s, w)
  return y
""",
    "two embeddings": """
  w : f32[16 8] = param
  v : f32[16 8] = param
  i : i64[8] = input
forward:
  p : i64[16] = arange(16)
  y : f32[8 8] = autopar::look_up(w, i, p, 16)
  z : f32[8 8] = autopar::look_up(v, i, p, 16)
  return (y, z)
""",
}


@pytest.mark.simulated
@pytest.mark.parametrize("mesh", [*MESHES, Mesh(a=4)], ids=str)
@pytest.mark.parametrize("name", EXPANDED)
def test_no_dearer_than_the_program_that_is_expanded(name: str, mesh: Mesh) -> None:
    """Also where two ops share the places of their indices."""
    for machine in (*MACHINES, DEAR):
        found = search(Boundary(traced(PROGRAMS[name]), mesh), machine)
        assert found.exact
        assert found.nanoseconds <= search(Boundary(traced(EXPANDED[name]), mesh), machine).nanoseconds, machine.name


def problem_of(mesh: Mesh, model: torch.nn.Module, seed: int = 0) -> Problem:
    program = capture(model, tokens()).program
    program.mesh = mesh
    return build(Boundary(program, mesh), SLOW)


def opened_plan(problem: Problem, draw: random.Random) -> np.ndarray:
    """A random plan with an opened strategy for each op that has one."""
    boundary = Boundary(problem.program, problem.mesh)
    states = random_plan(problem, boundary, draw)
    for variable in problem.opened:
        rows = [k for k, placed in enumerate(problem.placed[variable]) if placed.inside is not None]
        states[variable] = draw.choice(rows)
    tie_tangents(problem, boundary, states)
    return states


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(a=2), Mesh(a=3)], ids=str)
def test_the_price_of_every_opened_strategy(mesh: Mesh) -> None:
    """It is that of the explicit program, with all other ops whole."""
    problem, compared = problem_of(mesh, Lookups()), 0
    for variable in problem.opened:
        for state, placed in enumerate(problem.placed[variable]):
            if placed.inside is not None:
                states = np.zeros(len(problem.graph.costs), dtype=np.int64)
                states[variable] = state
                tie_tangents(problem, Boundary(problem.program, mesh), states)
                explicit_price = price_of_plan(problem, mesh, SLOW, states)
                assert problem.explicit_price(states.tolist()) == explicit_price, (variable, placed)
                compared += 1
    assert len(problem.opened) == compared == 14


@pytest.mark.simulated
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_price_is_found(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cheapest = inside.Expanded._cheapest

    def other(self: Any, *arguments: Any) -> Any:
        found = cheapest(self, *arguments)
        return None if found is None else (found[0], found[1] + wrong)

    monkeypatch.setattr(inside.Expanded, "_cheapest", other)
    opened._strategies.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_the_price_of_every_opened_strategy(Mesh(a=2))
    finally:
        opened._strategies.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2)], ids=str)
def test_numbers_of_opened_plans_from_a_file(mesh: Mesh, tmp_path: Path) -> None:
    """Every op that can be opened is, and the numbers are those of a single device."""
    torch.manual_seed(0)
    model, inputs = Lookups().double(), tokens()
    program = capture(model, inputs).program
    program.mesh = mesh
    problem, draw = build(Boundary(program, mesh), SLOW), random.Random(0)
    loss = model(*inputs)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for _ in range(3):
        states = opened_plan(problem, draw)
        types, uses = _layouts(problem, states)
        steps, nanoseconds = problem.inside(states.tolist()), problem.explicit_price(states.tolist())
        assert len(steps) == len(problem.opened) == 14
        found = Found(SLOW, nanoseconds, 0.0, 0.0, "", types, uses, inside=steps)
        solution_from(found, program, mesh, "call").save(tmp_path / "plan.json")
        parallel = autopar.parallelize(model, mesh, str(tmp_path / "plan.json"), example=inputs)
        assert autopar.price(parallel.program, SLOW).nanoseconds >= nanoseconds
        result = parallel.simulate(*inputs)
        model.zero_grad()
        result.backward()
        torch.testing.assert_close(result, loss, rtol=0, atol=1e-12)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", pytest.param("dear", marks=pytest.mark.sweep("no preset is cheaper on it below"))]
)
def test_no_preset_is_cheaper_for_a_large_vocabulary(name: str) -> None:
    """Presets are expanded, too. The classes of the loss are split, and so is the table where that is cheaper."""
    machine = DEAR if name == "dear" else name
    with torch.device("meta"):
        model, ids = Language(131072, 2048), torch.zeros(4, 512, dtype=torch.int64)
    found = autopar.parallelize(model, Mesh(tp=8), example=(ids, ids), machine=machine)
    assert found.solution is not None and found.solution.exact
    for preset in ("megatron", "megatron+sp", "ddp"):
        given = autopar.parallelize(model, Mesh(tp=8), preset, example=(ids, ids), machine=machine)
        assert autopar.price(given.program, machine).nanoseconds > found.solution.nanoseconds, preset
    assert autopar.price(found.program, machine).nanoseconds == found.solution.nanoseconds
    assert any("gather_held" in str(node.target) for node in found.program.nodes)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(a=4), Mesh(a=2, b=2)], ids=str)
@pytest.mark.parametrize("machine", [DEAR, MACHINES[-1]], ids=lambda machine: machine.name)
def test_no_preset_under_any_assignment_is_cheaper(machine: Machine, mesh: Mesh) -> None:
    """They are placed with their expansions, and the search does not see them."""
    with torch.device("meta"):
        model, ids = Language(4096, 64), torch.zeros(8, 16, dtype=torch.int64)
    captured, greedy = capture(model, (ids, ids)), GreedyPasses()
    found = search(Boundary(captured.program, mesh), machine)
    compared = 0
    for name, layouts in starting_points(model, captured, mesh):
        placed = greedy.placed(Boundary(captured.program, mesh, layouts), machine, strict=False)
        nanoseconds = autopar.price(greedy.explicit(placed.program, machine), machine).nanoseconds
        assert found.nanoseconds <= nanoseconds, name
        compared += bool(placed.steps)
    assert compared > 1 and found.exact


@pytest.mark.long
def test_a_searched_step_with_opened_splits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, mesh = tokens(64), Mesh(a=2, b=2)
    losses, programs, expressions = [], [], []
    for plan in (None, str(tmp_path / "plan.json")):
        torch.manual_seed(0)
        model = Language().double()
        parallel = autopar.parallelize(model, mesh, plan, **({"machine": DEAR} if plan is None else {}))
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), microbatches=2, zero="search")
        losses.append([float(step.simulate(*inputs)) for _ in range(2)])
        solution = step.solution
        assert solution is not None
        programs.append(str(step.program))
        expressions.append(solution.expression())
        solution.save(tmp_path / "plan.json")
        assert autopar.price(step.program, DEAR).nanoseconds == solution.nanoseconds
    assert "_held(" in programs[0] and programs[0] == programs[1] and losses[0] == losses[1]
    assert expressions[0].at() == pytest.approx(solution.seconds, abs=1e-9 * expressions[0].terms)
    torch.manual_seed(0)
    model = Language().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for loss in losses[0]:
        optimizer.zero_grad()
        own = model(*inputs)
        own.backward()
        optimizer.step()
        assert loss == pytest.approx(own.item(), abs=1e-12)


@pytest.mark.simulated
def test_plans_of_an_opened_solution() -> None:
    model, inputs = Language().double(), tokens(64)
    solution = autopar.parallelize(model, Mesh(a=2), example=inputs, machine=DEAR).solution
    assert solution is not None
    assert any(planned.inside for planned in solution.values.values())
    assert solution.explain("embed_tokens.weight").alternatives[0].nanoseconds == solution.nanoseconds
    split = solution.fix({"embed_tokens.weight": ("a", None)})
    assert split.values["param embed_tokens.weight"].gives == ("[64/a 16]",)
    assert split.nanoseconds >= solution.nanoseconds and "param embed_tokens.weight" in str(solution.diff(split))


def test_what_an_expansion_does_not_read_is_not_moved() -> None:
    """The backward of a loss over split classes needs the shape of the scores alone."""
    problem = problem_of(Mesh(a=2), Language(32))
    node = next(node for node in problem.variables if node.name == "nll_loss_backward")
    placed = [p for p in problem.placed[problem.variables[node]] if p.inside is not None]
    assert placed and all(p.needs[1] == p.needs[3] == UNREAD != p.needs[2] for p in placed)
    scores = problem.value(node.args[1])  # type: ignore[arg-type]
    have = scores.states[-1]
    assert problem.chains.chain(scores.type.shape, have, (UNREAD, have[1])) == ()
    prices = problem.chains.prices(scores.type.shape, scores.states, [(UNREAD, have[1]), have])
    assert not prices[:, 0].any() and prices[:, 1].any()


def test_a_constraint_that_only_an_opened_split_meets() -> None:
    mesh, split = Mesh(a=2), DistAttr.split(None, "a")
    program = traced(PROGRAMS["softmax"])
    found = search(Boundary(program, mesh, {"x": split, "s": split}), SLOW)
    assert program.node("s") in found.inside and found.nanoseconds == price(program, mesh, SLOW, found)
    text = str(explicit(program, mesh, SLOW, found))
    assert "+max:a = amax" in text and "all_reduce" in text and "all_gather" not in text


def nothing(graph: Any, *_: object) -> Answer:
    return Answer(np.zeros(len(graph.costs), dtype=np.int64), math.inf, 1.0)


@pytest.mark.simulated
def test_a_start_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search finds only the plan in which all ranks compute everything."""
    monkeypatch.setattr(searching, "solve", nothing)
    mesh = Mesh(a=4)
    with torch.device("meta"):
        model, ids = Language(64, 16), torch.zeros(4, 8, dtype=torch.int64)
    captured = capture(model, (ids, ids))
    points = [p for p in starting_points(model, captured, mesh) if p[0].startswith("megatron")]
    found = search(Boundary(captured.program, mesh), DEAR, starts=points, greedy=GreedyPasses())
    assert found.start.startswith("megatron") and len(found.inside) >= 4
    assert price(captured.program, mesh, DEAR, found) == found.nanoseconds
    monkeypatch.undo()
    best = search(Boundary(captured.program, mesh), DEAR, starts=points, greedy=GreedyPasses())
    assert best.exact and best.nanoseconds <= found.nanoseconds


@pytest.mark.long
def test_three_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of the outline is below the cheapest of all plans, with operands that are not read."""
    mesh = Mesh(a=2, b=2, c=2)
    with torch.device("meta"):
        model, ids = Language(64, 16), torch.zeros(8, 8, dtype=torch.int64)
    boundary = Boundary(capture(model, (ids, ids)).program, mesh)
    full = search(boundary, DEAR)
    assert full.inside and full.gap < 0.1
    monkeypatch.setattr(narrowing, "PAIRS", 0)
    narrow = search(boundary, DEAR)
    assert narrow.least <= full.nanoseconds and full.least <= narrow.nanoseconds < 1.1 * full.nanoseconds
    assert narrow.inside


def test_a_file_with_another_expansion(tmp_path: Path) -> None:
    model, inputs, path = Language().double(), tokens(64), tmp_path / "plan.json"
    solution = autopar.parallelize(model, Mesh(a=2), example=inputs, machine=DEAR).solution
    assert solution is not None
    name = next(name for name, planned in solution.values.items() if planned.inside)
    for change, text in (
        ({"inside": 1}, f"values.{name}.inside: 1 is not of the right kind"),
        ({"inside": [{"gives": []}]}, f"values.{name}.inside[0].needs: missing"),
        ({"inside": [{"gives": [], "needs": []}]}, f"the plan has 1 layouts for the expansion of {name}, which has"),
    ):
        content = solution.to_json()
        content["values"][name] |= change
        path.write_text(json.dumps(content))
        with pytest.raises(PlanError) as caught:
            autopar.parallelize(model, Mesh(a=2), str(path), example=inputs)
        assert text in str(caught.value)
    content = solution.to_json()
    other = next(key for key in content["values"] if key.startswith("forward t"))
    content["values"][other]["inside"] = content["values"][name]["inside"]
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=f"the plan has an expansion of {other}, which has none; search the plan again"):
        autopar.parallelize(model, Mesh(a=2), str(path), example=inputs)


class Classifier(torch.nn.Module):
    """Its loss weighs the classes."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear, self.loss = torch.nn.Linear(4, 8, dtype=torch.float64), loss
        self.register_buffer("weight", torch.linspace(0.5, 2, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), target, self.weight)


WEIGHTED = {
    "nll_loss": lambda z, y, w: torch.nn.functional.nll_loss(z.log_softmax(1), y, w),
    "cross_entropy": lambda z, y, w: torch.nn.functional.cross_entropy(z, y, w, ignore_index=3),
    "smoothed, in two dims": lambda z, y, w: torch.nn.functional.cross_entropy(
        z[:, :, None], y[:, None], w, label_smoothing=0.1
    ),
}
SPLIT = {"linear.weight": ("b",)}


@pytest.mark.parametrize(
    ("loss", "mesh", "plan"),
    [
        *((loss, mesh, None) for loss in WEIGHTED for mesh in (Mesh(a=2), Mesh(a=2, b=2))),
        *((loss, Mesh(a=2, b=2), SPLIT) for loss in WEIGHTED),
        *(pytest.param("cross_entropy", Mesh(a=2, b=2, c=2), plan, marks=pytest.mark.long) for plan in (None, SPLIT)),
    ],
    ids=str,
)
def test_weights_of_classes(loss: str, mesh: Mesh, plan: Any) -> None:
    """An op inside of the expanded loss reads whole weights, so no split of the classes splits these as well."""
    torch.manual_seed(0)
    model = Classifier(WEIGHTED[loss])
    alone, x, target = copy.deepcopy(model), torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 8
    step = autopar.parallelize(model, mesh, plan).train_step(torch.optim.SGD(model.parameters(), lr=1.0))
    value, expected = step.simulate(x, target), alone(x, target)
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours, theirs - theirs.grad)
