"""Values get their stages, and reshard inserts the messages; a number of all stages is pending over them."""

from __future__ import annotations

import pytest
import torch

from autopar import Mesh, Program
from autopar.errors import VerifyError
from autopar.ir.layout import DistAttr
from autopar.ir.ops.over_stages import over_stages
from autopar.passes import OnStages, pipeline, run_passes
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.simulated_step import SimulatedStep
from autopar.step.compiling.part_of_stage import part_of_stage
from autopar.verify.levels import verify

MESH, ONE = Mesh(pp=2, dp=2), Mesh(dp=2)
STAGES = {"s0": Mesh({"dp": 2}, ranks=(0, 1), name="s0"), "s1": Mesh({"dp": 2}, ranks=(2, 3), name="s1")}
ROWS = DistAttr((((None, ("dp",)),), ((None, ()),)))
TRACED = """\
program traced
  a : f32[4 6] = buffer
  b : f32[4 6] = buffer
  w : f32[4 6] = param
  lr : f32[] = input
update:
  c : f32[4 6] = add.Tensor(a, b)
  s : f32[] = autopar::sum_of_squares(c)
  s_1 : f32[] = autopar::sum_of_squares(w)
  t : f32[] = autopar::over_stages([s, s_1], f32, device('cpu'))
  m : f32[] = mul.Tensor(t, lr)
  d : f32[4 6] = mul.Tensor(w, m)
  return (m, d)"""
EXPLICIT = """\
program explicit on pp=2 dp=2
stage s0 on dp=2
stage s1 on dp=2 ranks 2 3
  a : f32[4/dp 6] @s0 = buffer
  b : f32[4/dp 6] @s1 = buffer
  w : f32[4/dp 6] @s1 = param
  lr : f32[] = input
update:
  b_s0 : f32[4/dp 6] @s1 = send(b, s0)
  b_s0_s0 : f32[4/dp 6] @s0 = recv(b_s0, s0, splits=((dp,), ()))
  c : f32[4/dp 6] @s0 = add.Tensor(a, b_s0_s0)
  s : f32[] +dp @s0 = autopar::sum_of_squares(c)
  s_1 : f32[] +dp @s1 = autopar::sum_of_squares(w)
  t : f32[] +dp +pp = autopar::over_stages([s, s_1], f32, device('cpu'))
  t_pp_dp : f32[] = all_reduce(t, (pp, dp))
  m : f32[] = mul.Tensor(t_pp_dp, lr)
  d : f32[4/dp 6] @s1 = mul.Tensor(w, m)
  d_mesh : f32[4/dp 6] @s1 = send(d, None)
  d_mesh_mesh : f32[4/dp 6] = recv(d_mesh, None, splits=((dp,), ()))
  return (m, d_mesh_mesh)"""


@pytest.fixture
def explicit() -> Program:
    program = Program.parse(TRACED)
    on = OnStages(MESH, STAGES, {"a": "s0", "b": "s1", "w": "s1"})
    run_passes(program, pipeline(ONE, {"a": ROWS, "b": ROWS, "w": ROWS}, stages=on))
    return program


def test_messages_are_inserted(explicit: Program) -> None:
    """An op is on the stage of its first operand that is on one; a value of the whole mesh is read where it is."""
    assert str(explicit).strip() == EXPLICIT
    assert str(Program.parse(EXPLICIT)) == str(explicit)


def test_all_ranks_together_have_the_numbers_of_one_device(explicit: Program) -> None:
    torch.manual_seed(0)
    a, b, w = (torch.randn(4, 6) for _ in range(3))
    lr = torch.tensor(0.5)
    m, d = SimulatedStep(explicit, LocalPrograms(explicit, verify), lambda positions: pytest.fail())([a, b, w, lr])
    wanted = lr * ((a + b).square().sum() + w.square().sum())
    torch.testing.assert_close(m, wanted)
    torch.testing.assert_close(d, w * wanted)


def test_a_rank_adds_the_numbers_that_it_has(explicit: Program) -> None:
    local = LocalPrograms(explicit, verify)
    assert "t : f32[] = autopar::over_stages([s], f32, device('cpu'))" in str(local[0])
    assert "t : f32[] = autopar::over_stages([s_1], f32, device('cpu'))" in str(local[2])
    assert over_stages([], torch.float32, torch.device("cpu")).item() == 0.0
    one = torch.ones(())
    assert over_stages([one], torch.float32, torch.device("cpu")).data_ptr() != one.data_ptr(), "it is reduced in place"


def test_a_value_of_another_stage_is_not_read_without_a_message() -> None:
    text = EXPLICIT.replace("add.Tensor(a, b_s0_s0)", "add.Tensor(a, b)")
    with pytest.raises(VerifyError, match="operands and results are on different meshes"):
        verify(Program.parse(text))


def test_a_value_that_the_stages_split_is_not_on_a_stage() -> None:
    """What is pending over ``pp`` cannot be read by one stage."""
    text = EXPLICIT.replace("mul.Tensor(t_pp_dp, lr)", "mul.Tensor(t, lr)")
    with pytest.raises(VerifyError):
        verify(Program.parse(text))


PART = """\
program explicit on dp=2 ranks 2 3
  b : f32[4/dp 6] = buffer
  w : f32[4/dp 6] = param
  lr : f32[] = input
update:
  s_1 : f32[] +dp = autopar::sum_of_squares(w)
  t : f32[] +dp = autopar::over_stages([s_1], f32, device('cpu'))
  t_pp_dp : f32[] = all_reduce(t, dp)
  m : f32[] = mul.Tensor(t_pp_dp, lr)
  d : f32[4/dp 6] = mul.Tensor(w, m)
  return (m, d, b)"""


def test_the_part_of_a_stage(explicit: Program) -> None:
    """What it sends is returned, what it receives is an input, and reductions are those of its ranks."""
    part = part_of_stage(explicit, "s1")
    verify(part)
    assert str(part).strip() == PART
    first = part_of_stage(explicit, "s0")
    verify(first)
    assert "b_s0_s0 : f32[4/dp 6] = input" in str(first)
