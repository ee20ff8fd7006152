"""``autopar plan``: the table of presets and the search, saved plans, and every request that is refused."""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_mlp import PLANNED
from typer.testing import CliRunner

import autopar
from autopar.cli.app import app
from autopar.cli.plan.planning import Planning
from autopar.cli.plan.rows import PlanRow, _beside, cheapest, row_of
from autopar.cli.plan.show import time_text
from autopar.costs.machine import machine
from autopar.report.memory import memory_of
from autopar.report.transfers import bytes_per_axis

MODEL = (
    PLANNED
    + """
def wrong():
    return 3

def bare():
    return MLP(), torch.empty(512, 256)

def needs(width):
    return MLP(), (torch.empty(512, width),)
"""
)
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "an_mlp.py"
    path.write_text(MODEL)
    return f"{path}:make"


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def rows_in(out: str) -> dict[str, list[str]]:
    """The rows of the table, as name → figures and remark."""
    names = (*autopar.plan.presets.PRESETS, "search")
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in names}


@pytest.mark.long
def test_the_table_has_the_prices_bytes_and_memory_of_each_plan(model: str) -> None:
    status, out, _ = asked(model, "--compare", "--machine", H100)
    assert status == 0
    assert (
        "524,288 parameters, a call with its backward\nmesh dp=2 tp=2 of NVIDIA H100 80GB HBM3, within 80.0 GB" in out
    )
    rows = rows_in(out)
    assert list(rows) == ["ddp", "fsdp", "hsdp", "megatron", "megatron+sp", "fsdp+tp", "search"]
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    made, example = scope["make"]()  # type: ignore[operator]
    parallel = autopar.parallelize(made, autopar.Mesh(dp=2, tp=2), "megatron", example=example, machine=H100)
    price = autopar.price(parallel.program, H100).nanoseconds
    peak, moved = memory_of(parallel.local(0)).peak, sum(bytes_per_axis(parallel.program).values())
    searched = autopar.parallelize(made, autopar.Mesh(dp=2, tp=2), example=example, machine=H100).solution
    assert rows["megatron"][:4] == [
        time_text(price), f"{price / searched.nanoseconds:.2f}", f"{moved / 1e6:.1f} MB", f"{peak / 1e6:.1f} MB",
    ]  # fmt: skip
    assert rows["search"][0] == time_text(searched.nanoseconds) and "← cheapest" in rows["search"][-1]
    assert sum("← cheapest" in line for line in out.splitlines()) == 1
    assert "no plan is cheaper" in out.splitlines()[-1]


@pytest.mark.long
def test_hsdp_on_a_mesh_with_two_axes_of_the_batch(model: str) -> None:
    """What it moves over each axis is in the table of transfers, and the preset has a price."""
    status, out, _ = asked(model, "--mesh", "replica=2,shard=2", "--plan", "hsdp", "--machine", H100)
    assert status == 0 and re.search(r"^hsdp: [\d.]+ µs a call, a rank receives", out, re.M)
    for kind, axis in (("all_gather", "shard"), ("reduce_scatter", "shard"), ("all_reduce", "replica")):
        assert re.search(rf"^{kind} +{axis} ", out, re.M), out


@pytest.mark.long
def test_a_preset_that_cannot_be_placed_says_why_in_its_row(model: str) -> None:
    status, out, _ = asked(model, "--compare", "--mesh", "a=3", "--machine", "cpu", "--optimizer", "sgd")
    assert status == 0 and "a training step with sgd" in out
    assert rows_in(out)["megatron"][:5] == ["–", "–", "–", "–", "the preset 'megatron' splits over an axis"]
    assert "no limit of memory" in out and "no particular CPU: measure it with autopar calibrate" in out


