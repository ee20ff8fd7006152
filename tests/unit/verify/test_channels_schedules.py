"""Scheduled programs of several ranks: one that starts in another order, other messages or other chunks is refused."""

from __future__ import annotations

import pytest
from channel_programs import swapped

from autopar.errors import ChannelError
from autopar.ir.program import Program
from autopar.verify.channels.programs import check_programs, tasks_of

SCHEDULED = """\
program scheduled on dp=2 at dp={}
stream dp
stream late
  a : f32[8] = input
  b : f32[8] = input
  c : f32[8] = input
forward:
  a_dp_start : f32[8] = start all_reduce(a, dp) on dp
  b_dp_start : f32[8] = start all_reduce(b, dp) on dp
  c_dp_0_start : f32[5] = start all_reduce(c, dp) on late from 0 to 5
  c_dp_1_start : f32[3] = start all_reduce(c, dp) on late from 5 to 8
  a_dp : f32[8] = wait(a_dp_start)
  b_dp : f32[8] = wait(b_dp_start)
  c_dp_0 : f32[5] = wait(c_dp_0_start)
  c_dp_1 : f32[3] = wait(c_dp_1_start)
  c_dp : f32[8] = join_chunks([c_dp_0, c_dp_1], shape=(8,))
  return a_dp, b_dp, c_dp
"""
IN_ONE = SCHEDULED.replace("all_reduce(a, dp) on dp", "all_reduce(a, dp) on dp in dp_0").replace(
    "all_reduce(b, dp) on dp", "all_reduce(b, dp) on dp in dp_0"
)


def programs(first: str, second: str) -> dict[int, Program]:
    """Of two ranks, each of them right by itself."""
    made = {rank: Program.parse(text.format(rank)) for rank, text in enumerate((first, second))}
    for program in made.values():
        program.verify()
    return made


def refusal(second: str, first: str = SCHEDULED) -> str:
    with pytest.raises(ChannelError) as found:
        check_programs(programs(first, second))
    return str(found.value)


@pytest.mark.parametrize("text", [SCHEDULED, IN_ONE])
def test_equal_orders_finish(text: str) -> None:
    check_programs(programs(text, text))


def test_waits_may_differ() -> None:
    """Ranks meet where they start; each waits when it likes."""
    check_programs(programs(SCHEDULED, swapped(SCHEDULED, "a_dp", "c_dp_1")))


def test_crossed_streams_are_refused() -> None:
    """Each stream has its own order, but a device may run the collective of one only, and then both would wait."""
    text = refusal(swapped(swapped(SCHEDULED, "a_dp_start", "c_dp_0_start"), "b_dp_start", "c_dp_1_start"))
    assert text.startswith("ranks wait for each other forever on asynchronous channels")
    assert text.endswith("put the collectives of all groups into one order")


def test_a_start_is_swapped_on_one_rank() -> None:
    assert refusal(swapped(SCHEDULED, "a_dp_start", "b_dp_start")) == (
        "collective 1 of ranks 0 1 is not the same on both:\n"
        "  rank 0: a_dp_start = all_reduce of ranks 0 1\n"
        "      a_dp_start : f32[8] = start all_reduce(a, dp) on dp\n"
        "  rank 1: b_dp_start = all_reduce of ranks 0 1\n"
        "      b_dp_start : f32[8] = start all_reduce(b, dp) on dp\n"
        "give both ranks the same order"
    )


def test_a_chunk_is_swapped_on_one_rank() -> None:
    text = refusal(swapped(SCHEDULED, "c_dp_0_start", "c_dp_1_start"))
    assert text.startswith("collective 1 of ranks 0 1 on late is not the same on both:\n")
    assert "start all_reduce(c, dp) on late from 5 to 8" in text and text.endswith("give both ranks the same order")


def test_another_span_on_one_rank() -> None:
    other = SCHEDULED.replace("f32[5]", "f32[4]").replace("to 5", "to 4")
    other = other.replace("f32[3]", "f32[4]").replace("from 5", "from 4")
    text = refusal(other)
    assert "      c_dp_0_start : f32[5] = start all_reduce(c, dp) on late from 0 to 5\n" in text
    assert "      c_dp_0_start : f32[4] = start all_reduce(c, dp) on late from 0 to 4\n" in text


def test_another_message_on_one_rank() -> None:
    """Two collectives on one rank, and one on the other: they would not even have one size."""
    text = refusal(IN_ONE)
    assert "      a_dp_start : f32[8] = start all_reduce(a, dp) on dp\n" in text
    assert "      a_dp_start : f32[8] = start all_reduce(a, dp) on dp in dp_0\n" in text


def test_another_member_on_one_rank() -> None:
    alone = SCHEDULED.replace("all_reduce(a, dp) on dp", "all_reduce(a, dp) on dp in dp_0")
    text = refusal(IN_ONE, alone)
    assert "      b_dp_start : f32[8] = start all_reduce(b, dp) on dp\n" in text
    assert "      b_dp_start : f32[8] = start all_reduce(b, dp) on dp in dp_0\n" in text


def test_a_chunk_that_one_rank_lacks() -> None:
    whole = "\n".join(line for line in SCHEDULED.splitlines() if "c_dp_" not in line) + "\n"
    whole = whole.replace("forward:\n", "forward:\n  c_dp : f32[8] = all_reduce(c, dp) on late\n")
    assert "c_dp" in refusal(whole)


def test_tasks_stand_in_the_order_of_the_lines() -> None:
    """Not phase by phase, as those of local programs."""
    text = SCHEDULED.replace("  b_dp_start", "backward:\n  b_dp_start").replace(
        "  c_dp_0_start", "forward:\n  c_dp_0_start"
    )
    names = [task.value for task in tasks_of(Program.parse(text.format(0)))]  # type: ignore[union-attr]
    assert names == ["a_dp_start", "b_dp_start", "c_dp_0_start", "c_dp_1_start"]
