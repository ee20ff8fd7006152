"""The pass ``search``: its reports, its wrong inputs, and that the passes that it replaces would be idle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from searched import FAST, SLOW

from autopar import Mesh, price
from autopar.capture import capture
from autopar.costs.machine import Machine, machine
from autopar.examples.workloads import mlp
from autopar.ir.program import Program
from autopar.passes import Defer, Fold, Follow, Lift, Reshard, Search, Share, pipeline, run_passes

H100 = machine("NVIDIA H100 80GB HBM3")


def traced() -> Program:
    model, x = mlp(1)
    return capture(model, (x,)).program


@pytest.mark.parametrize("on", [H100, FAST], ids=lambda on: on.name)
@pytest.mark.long
def test_the_passes_that_it_replaces_would_be_idle(on: Machine) -> None:
    program = traced()
    run_passes(program, [Search(mesh=Mesh(a=2, b=2), machine=on)])
    before = str(program)
    run_passes(program, [Follow(machine=on), Lift(), Defer()])
    assert str(program) == before


@pytest.mark.long
def test_the_report_ends_with_the_certificate() -> None:
    program = traced()
    notes = run_passes(program, pipeline(Mesh(a=2, b=2), search=True, machine=FAST))[1].notes
    assert notes[-1].endswith(
        f"{price(program, FAST).seconds * 1e3:,.3f} ms a call on fast links, and no plan is cheaper"
    )
    assert notes[:-1] == ("fast links has no known capacity, so memory has no limit; memory= gives one, in bytes",)


class Parallel(torch.nn.Module):
    """Attention's and the MLP's place in a block whose two branches read the same value, added one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64, bias=False))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.branches[0](x) + self.branches[1](x)


@pytest.mark.long
def test_sums_are_reassociated_before() -> None:
    """The addends of both branches are reduced as one sum, which is cheaper."""
    program, mesh = capture(Parallel(), (torch.randn(32, 64),)).program, Mesh(a=2)
    plain, ours = program.copy(), program.copy()
    run_passes(plain, [Search(mesh=mesh, machine=SLOW), Reshard(machine=SLOW), Fold(machine=SLOW), Share()])
    run_passes(ours, pipeline(mesh, search=True, machine=SLOW))
    assert price(ours, SLOW).nanoseconds < price(plain, SLOW).nanoseconds


@pytest.mark.simulated
def test_the_report_names_axes_that_stay_idle() -> None:
    notes = run_passes(traced(), pipeline(Mesh(a=2, b=2), search=True, machine=H100.name))[1].notes
    assert notes[0] == "the cheapest plan splits nothing over a and b: all ranks along these axes do the same"
    notes = run_passes(traced(), pipeline(Mesh(a=2), search=True, machine=H100.name))[1].notes
    assert notes[0] == "the cheapest plan splits nothing over a: all ranks along a do the same"


@pytest.mark.parametrize("limit", [math.nan, -1, "60", True])
def test_a_time_limit_is_a_number_of_seconds(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"time_limit=.* is not a number of seconds from 0 on"):
        run_passes(traced(), pipeline(Mesh(a=2), search=True, machine=H100, time_limit=limit))


def test_an_unknown_machine_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no machine 'H100'; did you mean"):
        pipeline(Mesh(a=2), search=True, machine="H100")
