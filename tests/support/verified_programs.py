"""Programs that keep their promises, and what verification says of one that does not."""

from __future__ import annotations

import pytest

from autopar.errors import VerifyError
from autopar.ir.program import Program
from autopar.verify.levels import verify

MLP = """\
program explicit on dp=4 tp=2
  x : f32[32/dp 64] = input
  up : f32[64 256/tp] = param
  down : f32[256/tp 64] = param
forward:
  mm : f32[32/dp 256/tp] = mm(x, up)
  relu : f32[32/dp 256/tp] = relu(mm)
  mm_1 : f32[32/dp 64] +tp = mm(relu, down)
  mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
  return mm_1_tp
"""

LOCAL = """\
program local on dp=2 tp=2 at dp=1 tp=0
  x : f32[2 4] = input
  p : (f32[2], f32[2]) = topk(x)
forward:
  y : f32[2 4] = relu(x)
"""
SCHEDULED = """\
program scheduled on dp=2 at dp=0
stream comm
  x : f32[2 4] = input
forward:
  x_dp : f32[2 4] = start all_reduce(x, dp) on comm
  y : f32[2 4] = relu(x)
  wait : f32[2 4] = wait(x_dp)
  return wait
"""
STATES = """\
program explicit on dp=2
  a : f32[4/dp] = state(c)
  b : f32[4] = state(d)
  x : f32[4] = input
update:
  c : f32[4/dp] = relu(a)
  d : f32[4] = relu(b)
  return x
  grad x = b
"""
PLACED = (
    "program placed on dp=2 tp=2\nstage s on dp=2 ranks 2 3\n  x : f32[4 6] = input\nforward:\n  p : (f32[4 6], "
    "i64[4 6]) = topk(x, 6)\n"
)


def complaint(program: Program | str, made_by: str = "") -> str:
    program = Program.parse(program) if isinstance(program, str) else program
    with pytest.raises(VerifyError) as caught:
        verify(program, made_by)
    return str(caught.value)
