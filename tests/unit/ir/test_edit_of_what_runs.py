"""Edits of programs that run are refused where they are made: what is printed is what runs."""

from __future__ import annotations

import models
import pytest
import torch

import autopar
from autopar.errors import EditError
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.model.compiled import RUNS
from autopar.runtime.localize import SHARED


def doubled(program: Program) -> None:
    """The first result of the program, twice."""
    value = next(node for node in program.nodes if node.op == "call_function")
    with program.edit() as edit:
        edit.insert(torch.ops.aten.mul.Scalar, (value, 2), before=program.output, type=record_of(value).type)


def refused(program: Program, why: str) -> None:
    text = str(program)
    with pytest.raises(EditError) as caught:
        doubled(program)
    assert str(caught.value) == why and str(program) == text


def test_an_edit_of_the_program_of_a_model_is_refused() -> None:
    """Before and after it has run, and of each rank."""
    model, x = models.Block(), torch.randn(6, 8)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp", example=(x,))
    for _ in range(2):
        refused(parallel.program, RUNS)
        refused(parallel.local(1), SHARED)
        parallel.simulate(x)


def test_a_copy_may_be_edited_and_changes_nothing_that_runs() -> None:
    model, x = models.Block(), torch.randn(6, 8)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp", example=(x,))
    y, text = parallel.simulate(x), str(parallel.program)
    for program in (parallel.program.copy(), parallel.local(0).copy()):
        before = len(list(program.nodes))
        doubled(program)
        assert len(list(program.nodes)) == before + 1
    assert torch.equal(parallel.simulate(x), y) and str(parallel.program) == text


def test_edits_of_a_steps_programs_are_refused() -> None:
    """Those of the explicit ones, of each rank, and of those that are joined."""
    x = torch.randn(8, 4)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    model = Loss()
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, amp="bf16-O2")
    step.capture(x)
    programs = step.program.programs
    assert programs.keys() >= {"copy", "micro", "update"}
    for program in programs.values():
        refused(program, RUNS)
    assert step.local(0).programs.keys() == {"copy", "inner", "last"}
    for program in step.local(0).programs.values():
        refused(program, SHARED)
    _micro, update = step._current().pair
    refused(update.last[0], RUNS)
