"""Collectives that two processes time together."""

from __future__ import annotations

import measured_exchanges
from processes import ranks

from autopar.runtime.measuring.ready import SMALL


def test_each_kind_of_collective_is_timed_on_all_ranks_alike() -> None:
    first, second = ranks(2).run(measured_exchanges.profiled)
    assert first == second, "the slowest rank counts, on all ranks"
    rows = {row.call.partition("(")[0]: row for row in first.rows.values() if row.kind == "exchange"}
    assert rows.keys() == {function.__name__ for function in SMALL}
    assert all(0 < row.startup <= row.seconds and not row.why for row in first.rows.values() if row.kind == "exchange")
    assert all(row.seconds > 0 and row.startup == 0 for row in first.rows.values() if row.kind == "op")
    assert (first.ranks, first.backend) == (2, "gloo")
    assert first.startup("all_reduce", "dp") == max(
        row.startup for row in first.rows.values() if row.group == "all_reduce over dp"
    )


def test_ranks_agree_on_the_number_of_calls() -> None:
    fast, slow = ranks(2).run(measured_exchanges.calls_agreed, [0.01, 0.1])
    assert fast == slow == [1, 10]


def test_all_ranks_get_the_same_interference() -> None:
    first, second = ranks(2).run(measured_exchanges.interference)
    assert first == second >= 0
