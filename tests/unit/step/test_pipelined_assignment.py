"""Each op of a micro-batch has the stage that the page says, or runs on all that read it."""

from __future__ import annotations

import pytest
from pipelined_programs import named, read

from autopar.errors import PlanError
from autopar.ir.nodes import record_of
from autopar.step.pipelined.cutting.assignment import assign, computed_anywhere, ops_of_forward

TEXT = """\
program traced
  w0 : f32[4 4] = param('a.w')
  w1 : f32[4 4] = param('b.w')
  table : f32[4 4] = buffer
  running : f32[4] = state(running_next)
  x : f32[2 4] = input
  y : i64[2] = input
  seed : i64[] = seed
  w0_grad : f32[4 4] = state(w0_grad_sum, 'a.w.grad')
forward:
  ones : f32[4 4] = full([4, 4], 1, dtype=f32, device=device('cpu'))
  mask : bool[2] = ne.Scalar(y, -100)  # call 0
  of_table : f32[4 4] = mul.Tensor(table, ones)  # call 1
  noise : f32[4] = mul.Tensor(seed, 0.5)  # call 1
  low : bf16[4 4] = _to_copy(w0, dtype=bf16)  # call 2 a
  t : bf16[4 4] = t(low)  # call 3 a
  scaled : f32[4 4] = mul.Tensor(w0, 2.0)  # call 4 a
  running_next : f32[4] = mul.Tensor(running, 0.9)  # call 5 a
  mm : f32[2 4] = mm(x, scaled)  # call 6 a
  max_1 : (f32[2], i64[2]) = max.dim(mm, 1)  # call 7 b
  values : f32[2] = max_1[0]  # call 8 a
  mm_1 : f32[2 4] = mm(mm, w1)  # call 9 b
  both : f32[2 4] = add.Tensor(mm, mm_1)
  early : f32[2 4] = mul.Tensor(mm, 3.0)
backward:
  half : f32[] = full([], 0.5, dtype=f32, device=device('cpu'))
  t_1 : f32[4 4] = t(w1)  # call 9 b
  d_mm_1 : f32[2 4] = mul.Tensor(mm_1, half)  # call 9 b
  mm_2 : f32[2 4] = mm(d_mm_1, t_1)  # call 9 b
  again : f32[2 4] = mul.Tensor(mm, half)
  d_mm : f32[2 4] = add.Tensor(again, mm_2)
  of_a : f32[2 4] = mul.Tensor(d_mm, 1.0)  # call 6 a
  last : f32[2 4] = add.Tensor(of_a, d_mm)
  t_2 : f32[4 2] = t(x)  # call 6 a
  mm_3 : f32[4 4] = mm(t_2, last)  # call 6 a
  w0_grad_sum : f32[4 4] = add.Tensor(w0_grad, mm_3)
  return (both, early, values, mask, of_table, noise, t)
"""


def stages(text: str, of_module: dict[str, int | None]) -> dict[str, int]:
    program = read(text)
    found = assign(program, computed_anywhere(program), lambda node: of_module[record_of(node).module], 2)
    assert found.stages == 2 and not found.stage.keys() & found.anywhere
    return named(program, found.stage)


def test_what_runs_anywhere() -> None:
    """What inputs, buffers, seeds and constants alone determine; views and casts of parameters in the forward. Not what
    computes with a parameter, or follows from a state, which a micro-batch writes."""
    names = {node.name for node in computed_anywhere(read(TEXT))}
    assert names == {"ones", "mask", "of_table", "noise", "low", "t", "half", "t_2"}


def test_only_calls_of_the_forward_are_cut() -> None:
    program = read(TEXT)
    ops = ops_of_forward(program, computed_anywhere(program))
    assert [node.name for node in ops] == ["scaled", "running_next", "mm", "max_1", "values", "mm_1"]


def test_every_row_of_the_table() -> None:
    found = stages(TEXT, {"a": 0, "b": 1})
    assert found == {
        "scaled": 0, "running_next": 0, "mm": 0,
        "max_1": 1, "values": 1,  # an element is where its tuple is, whatever its module says
        "mm_1": 1,
        "both": 1,  # where its last operand is made
        "early": 0,
        "t_1": 1, "d_mm_1": 1, "mm_2": 1,  # with the call of the forward
        "again": 0,  # it has no call; the value of the forward is made here
        "d_mm": 0,  # the last operand of the backward is that of the first stage
        "of_a": 0, "last": 0, "mm_3": 0, "w0_grad_sum": 0,
    }  # fmt: skip


def test_what_the_cut_leaves_open_follows_its_last_operand() -> None:
    found = stages(TEXT, {"a": None, "b": 1})
    assert (found["scaled"], found["mm"], found["mm_1"]) == (0, 0, 1)
    assert stages(TEXT.replace("  # call 9 b", "  # call 9 c"), {"a": 0, "b": 1, "c": None})["mm_1"] == 0


def test_a_call_on_two_stages_has_its_backward_on_the_later_one() -> None:
    """Its gradients come from behind."""
    text = TEXT.replace("mm : f32[2 4] = mm(x, scaled)  # call 6 a", "mm : f32[2 4] = mm(x, scaled)  # call 9 a")
    assert stages(text, {"a": 0, "b": 1})["d_mm_1"] == 1


def test_a_cut_that_runs_backwards() -> None:
    with pytest.raises(PlanError) as caught:
        stages(TEXT, {"a": 1, "b": 0})
    assert str(caught.value) == (
        "the cut runs backwards: max_1 of stage 0 reads mm of stage 1, in the forward\n"
        "    model.py:6   in module a\n"
        "    model.py:7   in module b\n"
        "  put the module of max_1 on stage 1 or behind it: change stages=, or leave it out"
    )


def test_a_backward_that_runs_forwards() -> None:
    """A gradient of the first stage that an op of the second reads."""
    text = TEXT.replace(
        "mm_2 : f32[2 4] = mm(d_mm_1, t_1)  # call 9 b", "mm_2 : f32[2 4] = mm(d_mm_1, t_1)  # call 6 a"
    )
    text = text.replace(
        "  again : f32[2 4] = mul.Tensor(mm, half)", "  again : f32[2 4] = mul.Tensor(mm_2, half)  # call 9 b"
    )
    with pytest.raises(PlanError, match=r"runs backwards: again of stage 1 reads mm_2 of stage 0, in the backward\n"):
        stages(text, {"a": 0, "b": 1})
