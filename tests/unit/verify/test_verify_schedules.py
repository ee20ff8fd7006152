"""Scheduled programs: starts and waits, messages, chunks and joins; each promise broken once, with the exact error."""

from __future__ import annotations

import pytest
from verified_programs import complaint

from autopar.errors import TextError
from autopar.ir.program import Program

SCHEDULED = """\
program scheduled on dp=2 at dp=0
stream dp
  a : f32[8 4] = input
  b : f32[6] = input
  c : f32[4 4] = input
  d : f32[8 4] = input
  e : f32[3 4] = input
forward:
  a_dp_start : f32[8 4] = start all_reduce(a, dp) on dp in dp_0
  b_dp_start : f32[6] = start all_reduce(b, dp) on dp in dp_0
  c_dp_0_start : f32[2 9] = start all_gather(c, 1, dp, sizes=[4, 4]) on dp in dp_1 from 0 to 9
  c_dp_1_start : f32[2 7] = start all_gather(c, 1, dp, sizes=[4, 4]) on dp in dp_1 from 9 to 16
  d_dp_0_start : f32[15] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 0 to 15
  d_dp_1_start : f32[1] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 16
  e_dp_start : f32[5 4] = start all_gather(e, 0, dp, sizes=[3, 2]) on dp
  a_dp : f32[8 4] = wait(a_dp_start)
  b_dp : f32[6] = wait(b_dp_start)
  c_dp_0 : f32[2 9] = wait(c_dp_0_start)
  c_dp_1 : f32[2 7] = wait(c_dp_1_start)
  c_dp : f32[4 8] = join_chunks([c_dp_0, c_dp_1], shape=(4, 8), dim=1)
  d_dp_1 : f32[1] = wait(d_dp_1_start)
  d_dp_0 : f32[15] = wait(d_dp_0_start)
  d_dp : f32[4 4] = join_chunks([d_dp_0, d_dp_1], shape=(4, 4))
  e_dp : f32[5 4] = wait(e_dp_start)
  y : f32[8 4] = relu(a_dp)
  return y, b_dp, c_dp, d_dp, e_dp
"""
A, B = SCHEDULED.splitlines(keepends=True)[8:10]
C0, C1 = SCHEDULED.splitlines(keepends=True)[10:12]
WAIT_A, WAIT_B = SCHEDULED.splitlines(keepends=True)[15:17]
OUT_OF_MESSAGE = (
    "the message dp_0 is started in two places, or has members that differ in transfer, axis, stream or dtype: give "
    "them messages of their own"
)
SIDE_BY_SIDE = (
    "the members of the message dp_0 are waited for side by side, in the order in which they start: a_dp_start, "
    "b_dp_start"
)
FOLLOW = (
    "the chunks that are joined do not follow each other from element 0 to 16: list each chunk of the transfer once, "
    "in the order of its elements"
)
ONE_TRANSFER = "only chunks of one transfer, which were waited for, are joined"
ALONE = "start it whole, in a message of its own"

