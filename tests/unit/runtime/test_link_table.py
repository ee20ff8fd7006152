"""The shared table of an emulated wire, against a list of all transfers that is kept without slots."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.wire import link_table
from autopar.runtime.wire.link_table import SIZE, LinkTable, key_of


@dataclass
class Clock:
    """A clock that stands still until it is set."""

    time: float = 0.0

    def __call__(self) -> float:
        return self.time


@dataclass
class Listed:
    """One transfer, as a test keeps it."""

    key: int
    members: tuple[int, ...]
    price: float
    issued: dict[int, float] = field(default_factory=dict)
    begin: float | None = None


def table(clock: Clock) -> LinkTable:
    return LinkTable(bytearray(SIZE), contextlib.nullcontext, clock)


def links(members: tuple[int, ...]) -> list[int]:
    return [key_of("link", member) for member in members]


@pytest.mark.simulated
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_transfers_begin_in_the_order_in_which_they_get_ready(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    groups = data.draw(
        st.lists(st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda group: tuple(sorted(group))), max_size=8)
    )
    listed = [Listed(key_of("t", k), group, data.draw(st.integers(0, 5)) * 1.0) for k, group in enumerate(groups)]
    issues = data.draw(st.permutations([(one, member) for one in listed for member in one.members]))
    clock = Clock()
    wire = table(clock)
    free = dict.fromkeys(range(ranks), 0.0)
    for one, member in issues:
        clock.time += data.draw(st.integers(0, 3))
        assert wire.issue(one.key, len(one.members), links(one.members), one.price)
        one.issued[member] = clock.time
        if len(one.issued) < len(one.members):
            assert wire.times(one.key, len(one.members)) is None
            continue
        one.begin = max([max(one.issued.values()), *(free[member] for member in one.members)])
        free.update(dict.fromkeys(one.members, one.begin + one.price))
    for one in listed:
        for _ in one.members:
            assert wire.times(one.key, len(one.members)) == (one.begin, one.begin + one.price)
        assert wire.times(one.key, len(one.members)) is None  # the slot is free again
    for a, b in itertools.combinations(listed, 2):  # no link carries two at once
        if set(a.members) & set(b.members) and a.price and b.price:
            assert a.begin + a.price <= b.begin or b.begin + b.price <= a.begin


def test_the_largest_price_of_the_members_counts() -> None:
    wire = table(Clock(1.0))
    wire.issue(7, 2, links((0, 1)), 2.0)
    wire.issue(7, 2, links((0, 1)), 5.0)
    assert wire.times(7, 2) == (1.0, 6.0)


def test_a_member_may_say_when_it_issued() -> None:
    """A receive from any rank knows its transfer only when the message is there."""
    clock = Clock(1.0)
    wire = table(clock)
    wire.issue(7, 2, links((0, 1)), 2.0)
    clock.time = 9.0
    wire.issue(7, 2, links((0, 1)), 2.0, at=3.0)
    assert wire.times(7, 2) == (3.0, 5.0)


def test_transfers_on_other_links_do_not_wait() -> None:
    wire = table(Clock())
    wire.issue(1, 1, [10], 5.0)
    wire.issue(2, 1, [20], 5.0)
    wire.issue(3, 1, [10], 5.0)
    assert [wire.times(key, 1) for key in (1, 2, 3)] == [(0.0, 5.0), (0.0, 5.0), (5.0, 10.0)]


def test_slots_are_used_again() -> None:
    with mock.patch.object(link_table, "WINDOW", 2):
        wire = table(Clock())
        first = 5
        same = [first + k * (link_table.TRANSFERS - 2) for k in range(4)]  # in the same two slots
        assert [wire.issue(key, 1, [1], 1.0) for key in same] == [True, True, False, False]
        assert wire.times(same[0], 1) == (0.0, 1.0)
        assert wire.issue(same[2], 1, [1], 1.0)
        assert wire.times(same[1], 1) == (1.0, 2.0)
        assert wire.times(same[2], 1) == (2.0, 3.0)
        assert wire.times(same[3], 1) is None


def test_links_that_are_free_give_their_slots_away() -> None:
    with mock.patch.object(link_table, "WINDOW", 2):
        clock = Clock()
        wire = table(clock)
        same = [3 + k * (link_table.LINKS - 2) for k in range(3)]
        wire.issue(1, 1, same[:1], 5.0)
        wire.issue(2, 1, same[1:2], 9.0)
        with pytest.raises(RuntimeError, match=r"more than 8192 links in use at once; use fewer process groups, or"):
            wire.issue(3, 1, same[2:], 1.0)
        clock.time = 6.0
        wire.issue(4, 1, same[2:], 1.0)
        wire.issue(5, 1, same[1:2], 1.0)
        assert wire.times(4, 1) == (6.0, 7.0)
        assert wire.times(5, 1) == (9.0, 10.0)


def test_processes_share_a_buffer() -> None:
    buffer, clock = bytearray(SIZE), Clock(2.0)
    one, other = (LinkTable(buffer, contextlib.nullcontext, clock) for _ in range(2))
    one.issue(7, 2, links((0, 1)), 1.0)
    other.issue(7, 2, links((0, 1)), 1.0)
    assert one.times(7, 2) == other.times(7, 2) == (2.0, 3.0)


def test_keys_are_the_same_in_all_processes() -> None:
    assert key_of("collective", "0", 3) == 4000225276013680010
    assert len({key_of("message", "0", 0, 1, 0, number) for number in range(1000)} - {0}) == 1000
