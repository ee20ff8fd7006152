"""Verify refuses a pending value that is reduced in two ways; reshard never makes one."""

from __future__ import annotations

import pytest
from verified_programs import complaint

from autopar import Program
from autopar.passes import Fold, Reshard, Share, run_passes

HEAD = "program explicit on dp=2 tp=3\n  x : f32[6 12/tp] = input\n  w : f32[12/tp 6] = param\nforward:\n"
MM = "  mm : f32[6 6] +tp = mm(x, w)\n"
WAYS = {
    "to pieces and to the whole": MM
    + """\
  mm_tp : f32[6/tp 6] = reduce_scatter(mm, 0, tp)
  mm_tp_1 : f32[6 6] = all_reduce(mm, tp)
  return (mm_tp, mm_tp_1)
""",
    "to pieces of two dims": MM
    + """\
  mm_tp : f32[6/tp 6] = reduce_scatter(mm, 0, tp)
  mm_tp_1 : f32[6 6/tp] = reduce_scatter(mm, 1, tp)
  return (mm_tp, mm_tp_1)
""",
    "in two phases": MM
    + """\
  mm_tp : f32[6/tp 6] = reduce_scatter(mm, 0, tp)
backward:
  mm_tp_1 : f32[6 6] = all_reduce(mm, tp)
  relu : f32[6 6] = relu(mm_tp_1)
  return (mm_tp, relu)
""",
    "the pieces of a slice": MM
    + """\
  mm_dp : f32[6/dp 6] +tp = slice(mm, 0, dp)
  mm_dp_tp : f32[6/dp 6] = all_reduce(mm_dp, tp)
  mm_tp : f32[6 6] = all_reduce(mm, tp)
  return (mm_dp_tp, mm_tp)
""",
    "a view": MM
    + """\
  mm_tp : f32[6 6] = all_reduce(mm, tp)
  t : f32[6 6] +tp = t(mm)
  t_tp : f32[6 6] = all_reduce(t, tp)
  return (mm_tp, t_tp)
""",
    "computed again": MM
    + """\
  mm_tp : f32[6/tp 6] = reduce_scatter(mm, 0, tp)
backward:
  mm_again : f32[6 6] +tp = mm(x, w)
  mm_again_tp : f32[6 6] = all_reduce(mm_again, tp)
  relu : f32[6 6] = relu(mm_again_tp)
  return (mm_tp, relu)
""",
}


@pytest.mark.parametrize("name", WAYS)
def test_two_ways_are_refused(name: str) -> None:
    assert "is reduced over tp in two ways, " in complaint(HEAD + WAYS[name])


def test_the_text_of_the_refusal() -> None:
    assert (
        complaint(HEAD + WAYS["to pieces and to the whole"], "share")
        == """\
share left mm_tp_1 inconsistent
    mm : f32[6 6] +tp = mm(x, w)
    mm_tp : f32[6/tp 6] = reduce_scatter(mm, 0, tp)
    mm_tp_1 : f32[6 6] = all_reduce(mm, tp)
  mm is reduced over tp in two ways, mm_tp and mm_tp_1, and two orders of adding differ in the last bit: reduce it \
once, and make the other Layout of mm_tp"""
    )


def test_what_is_no_second_way() -> None:
    """A maximum does not depend on the order, and equal reductions are one."""
    ok = WAYS["to pieces and to the whole"].replace(MM, "  mm : f32[6] +max:tp = amax(x, [1])\n").replace("6 6]", "6]")
    ok = ok.replace("6/tp 6]", "6/tp]").replace(", tp)", ", tp, op=max)").replace("mm_tp_1)", "mm_tp_1)")
    Program.parse(HEAD + ok).verify()
    twice = MM + "  a : f32[6 6] = all_reduce(mm, tp)\n  b : f32[6 6] = all_reduce(mm, tp)\n  return (a, b)\n"
    Program.parse(HEAD + twice).verify()


PLACED = """\
program placed on dp=2 tp=3
  x : f32[6 12/tp] = input
  w : f32[12/tp 6] = param
forward:
  mm : f32[6 6] +tp = mm(x, w)
  t : f32[6 6] +tp = t(mm)
  a : f32[6/tp 6] = relu(mm as [6/tp 6])
  b : f32[6 6/tp] = exp(mm as [6 6/tp])
  c : f32[6/dp 6] = sin(t as [6/dp 6])
  d : f32[6 6] +tp = neg(mm)
  return (a, b, c, d as [6 6])
"""


def test_other_layouts_come_from_the_reduced_value() -> None:
    program = Program.parse(PLACED)
    run_passes(program, [Reshard(), Fold(), Share()])
    found = [line.strip() for line in str(program).splitlines() if "reduce" in line]
    assert len([line for line in found if "(mm," in line]) == 1 and len(found) == 2, found


TWO_AXES = """\
program placed on dp=2 tp=3
  x : bf16[6/dp 12/tp] = input
  w : bf16[6/dp 12/tp] = input
forward:
  a : bf16[6] +tp = sum.dim_IntList(x as [6 12/tp], [1])
  relu : f32[6] = relu(a as f32[6])
  exp : f32[6/dp] = exp(a as f32[6/dp])
backward:
  again : bf16[6] +tp = sum.dim_IntList(x as [6 12/tp], [1])
  sin : bf16[6/tp] = sin(again as [6/tp])
  return (relu, exp, sin)
"""


def test_fold_makes_no_second_way() -> None:
    """Not behind a cast, and not of what is computed again."""
    program = Program.parse(TWO_AXES)
    run_passes(program, [Reshard(), Fold(), Share()])
    found = {line.split("= ")[1].split("(")[0] for line in str(program).splitlines() if "reduce" in line}
    assert len(found) == 1, str(program)
