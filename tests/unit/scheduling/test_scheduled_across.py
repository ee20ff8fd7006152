"""Collectives that cross the end of a run: their order, their text, and what is refused."""

from __future__ import annotations

import pytest

from autopar import Program
from autopar.costs.durations import Durations
from autopar.errors import VerifyError
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import Execution, decide
from autopar.scheduling.programs.overlap import Overlap
from autopar.scheduling.programs.run_parts import part_of
from autopar.verify.levels import verify

# two layers: what a run computes for its end is reduced in the next one, before its reader
EXPLICIT = """program explicit on dp=2
  a : f32[8] = state(a_next, 'a')
  b : f32[8] = state(b_next, 'b')
  x : f32[8] = input
  a_before : f32[8] +dp = state(a_grad, 'a.before')
  b_before : f32[8] +dp = state(b_grad, 'b.before')
finish:
  a_dp : f32[8] = all_reduce(a_before, dp)
  b_dp : f32[8] = all_reduce(b_before, dp)
  a_next : f32[8] = sub.Tensor(a, a_dp)
  b_next : f32[8] = sub.Tensor(b, b_dp)
forward:
  y : f32[8] = mul.Tensor(x, a_next)
  z : f32[8] = mul.Tensor(y, b_next)
backward:
  b_new : f32[8] = mul.Tensor(z, y)
  b_grad : f32[8] +dp = pend(b_new, dp)
  a_new : f32[8] = mul.Tensor(b_new, b_next)
  a_grad : f32[8] +dp = pend(a_new, dp)
  return (z,)
"""
ACROSS = ("a_dp", "b_dp")


def made(policy: str, text: str = EXPLICIT, **seconds: float) -> tuple[Program, object]:
    """The scheduled program of the first rank, and the schedule. Each op takes 1 s, and a reduction 3 s."""
    program = Program.parse(text)
    verify(program)
    times = {node.name: 3.0 if node.name in ACROSS else 1.0 for node in program.nodes} | seconds
    order = decide(
        program, Execution(whole=True, across=ACROSS), Durations(times, {}, 0.0, 0.0, "test"), Overlap(policy)
    )
    local = LocalPrograms(program, lambda made: verify(made, "schedule"), order)
    return local[0], order.schedules[0]


def names(program: Program) -> list[str]:
    return [node.name for node in program.nodes if node.op == "call_function"]


@pytest.mark.parametrize("policy", ["program", "today", "longest-tail", "p3", "bytescheduler", "compute-first", "ddp"])
def test_a_run_waits_first_and_starts_last(policy: str) -> None:
    program, _ = made(policy)
    order = names(program)
    for name in ("a", "b"):
        assert order.index(f"{name}_dp") < order.index(f"{name}_next") < order.index("z")
        starts = [op for op in order if op.startswith(f"{name}_dp_") and op.endswith("next_start")]  # of all chunks
        assert starts and order.index(f"{name}_grad") < order.index(starts[0])
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("policy", ["longest-tail", "p3"])
def test_what_the_next_forward_reads_first_goes_first(policy: str) -> None:
    """b's gradient is computed first, and is needed last. Where a reduction is long, the forward begins before it."""
    program, schedule = made(policy)
    order = names(program)
    assert order.index("y") < order.index("b_dp"), "the forward does not wait for the second reduction"
    # backward 4, the reduction of b from 2 and that of a behind it, then the forward
    assert schedule.makespan >= schedule.bound > 0


def test_parts_of_a_program() -> None:
    """The begin reads states as they are, and the finish replaces them."""
    program, _ = made("today")
    begin, finish, whole = (part_of(program, part) for part in ("begin", "finish", "whole"))
    assert {node.name for node in begin.nodes}.isdisjoint(node.name for node in finish.nodes)
    assert len(begin.nodes) + len(finish.nodes) == len(whole.nodes)
    assert {node.name for node in begin.takes} == {"x", "a", "b"}
    assert {value.name: home.name for value, home in begin.replaced.items()} == {"a_next": "a", "b_next": "b"}
    starts = {node.name for node in begin.gives} - {"z"}
    assert starts and all(name.endswith("_next_start") for name in starts)
    assert {node.name for node in finish.gives} == {"a_next", "b_next"}


SCHEDULED = """program scheduled on dp=2 at dp=0
stream dp
  g : f32[8] = input
  w : f32[8] = state(w_next)
  w_dp_start : f32[8] = state(w_dp_next_start) on dp
finish:
  w_dp : f32[8] = wait(w_dp_start)
  w_next : f32[8] = sub.Tensor(w, w_dp)
backward:
  w_dp_next_start : f32[8] = start all_reduce(g, dp) on dp
"""


def test_the_text_is_right() -> None:
    program = Program.parse(SCHEDULED)
    verify(program)
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(("old", "new", "why"), [
    ("  w_dp : f32[8] = wait(w_dp_start)\n  w_next : f32[8] = sub.Tensor(w, w_dp)\n", "  w_next : f32[8] = relu(w)\n",
     "w_dp_start is started and never waited for"),
    ("sub.Tensor(w, w_dp)", "sub.Tensor(w, w_dp_start)", "w_dp_start is only started here"),
    ("state(w_dp_next_start) on dp", "state(g) on dp", "is the start of the same collective"),
    ("state(w_dp_next_start) on dp", "state(w_dp_next_start) on dp from 0 to 8",
     "with the same stream and elements"),
    ("w_dp_start : f32[8] = state(w_dp_next_start) on dp", "w_dp_start : f32[8] = state(w_dp_next_start)",
     "w_dp_start is not started"),
], ids=lambda text: text[:30])  # fmt: skip
def test_what_is_refused(old: str, new: str, why: str) -> None:
    program = Program.parse(SCHEDULED.replace(old, new, 1))
    with pytest.raises(VerifyError, match=why):
        verify(program)


def test_members_of_a_message_stay_together() -> None:
    text = SCHEDULED.replace("state(w_dp_next_start) on dp", "state(w_dp_next_start) on dp in dp_before_0")
    text = text.replace("finish:", "  v_dp_start : f32[8] = state(v_dp_next_start) on dp in dp_before_0\nfinish:")
    text = text.replace("  w_next :", "  v_dp : f32[8] = wait(v_dp_start)\n  w_next :")
    text = text.replace("(g, dp) on dp", "(g, dp) on dp in dp_0")
    swapped = text + "  v_dp_next_start : f32[8] = start all_reduce(g, dp) on dp in dp_0\n"
    verify(Program.parse(swapped))
    alone = text + "  v_dp_next_start : f32[8] = start all_reduce(g, dp) on dp in dp_1\n"
    with pytest.raises(VerifyError, match="in the same message"):
        verify(Program.parse(alone))
