"""Passes with a machine compare its nanoseconds, without one bytes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import autopar
from autopar.costs.machine import Link, Machine, machine
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.passes import Fold, Follow, Pass, Place, Reshard, pipeline, run_passes

H100 = machine("NVIDIA H100 80GB HBM3")
SLOW = replace(H100, name="slow network", ranks_per_node=2, outside=Link(1e-3, 1e8))


def after(text: str, *passes: Pass) -> Program:
    program = Program.parse(text)
    run_passes(program, passes)
    return program


def lines(program: Program) -> list[str]:
    return [line.strip() for line in str(program).splitlines()]


def test_every_pass_that_compares_gets_the_machine() -> None:
    options = {"amp": "bf16-O1", "recompute": "blocks", "widen": True}
    for step in pipeline(Mesh(dp=2), {}, machine=H100, **options):
        if "machine" in {field.name for field in fields(step)}:
            assert step.machine is H100, step.name
    priced = {step.name for step in pipeline(machine=H100) if hasattr(step, "machine")}
    assert priced == {"expand", "place", "follow", "reshard", "fold"}
    assert all(step.machine is None for step in pipeline() if hasattr(step, "machine"))


TURNED = """program placed on dp=8 tp=8
  x : f32[8192/dp/tp 8192] = input
forward:
  y : f32[8192 8192/dp/tp] = relu(x as [8192 8192/dp/tp])
  return y
"""


def test_reshard_takes_three_exchanges_of_few_ranks_for_one_of_many() -> None:
    steps = [line.rpartition(" = ")[2].partition("(")[0] for line in lines(after(TURNED, Reshard(machine=H100)))[3:-1]]
    assert steps == ["all_to_all", "redistribute", "all_to_all", "relu"]
    assert "x_relaid : f32[8192 8192/dp/tp] = redistribute(x, ((), (dp, tp)))" in lines(after(TURNED, Reshard()))


def test_fold_folds_what_is_slower() -> None:
    fast = after(TURNED, Reshard(machine=H100))
    assert str(after(TURNED, Reshard(machine=H100), Fold(machine=H100))) == str(fast)
    assert lines(after(TURNED, Reshard(machine=H100), Fold()))[3].endswith("redistribute(x, ((), (dp, tp)))")
    chain = """program explicit on dp=2 tp=2
  x : f32[64/dp 64] = input
forward:
  x_dp : f32[64 64] = all_gather(x, 0, dp)
  x_dp_dp : f32[64 64/dp] = slice(x_dp, 1, dp)
  y : f32[64 64/dp] = relu(x_dp_dp)
  return y
"""
    assert "x_dp_1 : f32[64 64/dp] = all_to_all(x, 0, 1, dp)" in lines(after(chain, Fold(machine=machine("cpu"))))
    # both ranks of a node send half, and gather the rest on the node
    assert lines(after(chain, Fold(machine=SLOW)))[3:5] == [
        "x_relaid : f32[64 64/dp/tp] = redistribute(x, ((), (dp, tp)))",
        "x_relaid_tp : f32[64 64/dp] = all_gather(x_relaid, 1, tp)",
    ]


def test_place_moves_what_is_moved_faster() -> None:
    """28 MiB over the network, or 32 MiB and 224 MiB, of which the most stays inside nodes."""
    text = """program traced on dp=8 tp=8
  x : f32[4096/dp 64] = param
  w : f32[64 8192/dp/tp] = param
forward:
  y : f32[4096 8192] = mm(x, w)
  return y
"""
    assert "y : f32[4096/dp 8192/tp] = mm(x, w as [64 8192/tp])" in lines(after(text, Place()))
    assert "y : f32[4096 8192/dp/tp] = mm(x as [4096 64], w)" in lines(after(text, Place(machine=H100)))


def test_follow_compares_seconds() -> None:
    """Before the cast a gather moves twice the bytes; of so few this takes no longer."""
    text = """program placed on dp=2 tp=2
  x : f32[4/dp 2] = input
forward:
  y : bf16[4/dp 2] = _to_copy(x, dtype=bf16)
  z : bf16[4 2] = relu(y as [4 2])
  return z
"""
    assert "z : bf16[4 2] = relu(y as [4 2])" in lines(after(text, Follow()))
    assert "y : bf16[4 2] = _to_copy(x as [4 2], dtype=bf16)" in lines(after(text, Follow(machine=H100)))


@pytest.mark.simulated
@pytest.mark.parametrize("on", [None, H100, SLOW, machine("cpu")], ids=lambda on: on and on.name)
def test_results_do_not_depend_on_the_machine(on: Machine | None) -> None:
    text = """program traced on dp=2 tp=2
  x : f32[16/dp/tp 8] = input
  up : f32[32/tp/dp 8] = param
  down : f32[8/dp 32/tp] = param
forward:
  t : f32[8 32] = t(up)
  mm : f32[16 32] = mm(x, t)
  relu : f32[16 32] = relu(mm)
  t_1 : f32[32 8] = t(down)
  mm_1 : f32[16 8] = mm(relu, t_1)
  softmax : f32[16 8] = _softmax(mm_1, 1, False)
  return softmax
"""
    program = Program.parse(text)
    run_passes(program, pipeline(machine=on))
    torch.manual_seed(0)
    values = [torch.randn(record_of(node).type.shape, dtype=torch.float32) for node in program.placeholders]
    (found,) = autopar.simulate(program, values)
    x, up, down = values
    torch.testing.assert_close(found, torch.softmax(torch.relu(x @ up.T) @ down.T, 1))
    assert operands(program.output)
