"""The work of a model is what torch counts in eager, whatever a plan repeats on ranks or computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import Mesh
from autopar.costs.machine import machine_from
from autopar.costs.model_work import ModelWork, model_work

CPU = machine_from("cpu")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x).square().mean()


def counted() -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        Layers()(torch.randn(8, 6)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("plan", ["ddp", {}, {"*.0.weight": ("tp", None), "*.2.weight": (None, "tp")}], ids=str)
def test_work_of_a_call_is_that_of_eager(plan: Any) -> None:
    """With ``{}`` and tp, both ranks of a row compute all of it."""
    parallel = autopar.parallelize(Layers(), Mesh(dp=2, tp=2), plan, example=(torch.randn(8, 6),))
    assert model_work(parallel.program, CPU) == ModelWork(counted(), counted() / 1e11)


def test_what_is_computed_again_counts_once() -> None:
    parallel = autopar.parallelize(Layers(), Mesh(dp=2))
    plain, again = (
        parallel.train_step(torch.optim.SGD(parallel.parameters()), recompute=what) for what in (None, "core")
    )
    for step in (plain, again):
        step.capture(torch.randn(8, 6))
    repeated = [str(step.program.micro).count(" = addmm(") for step in (plain, again)]
    assert repeated == [2, 3]
    assert model_work(again.program.micro, CPU).flops == model_work(plain.program.micro, CPU).flops == counted()


def test_each_dtype_has_its_own_peak() -> None:
    program = autopar.parallelize(Layers().double(), Mesh(dp=2), example=(torch.randn(8, 6).double(),)).program
    work = model_work(program, CPU)
    assert work.seconds == pytest.approx(work.flops / 5e10)
    assert (work + work.times(2)).flops == 3 * work.flops
