"""The first step of an optimizer in a process that is alone, where the parameters are the model's own."""

from __future__ import annotations

import gc

import pytest
import torch
from first_steps import model_of, step, warned
from torch import nn

import autopar
from autopar import Mesh


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=1)], ids=str)
def test_parameters_of_a_model_on_meta(mesh: Mesh, early: bool) -> None:
    model = model_of("meta")
    parallel = autopar.parallelize(model, mesh)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.initialize()
    if not early:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    shown, _ = warned(lambda: [step(parallel.simulate, optimizer) for _ in range(2)])
    assert [" has 0.weight as it was before the model on meta got values" in text for text in shown] == [True] * early


def test_a_simulation_trains_the_original() -> None:
    """And nothing looks at steps of optimizers: there is no other parameter."""
    model = model_of()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    before = [p.clone() for p in model.parameters()]
    shown, _ = warned(step, parallel.simulate, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not shown and not torch.equal(before[0], model[0].weight)  # type: ignore[index]
    assert parallel._calls.captures.first_step._end is None


def test_nothing_looks_for_a_model_that_is_gone() -> None:
    def made() -> object:
        return autopar.parallelize(model_of("meta"), Mesh(dp=2))._calls.captures.first_step._end

    end = made()
    gc.collect()
    assert not end.alive  # type: ignore[attr-defined]
    step(nn.Linear(4, 4), torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))
