"""Verification: wrong passes are blamed by name, right ones are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from autopar.errors import VerifyError
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes import Place, Reshard, run_passes
from autopar.passes.manager import Pass


@dataclass(frozen=True)
class Forgetful(Reshard):
    """Drops what it inserted last."""

    name: ClassVar[str] = "forgetful"

    def run(self, program: Program) -> None:
        super().run(program)
        last: fx.Node = [node for node in program.nodes if node.target.__class__.__name__ == "function"][-1]
        with program.edit() as edit:
            edit.replace_all_uses(last, last.args[0])
            edit.erase(last)


@dataclass(frozen=True)
class Careless(Pass):
    """Splits a value and tells nobody."""

    name: ClassVar[str] = "careless"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    def run(self, program: Program) -> None:
        assert program.mesh is not None
        with program.edit() as edit:
            node = program.node("relu")
            edit.annotate(
                node, type=TensorType((32, 256), torch.float32, Layout(program.mesh, DistAttr.split("tp", "dp")))
            )


TRACED = """\
program traced on dp=4 tp=2
  x : f32[32/dp 64] = input
  up : f32[64 256/tp] = param
  down : f32[256/tp 64] = param
forward:
  mm : f32[32 256] = mm(x, up)
  relu : f32[32 256] = relu(mm)
  mm_1 : f32[32 64] = mm(relu, down)
  gelu : f32[32 64] = gelu(mm_1)
  return gelu
"""


def test_a_pass_that_drops_a_transfer_is_blamed() -> None:
    program = Program.parse(TRACED)
    with pytest.raises(VerifyError) as caught:
        run_passes(program, [Place(), Forgetful()])
    assert (
        str(caught.value)
        == """\
forgetful left gelu inconsistent
    mm_1 : f32[32/dp 64] +tp = mm(relu, down)
    gelu : f32[32/dp 64] = gelu(mm_1 as [32/dp 64])
  gelu needs mm_1 as [32/dp 64], but it is f32[32/dp 64] +tp: insert the transfers between them"""
    )


def test_a_pass_that_lays_a_value_wrongly_is_blamed() -> None:
    program = Program.parse(TRACED)
    with pytest.raises(VerifyError) as caught:
        run_passes(program, [Place(), Reshard(), Careless()])
    assert (
        str(caught.value)
        == """\
careless left relu inconsistent
    mm : f32[32/dp 256/tp] = mm(x, up)
    relu : f32[32/tp 256/dp] = relu(mm)
  relu splits the factor ...1 (... -> ...) over dp in one place and over tp in the result: place them alike"""
    )


def test_right_passes_are_not() -> None:
    program = Program.parse(TRACED)
    assert [report.name for report in run_passes(program, [Place(), Reshard()])] == ["place", "reshard"]
    with pytest.raises(ValueError, match="the pass place takes a traced program, this one is explicit"):
        run_passes(program, [Place()])