@pytest.mark.long
def test_a_plan_is_saved_and_taken_again(model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    status, out, _ = asked(model, "--machine", H100, "--save", str(file))
    assert status == 0 and f"{file} has the searched plan" in out
    assert "parameters → result" in out and re.search(r"^search: [\d.]+ µs a call, a rank receives", out, re.M)
    status, again, _ = asked(model, "--machine", H100, "--plan", str(file))
    assert status == 0
    price = re.search(r": ([\d.]+ µs a call, a rank receives .*)", out)
    assert price is not None and again.splitlines()[-2] == f"{file}: {price[1]}"
    status, own, _ = asked(model, "--plan", str(file))
    assert status == 0 and own.splitlines()[-2:] == again.splitlines()[-2:]
    assert f"mesh dp=2 tp=2 of {H100}" in own and "no plan is cheaper" in own
    assert f"{file} brings the machine {H100}; --machine prices the plan on another" in own.splitlines()
    status, other, _ = asked(model, "--machine", "cpu", "--plan", str(file))
    assert status == 0 and f"{file} was searched for {H100}, and is priced on cpu" in other.splitlines()
    assert f"the plan was searched for {H100}, so nothing is proven" in other and "no plan is cheaper" not in other
    seconds = re.findall(r"([\d.]+) ms a call", other)
    assert len(seconds) > 1 and len(set(seconds)) == 1
    content = json.loads(file.read_text())
    content["mesh"] = {"a": 4}
    file.write_text(json.dumps(content))
    status, _, error = asked(model, "--plan", str(file))
    assert status == 2 and "the plan is for the mesh (a=4), and this one is (dp=2 tp=2)" in error


def test_a_preset_that_finds_nothing_to_add_says_so() -> None:
    found: dict[str, Any] = {"seconds": 1e-9, "memory": 3, "transfers": [], "modules": [1]}
    base, other = PlanRow("megatron", 1, found=found), PlanRow("ddp", 1, found=found)
    added = _beside(PlanRow("megatron+sp", 1, found=found), [other, base])
    assert (added.note, added.alternative().note) == ("as megatron: it found nothing to add",) * 2
    changed = PlanRow("megatron+sp", 1, found={**found, "modules": [2]})
    assert _beside(changed, [base]) is changed and _beside(changed, [other]) is changed
    assert _beside(changed, [PlanRow("megatron", why="no axis")]) is changed


@pytest.mark.parametrize(("layer", "dtype"), [("Embedding(8, 8)", "i64"), ("Linear(8, 8)", "f32")])
def test_arguments_that_are_missing_have_the_dtype_that_the_model_takes(layer: str, dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text(
        f"from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self): super().__init__(nn.{layer})\n"
    )
    status, _, error = asked(f"{file}:Net")
    assert status == 2 and f"as --inputs input={dtype}[8,64] or --example" in error


@pytest.mark.simulated
def test_a_plan_that_does_not_fit_is_not_the_cheapest(model: str) -> None:
    small, large = PlanRow("small", 9, fits=True), PlanRow("large", 5, fits=False)
    assert cheapest([large, small, PlanRow("none", why="no axis")]) is small
    assert cheapest([large]) is None
    made = torch.nn.Linear(64, 64, bias=False)
    planning = Planning(made, (torch.ones(8, 64),), autopar.Mesh(dp=2), machine("cpu"), 40_000, 60.0, None)
    assert row_of("ddp", "ddp", planning).fits
    assert row_of("ddp", "ddp", planning).memory > 16_384
    from dataclasses import replace

    assert not row_of("ddp", "ddp", replace(planning, memory=16_384)).fits


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["huge"], "the model huge is unknown; choose from tiny, small, medium, large, llama-2-7b, "),
        (["larg"], "or name a function that makes one, as in model.py:make; did you mean large?"),
        (["nowhere.py:make"], "there is no file nowhere.py"),
        (["no_such_module:make"], "there is no module no_such_module"),
        (["--machine", "H100"], "there is no machine 'H100'; did you mean 'NVIDIA H100 80GB HBM3', 'NVIDIA H100 PCIe' "
                                "or 'NVIDIA H100 NVL'?"),
        (["--machine", "none.json"], "there is no machine file none.json; autopar calibrate writes one"),
        (["--mesh", "dp=2,dp=2"], "is not a list of different axes with their sizes"),
        (["--mesh", "pp=2,dp=2"], "is about the ranks of one stage"),
        (["--plan", "megatorn"], "did you mean megatron?"),
        (["--compare", "--plan", "ddp"], "--compare has all presets and the search; leave --plan ddp out"),
        (["--optimizer", "adm"], "did you mean adam?"),
        (["--memory", "nan"], "--memory nan must be above 0, in bytes, such as 80e9"),
        (["--time-limit", "inf"], "--time-limit inf must be above 0, in seconds"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--save", "no/where.json"], "there is no folder no for --save no/where.json"),
        (["--html", "no/page.html"], "there is no folder no for --html no/page.html; make it first"),
        (["--html", "/"], "--html / is a folder; name a file in it"),
        (["--devices", "8", "--mesh", "dp=8"], "--devices 8 chooses the mesh, and --mesh dp=8 gives one; use one"),
        (["--devices", "8", "--plan", "ddp"], "--plan ddp names axes; give a --mesh, as dp=8"),
        (["--devices", "0"], "--devices 0: give a number of devices from 1 to 1,048,576"),
        (["--example", "a.py:f", "--inputs", "x=f32[2]"], "--example and --inputs both give the arguments of a call"),
        (["--set", "hidden_size=3"], "--set hidden_size=3 is for an architecture of Hugging Face, not tiny"),
        (["--diff", "none.json"], "there is no file none.json with a plan; solution.save writes one"),
    ],
)  # fmt: skip
def test_refused(arguments: list[str], said: str) -> None:
    for more in ((), ("--json",), ("--quiet",)):
        status, out, error = asked(*arguments, *more)
        assert status == 2 and out == ""
        assert said in error and error.startswith("autopar: ") and error.count("\n") == 1


