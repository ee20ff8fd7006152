"""The slot and the wait that a process is in: what others read of it, now and after an error."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autopar.ir.program import Program
from autopar.runtime import current_op
from autopar.runtime.current_op import where, where_raised
from autopar.runtime.current_slot import Wait, slot, waiting_for
from autopar.runtime.lowering.waits import wait_of

SLOT = "BW03 of stage 1 (micro-batch 3)"


def generated(*waits: Wait, call: Callable[[], Any]) -> Callable[[], None]:
    """A step of one op, ``mm``, which waits."""
    scope: dict[str, Any] = {"call": call}
    exec(compile("def step():\n  call()\n", "<step>", "exec"), scope)
    current_op.register(scope["step"].__code__, {2: "mm_12 = mm(t, x)   model.py:41"}, waits=dict(enumerate(waits, 2)))
    return scope["step"]


def seen(*waits: Wait) -> current_op.CurrentOp:
    """Where this thread is inside of an op."""
    found: list[current_op.CurrentOp] = []
    generated(*waits, call=lambda: found.append(where()))()
    return found[0]


def test_a_slot_stands_before_the_op() -> None:
    with slot(SLOT):
        inside, bare = seen(), where()
    assert (inside.inside, inside.text, inside.peers) == (True, f"{SLOT}: mm_12 = mm(t, x)   model.py:41", ())
    assert (bare.inside, bare.text) == (True, SLOT)
    assert seen().text == "mm_12 = mm(t, x)   model.py:41"
    outside = where()
    assert not outside.inside and outside.text.startswith("test_current_slot.py:")


def test_a_wait_has_its_peers() -> None:
    with slot(SLOT), waiting_for((2, 3), "BR03 from stage 2"):
        message = where()
    with waiting_for((1,), "the loss of the step", is_collective=True):
        sum_ = where()
    assert (message.text, message.peers, message.collective) == (f"{SLOT}: BR03 from stage 2", (2, 3), "")
    assert (sum_.inside, sum_.text) == (True, "the loss of the step")
    assert (sum_.peers, sum_.collective) == ((1,), "the loss of the step")
    assert where().peers == ()


def test_a_line_has_its_peers_in_each_slot() -> None:
    wait = Wait((0, 2), "mm_start")
    assert (seen(wait).peers, seen(wait).collective) == ((0, 2), "mm_start")
    with slot(SLOT):
        assert seen(wait).collective == f"{SLOT}: mm_start", "ranks in two slots are in two collectives"
    with waiting_for((5,), "something"):
        assert seen(wait).peers == (0, 2), "the line knows better"
        assert (seen().peers, seen().text) == ((5,), "mm_12 = mm(t, x)   model.py:41")


def test_slots_and_waits_count_as_progress() -> None:
    before = where().ticks
    for _ in range(3):
        with slot(SLOT), waiting_for((1,), "a message"):
            pass
    assert where().ticks == before + 6


def test_an_error_has_its_slot_after_it_was_left() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught, slot(SLOT):
        generated(call=fail)()
    assert where_raised(caught.value).text == f"{SLOT}: mm_12 = mm(t, x)   model.py:41"
    with pytest.raises(ValueError, match="no") as caught, slot(SLOT), waiting_for((2,), "BR03 from stage 2"):
        fail()
    place = where_raised(caught.value)
    assert (place.inside, place.text, place.peers) == (True, f"{SLOT}: BR03 from stage 2", (2,))
    again = pickle.loads(pickle.dumps(caught.value))
    assert where_raised(again).text == place.text, "it may come from another process"
    with pytest.raises(ValueError, match="no") as caught, slot("another"):
        raise again
    assert where_raised(caught.value).text == place.text, "where it was raised first"
    with pytest.raises(ValueError, match="no") as caught:
        fail()
    assert not where_raised(caught.value).inside


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_a_note_has_the_slot() -> None:
    error = ValueError("no")
    with slot(SLOT):
        current_op.add_op(error, "")
    assert error.__notes__ == [f"while autopar ran\n    {SLOT}"]


def test_an_error_that_is_frozen_takes_its_slot() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    error = Frozen()
    with pytest.raises(Frozen), slot(SLOT):
        raise error
    assert where_raised(error).text == SLOT


def test_loops_that_take_turns_leave_no_slot_behind() -> None:
    def loop(rank: int) -> Iterator[None]:
        with slot(f"FW00 of stage {rank}"):
            yield

    turns = [loop(rank) for rank in range(2)]
    for turn in (*turns, *turns):
        next(turn, None)
    assert not where().inside


def test_the_text_of_a_slot_is_made_on_demand() -> None:
    class Text:
        made = 0

        def __str__(self) -> str:
            Text.made += 1
            return SLOT

    with slot(Text()):
        pass
    assert Text.made == 0
    with slot(Text()):
        assert where().text == SLOT


PROGRAM = """program scheduled on dp=3 at dp=1
stream dp
  x : f32[8] = input
  z : f32[4] = input
forward:
  x_dp_start : f32[8] = start all_reduce(x, dp) on dp in dp_0
  z_dp_start : f32[4] = start all_reduce(z, dp) on dp in dp_0
  y : f32[4] = relu(z)
  y_dp_start : f32[4] = start all_reduce(y, dp) on dp
  x_dp : f32[8] = wait(x_dp_start)
  z_dp : f32[4] = wait(z_dp_start)
  y_dp : f32[4] = wait(y_dp_start)
  return x_dp, z_dp, y_dp
"""


def test_the_lines_of_a_program_know_their_peers() -> None:
    program = Program.parse(PROGRAM)
    waits = {node.name: wait_of(program, node) for node in program.graph.nodes if node.op == "call_function"}
    bucket, alone = Wait((0, 2), "dp_0"), Wait((0, 2), "y_dp_start")
    assert waits == {
        "x_dp_start": bucket, "z_dp_start": bucket, "x_dp": bucket, "z_dp": bucket, "y": None, "y_dp_start": alone,
        "y_dp": alone,
    }  # fmt: skip
