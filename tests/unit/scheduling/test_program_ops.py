"""Make ops from programs that are written by hand."""

from __future__ import annotations

import pytest
import torch

from autopar import Program
from autopar.costs.machine import machine_from
from autopar.costs.program_price import node_prices
from autopar.errors import ScheduleError
from autopar.scheduling import schedule
from autopar.scheduling.program_ops import program_ops

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


def test_collectives_have_streams_bytes_and_kinds() -> None:
    program = Program.parse(TEXT)
    ops = {op.name: op for op in program_ops(program, "cpu")}
    prices = {node.name: price / 1e9 for node, price in node_prices(program, machine_from("cpu"))}
    assert {name: op.seconds for name, op in ops.items()} == prices
    gather, reduce = ops["w_tp"], ops["sum_1_dp"]
    assert (gather.stream, gather.bytes, gather.memory, gather.after) == ("tp", 2 * 6 * 4, 4 * 6 * 4, ())
    assert gather.kind == ("all_gather", "tp", "sum", torch.float32)
    assert (reduce.stream, reduce.bytes, reduce.after) == ("dp", 4, ("sum_1",))
    assert reduce.kind == ("all_reduce", "dp", "sum", torch.float32)
    assert ops["mm"].stream == "compute"
    assert ops["mm"].memory == 4 * 6 * 4
    assert schedule(ops.values()).makespan > 0


def test_a_view_keeps_the_memory_of_what_it_shows() -> None:
    ops = {op.name: op for op in program_ops(Program.parse(TEXT), "cpu")}
    assert ops["t"].memory == ops["t_1"].memory == 0
    assert ops["mm"].after == ("t_1", "t", "w_tp")


def test_durations_replace_prices() -> None:
    program = Program.parse(TEXT)
    ops = {op.name: op for op in program_ops(program, "cpu", {"mm": 2.5})}
    assert ops["mm"].seconds == 2.5
    with pytest.raises(ScheduleError, match="durations has 'mmm', which is no op of the program; did you mean 'mm'"):
        program_ops(program, "cpu", {"mmm": 1.0})


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
    ops = {op.name: op for op in program_ops(Program.parse(text), "cpu")}
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
    ops = {op.name: op for op in program_ops(Program.parse(text), "cpu")}
    assert ops["add"].after == ("neg",)
