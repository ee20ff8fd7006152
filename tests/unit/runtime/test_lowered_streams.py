"""Lower programs with streams: each collective runs in the group of its stream, and so does a message of several."""

from __future__ import annotations

import re

import pytest

from autopar.errors import SimulationError
from autopar.ir.program import Program
from autopar.runtime.lowering.lower import lower

TEXT = """\
program scheduled on dp=2 at dp=0
stream late
stream urgent
  x : f32[4] = input
forward:
  y : f32[4] = relu(x)
  a_start : f32[4] = start all_reduce(x, dp) on {}
  b_start : f32[4] = start all_reduce(y, dp) on {}
  a : f32[4] = wait(a_start)
  b : f32[4] = wait(b_start)
  c : f32[4] = mul.Tensor(a, b)
  return c
"""
GROUPS = {(0, 1): "the default", ((0, 1), "late"): "another", ((0, 1), "urgent"): "a third"}


@pytest.mark.parametrize(
    ("streams", "starts"),
    [
        (("late in m", "late in m"), ["start_bucket([x, y], (None, None), 'sum', 'another')"]),
        (("late", "urgent"), ["start_all_reduce(x, 'sum', 'another')", "start_all_reduce(y, 'sum', 'a third')"]),
    ],
)
def test_messages_are_of_one_stream(streams: tuple[str, str], starts: list[str]) -> None:
    forward = lower(Program.parse(TEXT.format(*streams)), GROUPS)["forward"]
    source = forward.graph.python_code("self").src.replace("_in_place", "")
    assert re.findall(r"start_(?:bucket|all_reduce)\(.*?'\)", source) == starts


def test_a_stream_without_a_group() -> None:
    said = (
        "a_start runs on late among the ranks [0, 1], which have no process group for that; all ranks make it before a "
        "program is lowered, with groups_for(job, programs)"
    )
    with pytest.raises(SimulationError, match=f"^{re.escape(said)}$"):
        lower(Program.parse(TEXT.format("late", "late")), {(0, 1): "the default"})
