"""Messages between ranks: posted, launched and waited for as calls of their own, on a group, with a tag."""

from __future__ import annotations

import messages_on_ranks
from processes import ranks


def test_receives_are_posted_before_and_waited_for_after() -> None:
    assert ranks(2).run(messages_on_ranks.both_ways, 3) == [[10.0, 11, 12] * 3, [0.0, 1, 2] * 3]


def test_tags_match_in_any_order_and_one_tag_in_its_own() -> None:
    found = [10.0 * k + again for k in reversed(range(8)) for again in (0, 1)]
    assert ranks(2).run(messages_on_ranks.tags_in_any_order) == [[], found]


def test_groups_of_the_same_ranks_have_their_own_tags() -> None:
    assert ranks(2).run(messages_on_ranks.groups_have_their_own_tags) == [[], [2.0, 0, 1]]


def test_memory_lives_until_the_wait_and_no_longer() -> None:
    assert ranks(2).run(messages_on_ranks.nothing_is_kept, 20) == [(40, 0)] * 2


def test_a_handle_is_waited_for_once() -> None:
    ranks(2).run(messages_on_ranks.once_only)


def test_sizes_that_differ_are_not_noticed_by_gloo() -> None:
    assert ranks(2).run(messages_on_ranks.a_short_message_leaves_a_tail) == [[], [1.0, 1, 9, 9]]


def test_a_wait_that_fails_lets_go_of_its_messages() -> None:
    ranks(2).run(messages_on_ranks.a_failed_wait_lets_go)
