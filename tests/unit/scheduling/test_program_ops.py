"""Make ops from programs that are written by hand."""

from __future__ import annotations

import pytest
import torch

from autopar import Program
from autopar.costs.durations import durations
from autopar.scheduling import schedule
from autopar.scheduling.op import Op
from autopar.scheduling.programs.functions import functions_of, program_ops

TEXT = """\
program explicit on dp=2 tp=2
  x : f32[8/dp 4] = input
  w : f32[4/tp 6] = param
forward:
  w_tp : f32[4 6] = all_gather(w, 0, tp)
  t : f32[6 4] = t(w_tp)
  t_1 : f32[4 6] = t(t)
  mm : f32[8/dp 6] = mm(x, t_1)
  sum_1 : f32[] +dp = sum.default(mm)
  sum_1_dp : f32[] = all_reduce(sum_1, dp)
  return sum_1_dp
"""


def ops_of(text: str, **seconds: float) -> dict[str, Op]:
    """The ops of a program, with prices of the machine ``cpu``, some of which are replaced."""
    program = Program.parse(text)
    prices = {**durations(program, "cpu").seconds, **seconds}
    overwriting = {node for node in program.nodes if node.name == "add"}
    return {op.name: op for op in program_ops(program, *functions_of(program, whole=True), prices, overwriting)}


def test_collectives_have_streams_bytes_and_kinds() -> None:
    ops = ops_of(TEXT)
    assert {name: op.seconds for name, op in ops.items()} == durations(Program.parse(TEXT), "cpu").seconds
    gather, reduce = ops["w_tp"], ops["sum_1_dp"]
    assert (gather.stream, gather.bytes, gather.memory, gather.after) == ("tp", 2 * 6 * 4, 4 * 6 * 4, ())
    assert gather.kind == ("all_gather", "sum", torch.float32, None)
    assert (reduce.stream, reduce.bytes, reduce.after) == ("dp", 4, ("sum_1",))
    assert reduce.kind == ("all_reduce", "sum", torch.float32, None)
    assert ops["mm"].stream == "compute"
    assert ops["mm"].memory == 4 * 6 * 4
    assert schedule(ops.values()).makespan > 0


def test_a_view_keeps_the_memory_of_what_it_shows() -> None:
    ops = ops_of(TEXT)
    assert ops["t"].memory == ops["t_1"].memory == 0
    assert ops["mm"].after == ("t_1", "t", "w_tp")


def test_seconds_are_those_that_are_given() -> None:
    assert ops_of(TEXT, mm=2.5)["mm"].seconds == 2.5


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("4/tp 6", "5/tp 6", "w_tp"),
        ("sum_1 : f32[] +dp = sum.default(mm)", "sum_1 : f32[] +avg:dp = pend(mean, dp, op=avg)", "sum_1_dp"),
    ],
)
def test_pieces_of_unequal_sizes_and_averages_are_left_whole(old: str, new: str, name: str) -> None:
    text = TEXT.replace(old, new)
    if name == "w_tp":
        text = text.replace("f32[4 6]", "f32[5 6]").replace("f32[6 4]", "f32[6 5]").replace("8/dp 4", "8/dp 5")
    else:
        text = text.replace("  sum_1 :", "  mean : f32[] = ones([], dtype=f32)\n  sum_1 :").replace(
            "sum_1, dp)", "sum_1, dp, op=avg)"
        )
    ops = ops_of(text)
    assert ops[name].bytes == 0 and ops[name].stream != "compute"


def test_a_state_is_overwritten_after_its_last_reader() -> None:
    text = """\
program explicit on dp=2
  w : f32[4 4] = state(add, 'w')
  x : f32[4 4] = input
update:
  neg : f32[4 4] = neg(w)
  add : f32[4 4] = add.Tensor(w, x)
  return neg
"""
    ops = ops_of(text)
    assert (ops["add"].after, ops["add"].behind) == ((), ("neg",))


def test_a_state_is_overwritten_after_the_last_reader_of_a_view_of_it() -> None:
    text = """\
program explicit on dp=2
  w : f32[4 4] = state(add, 'w')
  x : f32[4 4] = input
update:
  t : f32[4 4] = t(w)
  mm : f32[4 4] = mm(x, t)
  add : f32[4 4] = add.Tensor(w, x)
  return mm
"""
    assert ops_of(text)["add"].behind == ("mm",)  # which comes after the view
