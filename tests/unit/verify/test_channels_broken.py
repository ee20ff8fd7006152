"""Tasks that do not fit together, and what the deadlock verifier says of them."""

from __future__ import annotations

import pytest
from channel_programs import Tasks, reason

from autopar.errors import AutoparError, ChannelError
from autopar.verify.channels import Collective, Receive, Send, check

AB = [Collective(value, "all_reduce", (0, 1, 2)) for value in "ab"]
XY: Tasks = {0: [Send("x", 1, 8), Send("y", 1, 8)], 1: [Receive("x", 0, 8), Receive("y", 0, 8)]}
MISFITS: dict[str, tuple[Tasks, str]] = {
    "swapped": (
        {0: AB, 1: AB[::-1], 2: AB},
        "collective 1 of ranks 0 1 2 is not the same on both:\n"
        "  rank 0: a = all_reduce of ranks 0 1 2\n"
        "  rank 1: b = all_reduce of ranks 0 1 2\n"
        "give both ranks the same order",
    ),
    "another op": (
        {0: AB, 1: AB, 2: [AB[0], Collective("b", "all_gather", (0, 1, 2))]},
        "collective 2 of ranks 0 1 2 is not the same on both:\n"
        "  rank 0: b = all_reduce of ranks 0 1 2\n"
        "  rank 2: b = all_gather of ranks 0 1 2\n"
        "rank 0 does b = all_reduce once, rank 2 never; rank 0 does b = all_gather never, rank 2 once; let both do it "
        "as often",
    ),
    "a member is missing": (
        {0: AB, 1: AB},
        "collective 1 of ranks 0 1 2 is not the same on both:\n"
        "  rank 0: a = all_reduce of ranks 0 1 2\n"
        "  rank 2: none at all\n"
        "rank 0 does a = all_reduce once, rank 2 never; let both do it as often",
    ),
    "a collective twice": (
        {0: AB, 1: [AB[0], *AB], 2: AB},
        "collective 2 of ranks 0 1 2 is not the same on both:\n"
        "  rank 0: b = all_reduce of ranks 0 1 2\n"
        "  rank 1: a = all_reduce of ranks 0 1 2\n"
        "rank 0 does a = all_reduce once, rank 1 twice; let both do it as often",
    ),
    "not a member": (
        {0: AB, 1: AB, 2: AB, 3: AB},
        "rank 3 runs a collective of a group it is not in:\n  rank 3: a = all_reduce of ranks 0 1 2\nremove it from "
        "this rank",
    ),
    "a member twice": ({0: [Collective("a", "all_reduce", (0, 0))]}, "ranks 0 0 are no group: a rank is given twice"),
    "received in another order": (
        {**XY, 1: XY[1][::-1]},
        "message 1 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: send x to 1\n"
        "  rank 1: receive y from 0\n"
        "give both ranks the same order",
    ),
    "another value": (
        {**XY, 1: [XY[1][0], Receive("z", 0)]},
        "message 2 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: send y to 1\n"
        "  rank 1: receive z from 0\n"
        "rank 0 does y once, rank 1 never; rank 0 does z never, rank 1 once; let both do it as often",
    ),
    "never received": (
        {**XY, 1: XY[1][1:]},
        "message 1 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: send x to 1\n"
        "  rank 1: receive y from 0\n"
        "rank 0 does x once, rank 1 never; let both do it as often",
    ),
    "never sent": (
        {**XY, 0: XY[0][:1]},
        "message 2 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: no more\n"
        "  rank 1: receive y from 0\n"
        "rank 0 does y never, rank 1 once; let both do it as often",
    ),
    "sent three times": (
        {**XY, 0: [XY[0][0], XY[0][0], *XY[0]]},
        "message 2 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: send x to 1\n"
        "  rank 1: receive y from 0\n"
        "rank 0 does x 3 times, rank 1 once; let both do it as often",
    ),
    "to nobody": (
        {0: [Send("x", 7)]},
        "message 1 from rank 0 to rank 7 is not the same on both:\n"
        "  rank 0: send x to 7\n"
        "  rank 7: none at all\n"
        "rank 0 does x once, rank 7 never; let both do it as often",
    ),
    "to itself": (
        {0: [Send("x", 0), Receive("x", 0)]},
        "a rank exchanges a message with itself:\n  rank 0: send x to 0\nuse the value without one",
    ),
    "other sizes": (
        {**XY, 1: [XY[1][0], Receive("y", 0, 4)]},
        "a message has 8 bytes where it is sent and 4 where it is received:\n"
        "  rank 0: send y to 1\n"
        "  rank 1: receive y from 0\n"
        "give both ends the same shape and dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_told(kind: str) -> None:
    tasks, text = MISFITS[kind]
    assert reason(tasks) == reason(tasks, ()) == text
    assert issubclass(ChannelError, AutoparError) and issubclass(ChannelError, RuntimeError)


def test_bytes_are_compared_where_both_are_given() -> None:
    check({0: [Send("x", 1)], 1: [Receive("x", 0, 4)]})
    assert "0 bytes" in reason({0: [Send("x", 1, 0)], 1: [Receive("x", 0, 4)]})


def test_large_groups_are_shortened() -> None:
    ranks = tuple(range(64))
    assert str(Collective("a", "all_reduce", ranks)) == "a = all_reduce of ranks 0 1 … 63 (64 in all)"
    assert str(Collective("a", "all_reduce", ranks[:8])) == "a = all_reduce of ranks 0 1 2 3 4 5 6 7"