# what is broken → what is replaced, by what, the value at fault, and why
BROKEN = {
    "a dropped wait": (
        "  e_dp : f32[5 4] = wait(e_dp_start)\n", "  e_dp : f32[3 4] = relu(e)\n", "e_dp_start",
        "e_dp_start is started and never waited for: insert wait(e_dp_start)",
    ),
    "a value read before its wait": (
        "relu(a_dp)", "relu(a_dp_start)", "y", "a_dp_start is only started here: read wait(a_dp_start)",
    ),
    "a wait before the start": (
        WAIT_A, "", "y", None,
    ),
    "one member waited for": (
        WAIT_B + "  c_dp_0 :", "  b_dp : f32[6] = relu(b)\n  c_dp_0 :", "b_dp_start",
        "b_dp_start is started and never waited for: insert wait(b_dp_start)",
    ),
    "members not side by side": (A + B, A + "  r : f32[6] = relu(b)\n" + B, "b_dp_start", OUT_OF_MESSAGE),
    "waits not side by side": (
        WAIT_A + WAIT_B, WAIT_A + "  r : f32[6] = relu(b)\n" + WAIT_B, "b_dp", SIDE_BY_SIDE,
    ),
    "waits in another order": (WAIT_A + WAIT_B, WAIT_B + WAIT_A, "b_dp", SIDE_BY_SIDE),
    "members of two kinds": (
        B, B.replace("all_reduce(b, dp)", "all_reduce(b, dp, op=max)"), "b_dp_start", OUT_OF_MESSAGE,
    ),
    "a member with uneven pieces": (
        "sizes=[3, 2]) on dp\n", "sizes=[3, 2]) on dp in dp_2\n", "e_dp_start",
        f"its pieces have unequal sizes, [3, 2]: {ALONE}",
    ),
    "a chunk of uneven pieces": (
        "f32[5 4] = start all_gather(e, 0, dp, sizes=[3, 2]) on dp\n",
        "f32[2 5] = start all_gather(e, 0, dp, sizes=[3, 2]) on dp from 0 to 5\n", "e_dp_start",
        f"its pieces have unequal sizes, [3, 2]: {ALONE}",
    ),
    "a message of what is not started": (
        "relu(a_dp)\n", "relu(a_dp) on dp in dp_3\n", "y", "only a collective that is started is part of a message",
    ),
    "a chunk of nothing": (
        "f32[1] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 16",
        "f32[0] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 15", "d_dp_1_start",
        "a chunk is a range of the elements from 0 to 16, which d sends",
    ),
    "a chunk behind the end": (
        "f32[1] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 16",
        "f32[2] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 17", "d_dp_1_start",
        "a chunk is a range of the elements from 0 to 16, which d sends",
    ),
    "a chunk of another size": (
        "c_dp_1_start : f32[2 7]", "c_dp_1_start : f32[7 2]", "c_dp_1_start",
        "its result is the 7 elements of each rank that it sends",
    ),
    "a dtype that changes": (
        "e_dp : f32[5 4] = wait", "e_dp : f64[5 4] = wait", "e_dp",
        "only cast converts: its result is of the dtype f32",
    ),
    "a chunk is missing": ("[d_dp_0, d_dp_1]", "[d_dp_0]", "d_dp", FOLLOW),
    "the first chunk is missing": ("[d_dp_0, d_dp_1]", "[d_dp_1]", "d_dp", FOLLOW),
    "a chunk is doubled": ("[d_dp_0, d_dp_1]", "[d_dp_0, d_dp_1, d_dp_1]", "d_dp", FOLLOW),
    "chunks out of order": ("[d_dp_0, d_dp_1]", "[d_dp_1, d_dp_0]", "d_dp", FOLLOW),
    "chunks overlap": (
        "d_dp_1_start : f32[1] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 15 to 16",
        "d_dp_1_start : f32[1] = start reduce_scatter(d, 0, dp, sizes=[4, 4]) on dp from 14 to 15", "d_dp", FOLLOW,
    ),
    "nothing is joined": ("[d_dp_0, d_dp_1]", "[]", "d_dp", ONE_TRANSFER),
    "a whole transfer is joined": ("[d_dp_0, d_dp_1]", "[b_dp]", "d_dp", ONE_TRANSFER),
    "a computed value is joined": ("[d_dp_0, d_dp_1]", "[d_dp_0, b]", "d_dp", ONE_TRANSFER),
    "chunks of two transfers are joined": ("[d_dp_0, d_dp_1]", "[d_dp_0, c_dp_1]", "d_dp", ONE_TRANSFER),
    "chunks of two reductions are joined": (
        "[4, 4]) on dp from 15 to 16", "[4, 4], op=max) on dp from 15 to 16", "d_dp", ONE_TRANSFER,
    ),
    "joined to another shape": (
        "d_dp : f32[4 4] = join_chunks([d_dp_0, d_dp_1], shape=(4, 4))",
        "d_dp : f32[2 8] = join_chunks([d_dp_0, d_dp_1], shape=(2, 8))", "d_dp",
        "its result is that of the whole transfer, f32[4 4]",
    ),
    "a gather that is joined as a reduction": (
        "shape=(4, 8), dim=1", "shape=(4, 8)", "c_dp", "the chunks of this transfer are joined with dim=1",
    ),
    "a gather that is joined along another dim": (
        "shape=(4, 8), dim=1", "shape=(4, 8), dim=0", "c_dp", "the chunks of this transfer are joined with dim=1",
    ),
    "a reduction that is joined as a gather": (
        "shape=(4, 4))", "shape=(4, 4), dim=0)", "d_dp", "the chunks of this transfer are joined with dim=None",
    ),
}  # fmt: skip


def test_the_program_itself() -> None:
    program = Program.parse(SCHEDULED)
    program.verify()
    assert str(program) == SCHEDULED


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    old, new, at, why = BROKEN[name]
    assert SCHEDULED.count(old) == 1
    if why is None:
        with pytest.raises(TextError, match="a_dp is read before it is made"):
            Program.parse(SCHEDULED.replace(old, new))
        return
    text = complaint(SCHEDULED.replace(old, new), "schedule")
    assert text.startswith(f"schedule left {at} inconsistent\n") and text.endswith(f"\n  {why}"), text
    assert f"    {at} : " in text, "the line is quoted"


KINDS = {
    "an exchange": (
        "  v : f32[2 2] = start redistribute(x, ((tp,), (dp,)), axis=(dp, tp), shape=(4, 4), source=((dp,), (tp,)))",
        f"only an all-reduce, a reduce-scatter and a gather share a message or are cut: {ALONE}",
    ),
    "an all-to-all": (
        "  v : f32[1 4] = start all_to_all(x, 1, 0, dp, sizes=[2, 2], new_sizes=[1, 1])",
        f"only an all-reduce, a reduce-scatter and a gather share a message or are cut: {ALONE}",
    ),
    "a product of complex numbers": (
        "  v : c64[2 2] = start all_reduce(x, dp, op=prod)",
        f"no backend reduces prod of c64[2 2], which each rank gathers: {ALONE}",
    ),
}


@pytest.mark.parametrize("issued", [" in m", " from 0 to 1"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_started_whole_and_alone(name: str, issued: str) -> None:
    line, why = KINDS[name]
    dtype = "c64" if "c64" in line else "f32"
    head = f"program scheduled on dp=2 tp=2 at dp=0 tp=0\nstream s\n  x : {dtype}[2 2] = input\nforward:\n"
    tail = f"  w : {line[6:].split(' = ')[0]} = wait(v)\n  return w\n"
    Program.parse(f"{head}{line} on s\n{tail}").verify()
    assert complaint(f"{head}{line} on s{issued}\n{tail}").endswith(why)


def test_local_programs_have_no_chunks() -> None:
    """Nor messages, nor joins."""
    local = SCHEDULED.replace("program scheduled", "program local").replace("stream dp\n", "")
    text = complaint(local)
    assert "a local program has no streams; only a scheduled one starts and waits" in text