def test_a_function_of_the_users_is_checked(model: str) -> None:
    path = model.rpartition(":")[0]
    assert "an_mlp.py has no function mak; it has MLP, make, " in asked(f"{path}:mak")[2]
    assert (
        "an_mlp.py:wrong returns an int; it must return a model, or a pair, return model, (x,)"
        in (asked(f"{path}:wrong")[2])
    )
    assert "an_mlp.py:bare returns a model and a Tensor; it must return a model, or a pair" in asked(f"{path}:bare")[2]
    assert (
        "an_mlp.py:MLP returns a model alone, and its forward takes x; give the arguments of a call, as --inputs "
        f"x=f32[8,64] or --example {path}:FUNCTION\n" in asked(f"{path}:MLP")[2]
    )
    assert (
        "is called without arguments, and it has one (missing a required argument: 'width')"
        in (asked(f"{path}:needs")[2])
    )


RAISING = """\
import torch

class Wrong(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) @ self.nothing

def raises():
    raise KeyError("x")

def many():
    return torch.nn.Linear(3, 4), (torch.ones(2, 3), torch.ones(2))

def keyword():
    return torch.nn.Linear(3, 4), {"y": torch.ones(2, 3)}

def forward():
    return Wrong(3, 4), (torch.ones(2, 3),)

def shapes():
    return torch.nn.Linear(3, 4), (torch.ones(2, 5),)

class Inside(torch.nn.Linear):
    def forward(self, x):
        return x @ self.weight

def inside():
    return Inside(4, 2), (torch.ones(2, 3),)
"""


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "raises KeyError: 'x', at a_wrong_one.py:8  raise KeyError(\"x\"); correct it: autopar calls it "
                   "without arguments"),
        ("many", "the call of its model raises TypeError: Linear.forward() takes 2 positional arguments but 3 were "
                 "given"),
        ("keyword", "the call of its model raises TypeError: Linear.forward() got an unexpected keyword argument 'y'"),
        ("forward", "the call of its model raises AttributeError: 'Wrong' object has no attribute 'nothing', at "
                    "a_wrong_one.py:5  return super().forward(x) @ self.nothing"),
        ("shapes", "the call of its model raises RuntimeError: a and b must have same reduction dim, but got [2, 5] X "
                   "[3, 4]."),
        ("inside", "the call of its model raises RuntimeError: a and b must have same reduction dim, but got [2, 3] X "
                   "[2, 4]., at a_wrong_one.py:24  return x @ self.weight"),
    ],
)  # fmt: skip
def test_what_the_users_function_or_model_raises(tmp_path: Path, function: str, said: str) -> None:
    path = tmp_path / "a_wrong_one.py"
    path.write_text(RAISING)
    status, _, error = asked(f"{path}:{function}", "--mesh", "dp=2")
    assert status == 2
    between, remedy = (" ", "") if function == "raises" else (": ", "; correct the model, or pass other inputs")
    assert error == f"autopar: {path}:{function}{between}{said}{remedy}\n"


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "a_broken_one.py"
    for text, said in (
        ("x = (", "SyntaxError: '(' was never closed (a_broken_one.py, line 1)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module', at a_broken_one.py:1  import "
                                  "no_such_module"),
        ("raise SystemExit(3)", "SystemExit: 3, at a_broken_one.py:1  raise SystemExit(3)"),
        ("raise ValueError('long' * 80)", f"ValueError: {'long' * 50}…, at a_broken_one.py:1  raise "
                                          "ValueError('long' * 80)"),
    ):  # fmt: skip
        path.write_text(text)
        status, _, error = asked(f"{path}:make")
        assert status == 2
        assert error == f"autopar: {path} cannot be imported: {said}; python {path} shows all of it\n"


def test_a_defect_of_ours_keeps_its_traceback(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.plan.run.row_of", operator.getitem)  # no frame of it is the user's
    with pytest.raises(TypeError, match="getitem expected 2 arguments, got 3"):
        asked(model, "--plan", "ddp")


def test_a_preset_saves_nothing(model: str, tmp_path: Path) -> None:
    status, _, error = asked(model, "--plan", "ddp", "--save", str(tmp_path / "plan.json"))
    assert status == 2 and "writes a searched plan, and none was found; add --plan search" in error
    status, _, error = asked(model, "--mesh", "dp=1", "--save", str(tmp_path / "plan.json"))
    assert status == 2 and "on one rank there is nothing to search; use a --mesh of several ranks" in error
