"""The searched plan as a user sees it: its certificate and table, as a file, and asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import FAST
from squared_loss import Loss
from torch import nn

import autopar
from autopar import Mesh
from autopar.costs.machine import machine_of
from autopar.errors import PlanError
from autopar.search.solutions.artifact import load
from autopar.search.solutions.solution import Solution

pytestmark = pytest.mark.simulated

MESH = Mesh(a=2, b=2)
X = torch.randn(32, 64, dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> Loss:
    return Loss().double()


@pytest.fixture(scope="module")
def parallel(model: Loss) -> autopar.parallel.Parallel:
    return autopar.parallelize(model, MESH, machine=FAST, example=(X,))


@pytest.fixture(scope="module")
def solution(parallel: autopar.parallel.Parallel) -> Solution:
    assert parallel.solution is not None
    return parallel.solution


def test_the_certificate(parallel: autopar.parallel.Parallel, solution: Solution) -> None:
    assert solution.seconds == autopar.price(parallel.program, FAST).seconds == solution.bound
    assert (solution.gap, solution.exact, solution.machine) == (0.0, True, FAST)
    assert solution.search_seconds > 0
    assert str(parallel.reports).splitlines()[-1].endswith(solution.certificate)
    assert "no plan is cheaper" in solution.certificate


def test_the_table_adds_up_to_the_price(solution: Solution) -> None:
    assert sum(row.ops + row.transfers for row in solution.modules) == solution.nanoseconds
    assert [row.module for row in solution.modules] == ["(the model)", "up", "down"]
    assert "weight f64[256/a/b 64]" in str(solution)


def test_one_rank_has_no_solution(model: Loss) -> None:
    note = "the mesh has one rank, so there is nothing to search, and solution is None"
    parallel = autopar.parallelize(model, Mesh(a=1), example=(X,))
    assert parallel.solution is None and note in parallel.reports["capture"].notes
    assert note not in autopar.parallelize(model, Mesh(dp=1), "ddp", example=(X,)).reports["capture"].notes
    step = autopar.parallelize(model, Mesh(a=1)).train_step(torch.optim.SGD(model.parameters(), lr=0.1))
    step.capture(X)
    assert step.solution is None and note in step.reports["capture"].notes


def test_layers_that_are_alike_are_one_row() -> None:
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))).double()
    x = torch.randn(32, 16, dtype=torch.float64)
    parallel = autopar.parallelize(layers, MESH, machine=FAST, example=(x,))
    assert parallel.solution is not None
    names = [row.module for row in parallel.solution.modules]
    assert len(names) < 4 and any("-" in name or "," in name for name in names)


def test_a_saved_plan_is_applied_without_a_search(
    model: Loss, parallel: autopar.parallel.Parallel, solution: Solution, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    solution.save(file)
    again = autopar.parallelize(model, MESH, str(file), example=(X,))
    assert str(again.program) == str(parallel.program)
    assert again.solution == solution
    torch.testing.assert_close(again.simulate(X), model(X))


def test_another_call_of_the_same_model_keeps_the_layouts_of_parameters(model: Loss, solution: Solution) -> None:
    parallel = autopar.parallelize(model, MESH, solution, machine=FAST)
    torch.testing.assert_close(parallel.simulate(X[:16]), model(X[:16]))
    (note,) = parallel.reports["plan"].notes
    assert note == (
        "the plan is of another call (its input x has the shape [32, 64], and here it is [16, 64]): parameters have "
        "its layouts, and the others are searched"
    )
    assert "up_weight : f64[256/a/b 64] = param" in str(parallel.program)


def test_a_plan_of_another_mesh_or_model(solution: Solution) -> None:
    with pytest.raises(PlanError, match=r"the plan is for the mesh \(a=2 b=2\), and this one is \(a=4\)"):
        autopar.parallelize(Loss(), Mesh(a=4), solution)
    with pytest.raises(PlanError, match=r"no layout for 2 of 2 parameters, such as weight : f32\[4 3\]"):
        autopar.parallelize(nn.Linear(3, 4), MESH, solution, example=(torch.randn(2, 3),))


def test_explain_chooses_everything_else_anew(model: Loss, solution: Solution) -> None:
    explanation = solution.explain("up.weight")
    best = explanation.alternatives[0]
    assert (best.layout, best.chosen, best.nanoseconds) == ("[256/a/b 64]", True, solution.nanoseconds)
    for other in explanation.alternatives[1:3]:
        fixed = solution.fix({"up.weight": spec_of(other.layout)})
        assert fixed.nanoseconds == other.nanoseconds > solution.nanoseconds
        assert fixed.exact
    assert "the plan's" in str(explanation)


def spec_of(layout: str) -> tuple[Any, ...]:
    return tuple(tuple(dim.split("/")[1:]) or None for dim in layout.strip("[]").split())


def test_fix_is_a_plan(model: Loss, solution: Solution) -> None:
    fixed = solution.fix({"up.weight": (None, "a"), "x": ("b",)})
    parallel = autopar.parallelize(model, MESH, fixed, example=(X,))
    assert "up_weight : f64[256 64/a] = param" in str(parallel.program)
    assert "x : f64[32/b 64] = input" in str(parallel.program)
    assert autopar.price(parallel.program, FAST).nanoseconds == fixed.nanoseconds >= solution.nanoseconds
    torch.testing.assert_close(parallel.simulate(X), model(X))
    rows = {name: (own, other) for name, own, other in solution.diff(fixed).rows}
    assert rows["param up.weight"] == ("[256/a/b 64]", "[256 64/a]")
    assert "param up.weight" in str(solution.diff(fixed))
    assert str(solution.diff(solution)).startswith("all layouts are the same")


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {"zz": ("a",)},
            "'zz' matches no parameter, input or other value of the plan; near it: up.weight, up.bias, down.weight, "
            "down.bias, …",
        ),
        ({"addmm": ("a",)}, "near it: up forward addmm, down forward addmm"),
        ({"up.wieght": ("a",)}, r"near it: up\.weight, down\.weight"),
        ({"p()": ("a",)}, r"'p\(\)' matches no .*; near it: up\(\)"),
        ({"up.bias": ("a", "b")}, "splits dim 1, but up.bias has the shape"),
        ({"x": ("c",)}, r"the mesh \(a=2 b=2\) has no axis 'c'"),
        ({"down forward addmm": ("(2 16/a)",)}, "no strategy|has the size"),
    ],
)
def test_what_cannot_be_fixed(solution: Solution, plan: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        solution.fix(plan)


def test_what_a_module_returns_has_the_name_of_plans(model: Loss, solution: Solution) -> None:
    fixed = solution.fix({"up()": (None, "b")})
    assert fixed.values["up forward addmm"].gives == ("[32 256/b]",)
    assert fixed.values == solution.fix({"up forward addmm": (None, "b")}).values
    assert fixed.fix({"*.up()": (None, "a")}).values["up forward addmm"].gives == ("[32 256/a]",)
    explained = solution.explain("up()").alternatives
    assert explained == solution.explain("up forward addmm").alternatives
    parallel = autopar.parallelize(model, MESH, machine=FAST)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    step.capture(X)
    assert step.solution is not None
    assert step.solution.fix({"up()": (None, "b")}).values["up forward addmm"].gives == ("[32 256/b]",)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.relu(self.up(x)))


def test_a_module_that_is_called_twice() -> None:
    solution = autopar.parallelize(Twice().double(), MESH, machine=FAST, example=(X,)).solution
    assert solution is not None
    with pytest.raises(PlanError) as error:
        solution.explain("up()")
    assert str(error.value) == "'up()' are 2 values; name one of them: up forward addmm, up forward addmm 2"
    both = solution.fix({"up()": (None, "b")}).values
    assert both["up forward addmm"].gives == both["up forward addmm 2"].gives == ("[32 64/b]",)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (
            lambda s: s.fix(3),
            'solution.fix takes a dict from names to layouts, as in {"up.weight": ("tp", None)}, not an int: 3',
        ),
        (lambda s: s.fix({3: ("a",)}), "solution.fix takes a dict from names to layouts, as in"),
        (
            lambda s: s.expression(3),
            "solution.expression takes a dict from inputs to the symbols of their dims, as in "
            '{"x": ("batch", None)}, not an int: 3',
        ),
        (
            lambda s: s.diff(None),
            "solution.diff takes another solution, as that of parallelize(model, mesh, plan, example=…).solution, not "
            "None",
        ),
        (
            lambda s: s.explain(3),
            'solution.explain takes the name of a parameter, an input or another value, as "up.weight", not an int: 3',
        ),
        (lambda s: s.save(None), 'solution.save takes the path of a file, as "plan.json", not None'),
        (
            lambda s: s.crossovers("batch", None),
            "solution.crossovers takes another solution, as that of parallelize(model, mesh, plan, example=…).solution,"
            " not None",
        ),
        (lambda s: s.crossovers(3, s), 'solution.crossovers takes the name of a symbol, as "batch", not an int: 3'),
    ],
)
def test_arguments_of_another_type(solution: Solution, ask: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        ask(solution)
    assert str(error.value).startswith(text)


def test_a_plan_that_is_not_applied_has_no_expression(solution: Solution) -> None:
    fixed = solution.fix({"up.weight": (None, None)})
    why = (
        " has no expression, because it is not applied in this process: it is from fix, from a file, or another "
        "process has searched it; take parallelize(model, mesh, plan, example=…).solution, with this plan as plan"
    )
    with pytest.raises(PlanError) as error:
        solution.crossovers("batch", fixed)
    assert str(error.value) == f"the other plan{why}"
    with pytest.raises(PlanError) as error:
        fixed.expression()
    assert str(error.value) == f"the plan{why}"
    with pytest.raises(PlanError, match=r"the marks 3 of x are not one for each of its dims, \[32, 64\]"):
        solution.expression({"x": 3})  # type: ignore[dict-item]


def test_questions_to_a_plan_from_a_file(solution: Solution, tmp_path: Path) -> None:
    solution.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="only the process that searched the plan can choose anew"):
        load(tmp_path / "plan.json").explain("up.weight")
    with pytest.raises(PlanError, match=r"the plan has no value 'weight'; near it: up\.weight, down\.weight"):
        solution.explain("weight")


DAMAGE = {
    "version": (2, "version: 2 is not known"),
    "graph": (3, "graph: 3 is not of the right kind"),
    "kind": ("week", "kind: 'week' is none of call, step"),
    "nanoseconds": (-1, r"nanoseconds: -1 is no number from 0 to 9\.2"),
    "nanoseconds, too many": (10**400, r"nanoseconds: 10{199}… is no number from 0 to 9\.2"),
    "nanoseconds, a fraction": (1.5, "nanoseconds: 1.5 is not of the right kind"),
    "least": (float("nan"), "least: nan is no number from 0"),
    "least, too many": (10**400, "least: 10{199}… is no number from 0"),
    "least, below 0": (-5, "least: -5 is no number from 0"),
    "least, above the price": (1e15, r"least: 1e\+15 is no lower bound of the price, \d+ nanoseconds"),
    "search_seconds": (-1.0, "search_seconds: -1.0 is no number from 0"),
    "memory": (10**400, "memory: 10{199}… is no number from 0"),
    "memory, a text": ("80 GB", "memory: '80 GB' is not of the right kind"),
    "bytes": (True, "bytes: True is not of the right kind"),
    "update": ({"words": "AdamW"}, "update: .* is no update of a step: words and a digest are wanted"),
    "constrained": ("yes", "constrained: 'yes' is neither true nor false"),
    "mesh": ({"a": 0}, "at least 1|size"),
    "machine": ({}, "version: missing"),
    "values": ({"x": 3}, r"values\.x: an object is wanted"),
}


def test_generic_figures_are_said_so(model: Loss) -> None:
    unknown = machine_of("a new GPU")
    for on, text in ((unknown, "unknown device 'a new GPU': generic figures"), ("generic", "no particular device: ")):
        parallel = autopar.parallelize(model, MESH, machine=on, example=(X,))
        assert any(note.startswith(text) for note in parallel.reports["search"].notes)
    with pytest.raises(ValueError, match="there is no machine 'a new GPU'; there are generic, cpu, "):
        autopar.parallelize(model, MESH, machine="a new GPU", example=(X,))


def test_a_plan_of_a_step_for_a_call(model: Loss) -> None:
    parallel = autopar.parallelize(model, MESH, machine=FAST)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    step.capture(X)
    given = autopar.parallelize(model, MESH, step.solution, example=(X,))
    assert any(
        note.startswith(
            "the plan is of a training step, and this is a call of the model: parameters have its layouts, and the "
            "others are searched; parallel.train_step takes the whole plan"
        )
        for note in given.reports["plan"].notes
    )


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_file(solution: Solution, tmp_path: Path, field: str) -> None:
    value, text = DAMAGE[field]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**solution.to_json(), field.partition(",")[0]: value}))
    with pytest.raises(PlanError, match=text):
        load(file)


def test_a_machine_with_prices_that_are_no_numbers(solution: Solution, tmp_path: Path) -> None:
    content = solution.to_json()
    file = tmp_path / "plan.json"
    for value in (float("nan"), 10**400, 1e308, -1):
        content["machine"]["machines"][0]["inside"]["latency"] = value
        file.write_text(json.dumps(content))
        with pytest.raises(
            PlanError, match=r"plan\.json: machines\[0\]\.inside\.latency: .* (wanted|out of the range)"
        ):
            load(file)


def test_a_call_that_differs_in_another_way_than_its_shapes(solution: Solution) -> None:
    x = X.clone().requires_grad_()  # the gradient of x is computed, too
    parallel = autopar.parallelize(Loss().double(), MESH, solution, machine=FAST, example=(x,))
    (note,) = parallel.reports["plan"].notes
    assert note.startswith(
        "the plan is of another call (its up backward mm has the shape [256, 64], and here it is [32, 64]): parameters "
        "have its layouts"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "not json",
        '{"version": 1}',
        '{"version": ' + "9" * 5000 + "}",
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: "):
        autopar.parallelize(Loss(), MESH, str(file))


def test_layouts_of_a_hostile_file(model: Loss, solution: Solution, tmp_path: Path) -> None:
    for layout in ("[256/z 64]", "[3 64]", "[256/a/b 64", "[999999999999999999999 64]", ""):
        content = solution.to_json()
        content["values"]["param up.weight"]["gives"] = [layout]
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(content))
        with pytest.raises(PlanError, match=r"the plan's layout .* of param up\.weight"):
            autopar.parallelize(model, MESH, str(file), example=(X,))
