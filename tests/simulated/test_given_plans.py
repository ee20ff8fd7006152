"""Plans that were searched before, as users give them: solutions, files, in lists, for another machine, and damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import FAST, SLOW
from squared_loss import Loss
from torch import nn

import autopar
from autopar import Mesh
from autopar.costs.machine import Machine
from autopar.errors import PlanError
from autopar.parallel import Parallel
from autopar.search.solutions.solution import Solution

pytestmark = pytest.mark.simulated

MESH = Mesh(a=2, b=2)
X = torch.randn(32, 64, dtype=torch.float64)


class Constrains(Loss):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(autopar.constrain(torch.relu(self.up(x)), ("a", None))).square().mean()


def planned(plan: Any, machine: Machine | None = None, model: type[nn.Module] = Loss) -> Parallel:
    return autopar.parallelize(model().double(), MESH, plan, machine=machine, example=(X,))


@pytest.fixture(scope="module")
def first() -> Parallel:
    return planned(None, FAST)


@pytest.fixture
def file(first: Parallel, tmp_path: Path) -> Path:
    assert first.solution is not None
    first.solution.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_ways_to_name_a_file(first: Parallel, file: Path) -> None:
    other = file.with_suffix(".txt")
    other.write_text(file.read_text())
    for plan in (file, str(file), other, str(other), ["search", str(file)], [file], (str(file), "search")):
        parallel = planned(plan)
        assert str(parallel.program) == str(first.program) and parallel.solution == first.solution


def test_a_file_says_whose_prices_count(file: Path) -> None:
    assert planned(file).reports["plan"].notes == (
        "prices are those of the plan's machine, fast links; machine= prices the plan on another",
    )


def test_entries_after_a_file_are_constraints(first: Parallel, file: Path) -> None:
    parallel = planned([file, {"up.weight": (None, "a")}])
    assert "up_weight : f64[256 64/a] = param" in str(parallel.program)
    homes = {n: a for n, a in parallel._calls.captures.latest.homes.items() if n != "up.weight"}  # type: ignore[union-attr]
    assert homes == {n: a for n, a in first._calls.captures.latest.homes.items() if n != "up.weight"}  # type: ignore[union-attr]
    assert parallel.reports["plan"].notes[-1] == (
        "constraints want other layouts than the plan: parameters have its layouts, and the others are searched"
    )
    assert parallel.solution is not None
    assert parallel.solution.certificate.endswith("no plan with these constraints is cheaper")
    same = planned([file, {"up.weight": (("a", "b"), None), "up.bias": ("?",)}])
    assert same.solution == first.solution  # the plan keeps them already


@pytest.mark.parametrize("plan", [{"x": (None, "b")}, {"x": ("?", "b")}, {"up()": (None, "b")}], ids=str)
def test_no_constraint_is_forgotten(first: Parallel, file: Path, plan: Any) -> None:
    said = str(planned([file, plan]).program)
    assert said != str(first.program)
    if "x" in plan:
        assert re.search(r"x : f64\[32(/a)? 64/b\] = input", said)
    else:
        assert re.search(r"relu : f64\[32 256/b\]", said)


def test_a_layout_that_forward_wants_is_not_forgotten(file: Path) -> None:
    wanted = planned(None, FAST, Constrains)
    again = planned(file, None, Constrains)
    assert "constraints want other layouts than the plan" in str(again.reports)
    assert autopar.price(again.program, FAST).nanoseconds >= autopar.price(wanted.program, FAST).nanoseconds


def test_lists_that_are_refused(first: Parallel, file: Path) -> None:
    with pytest.raises(PlanError) as error:
        planned([{"up.weight": ("a",)}, file])
    assert str(error.value) == (
        f"{{'up.weight': ('a',)}} stands before {file}, which decides all layouts; put it after the plan, where it is "
        f"a constraint, or leave it out"
    )
    with pytest.raises(PlanError) as error:
        planned([file, first.solution])
    assert str(error.value) == (
        f"a searched plan decides all layouts, and here are 2: {file}, a solution; give one of them"
    )
    with pytest.raises(PlanError, match=r"plan\.json: the plan is for the mesh \(a=2 b=2\), and this one is \(a=4\)"):
        autopar.parallelize(Loss(), Mesh(a=4), [file, {"x": ("a",)}])


def test_files_that_are_not_there(first: Parallel, tmp_path: Path) -> None:
    for plan in (tmp_path / "p.json", str(tmp_path / "p.json"), ["search", tmp_path / "p"]):
        with pytest.raises(FileNotFoundError) as error:
            planned(plan)
        name = tmp_path / ("p" if isinstance(plan, list) else "p.json")
        assert str(error.value) == f"there is no file {name} with a plan; solution.save writes one"
    with pytest.raises(PlanError, match=r"no preset 'p\.txt'; presets are"):
        planned("p.txt")
    with pytest.raises(PlanError, match="no preset"):
        planned("p\0" * 5000)
    with pytest.raises(FileNotFoundError) as error:
        autopar.parallelize(Loss(), MESH, machine=tmp_path / "m.json")
    assert str(error.value) == f"there is no machine file {tmp_path / 'm.json'}; autopar calibrate writes one"
    with pytest.raises(FileNotFoundError) as error:
        first.solution.save(tmp_path / "no" / "where.json")  # type: ignore[union-attr]
    assert str(error.value) == (
        f"there is no folder {tmp_path / 'no'} for the plan {tmp_path / 'no' / 'where.json'}; make it first"
    )


def test_another_machine_prices_the_plan_anew(file: Path) -> None:
    parallel = planned(file, SLOW)
    solution = parallel.solution
    assert solution is not None and solution.machine == SLOW
    assert solution.nanoseconds == autopar.price(parallel.program, SLOW).nanoseconds
    assert (solution.least, solution.exact, solution.memory) == (0.0, False, None)
    assert solution.certificate.endswith(
        "ms a call on slow, and how much cheaper a plan could be is not known; the plan was searched for fast links, "
        "so nothing is proven"
    )
    assert sum(row.ops + row.transfers for row in solution.modules) == solution.nanoseconds
    assert "plan" not in [report.name for report in parallel.reports]
    solution.save(file)
    again = planned(file).solution
    assert again is not None and again.certificate == solution.certificate
    assert planned(file, SLOW).solution == again  # the peaks of a machine may be in another order


def test_other_figures_of_the_machine_and_other_words(file: Path) -> None:
    slower = replace(FAST, memory=SLOW.memory)
    solution = planned(file, slower).solution
    assert solution is not None and solution.certificate.endswith(
        "the plan was searched for other figures of fast links, so nothing is proven"
    )
    solution = planned(file, replace(FAST, note="a remark")).solution
    assert solution is not None and solution.exact


def test_a_price_that_was_edited(file: Path) -> None:
    content = json.loads(file.read_text())
    price = content["nanoseconds"]
    file.write_text(json.dumps({**content, "nanoseconds": price * 2, "least": price * 2}))
    solution = planned(file).solution
    assert solution is not None and (solution.nanoseconds, solution.least) == (price, 0.0)
    assert solution.certificate.endswith("the plan's price here is not that of its file, so nothing is proven")


def test_layouts_that_do_not_fit_each_other(file: Path, first: Parallel) -> None:
    content = json.loads(file.read_text())
    names = [name for name in content["values"] if "relu" in name]
    content["values"][names[0]]["gives"] = ["[32/a 256/b]"]
    file.write_text(json.dumps(content))
    with pytest.raises(PlanError) as error:
        planned(file)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        f"{file}: the layouts of {names[0]} do not fit each other, so the file was changed; search the plan again"
    )
    assert any("relu : f64[32/a 256/b]" in line for line in lines[1:])
    content["values"]["param up.weight"]["gives"] = ["[256/z 64]"]
    file.write_text(json.dumps(content))
    with pytest.raises(PlanError) as error:
        planned(file)
    assert str(error.value).startswith(f"{file}: the plan's layout '[256/z 64]' of param up.weight has an axis z")


def test_a_solution_of_this_process_in_a_list(first: Parallel) -> None:
    assert isinstance(first.solution, Solution)
    parallel = planned([first.solution, {"up.weight": (None, None)}], FAST)
    assert "up_weight : f64[256 64] = param" in str(parallel.program)
