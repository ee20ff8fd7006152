"""The deadlock verifier on schedules by name: which channels they finish on, and the cycle where they do not."""

from __future__ import annotations

import itertools

import pytest
from channel_programs import MODELS, Tasks, finishing, reason

from autopar.examples.function_calls import function_calls
from autopar.verify.channels import ASYNCHRONOUS, BLOCKING, GROUPED, Collective, Group, Receive, Send, buffered, check


def test_crossing_sends_finish_with_room_or_in_a_group() -> None:
    crossing: Tasks = {0: [Send("x", 1), Receive("y", 1)], 1: [Send("y", 0), Receive("x", 0)]}
    assert finishing(crossing) == ["asynchronous", "2-buffered", "1-buffered"]
    assert reason(crossing, [BLOCKING]) == (
        "ranks wait for each other forever on blocking channels (both ends of a message wait for each other, and a "
        "rank does one after the other):\n"
        "  rank 0 waits for rank 1 in send x to 1\n"
        "  rank 1 waits for rank 0 in send y to 0\n"
        "put the messages of all ranks into one order, or group those that cross and post groups together"
    )
    grouped = {rank: [Group(tuple(own))] for rank, own in crossing.items()}
    assert finishing(grouped) == ["asynchronous", "2-buffered", "1-buffered", "grouped"]
    assert (
        "on grouped, 1-buffered, asynchronous channels they finish; put the messages of all ranks into one order"
        in reason(grouped)
    )
    turned = {**crossing, 1: crossing[1][::-1]}
    assert len(finishing(turned)) == len(MODELS)


def test_receives_first_finish_only_in_a_group() -> None:
    tasks: Tasks = {0: [Receive("y", 1), Send("x", 1)], 1: [Receive("x", 0), Send("y", 0)]}
    assert reason(tasks) == (
        "ranks wait for each other forever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in receive y from 1\n"
        "  rank 1 waits for rank 0 in receive x from 0\n"
        "send earlier what another rank waits for"
    )
    assert finishing({rank: [Group(tuple(own))] for rank, own in tasks.items()}) == [m.name for m in MODELS[:-1]]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_k_messages_fit_and_one_more_does_not(k: int) -> None:
    def full(n: int) -> Tasks:
        """Both ranks send n messages before they receive any."""
        return {
            me: [Send(f"v{i}", 1 - me) for i in range(n)] + [Receive(f"v{i}", 1 - me) for i in range(n)]
            for me in (0, 1)
        }

    check(full(k), [buffered(k)])
    assert reason(full(k + 1), [buffered(k), ASYNCHRONOUS]) == (
        f"ranks wait for each other forever on {k}-buffered channels (a send waits while {k} before it are "
        f"unreceived):\n"
        f"  rank 0 waits for rank 1 in send v{k} to 1\n"
        f"  rank 1 waits for rank 0 in send v{k} to 0\n"
        f"on asynchronous channels they finish; receive earlier, or make room for more than {k}"
    )
    check(full(k + 1), [buffered(k + 1)])
    with pytest.raises(
        ValueError, match=r"buffered\(0\) holds no message; without buffers channels are GROUPED or BLOCKING"
    ):
        buffered(0)


def test_room_is_of_an_ordered_pair() -> None:
    """Messages to another rank, and back, take no room of this pair's."""
    tasks: Tasks = {
        0: [Send("a", 1), Send("b", 2), Receive("c", 1), Receive("d", 2)],
        1: [Send("c", 0), Receive("a", 0)],
        2: [Send("d", 0), Receive("b", 0)],
    }
    check(tasks, [buffered(1)])


def test_a_ring_of_three_is_named_from_its_lowest_rank() -> None:
    ring: Tasks = {
        0: [],
        **{me: [Send(f"to{me % 3 + 1}", me % 3 + 1), Receive(f"to{me}", (me - 2) % 3 + 1)] for me in (3, 2, 1)},
    }
    assert reason(ring, [GROUPED]).splitlines()[1:] == [
        "  rank 1 waits for rank 2 in send to2 to 2",
        "  rank 2 waits for rank 3 in send to3 to 3",
        "  rank 3 waits for rank 1 in send to1 to 1",
        "put messages that cross into one group, on each rank",
    ]
    assert finishing(ring) == ["asynchronous", "2-buffered", "1-buffered"]
    check({**ring, 3: ring[3][::-1]}, MODELS)  # one rank that receives first is enough


def test_who_only_waits_for_the_cycle_is_not_in_it() -> None:
    tasks: Tasks = {
        0: [Receive("late", 1)],
        1: [Receive("y", 2), Send("x", 2), Send("late", 0)],
        2: [Receive("x", 1), Send("y", 1)],
    }
    assert "rank 0" not in reason(tasks) and "rank 2 waits for rank 1 in receive x from 1" in reason(tasks)


def test_of_a_group_the_first_message_that_waits_is_named() -> None:
    """Rank 0's first two are done, and its group waits for the third; the others are not its fault."""
    tasks: Tasks = {
        0: [Group((Send("a", 1), Receive("b", 1), Send("c", 1), Send("d", 1), Send("e", 1)))],
        1: [
            Group((Receive("a", 0), Send("b", 0))),
            Send("z", 2),
            Group((Receive("c", 0), Receive("d", 0), Receive("e", 0))),
        ],
        2: [Collective("w", "all_reduce", (0, 2)), Receive("z", 1)],
    }
    tasks[0].append(Collective("w", "all_reduce", (0, 2)))
    assert reason(tasks, [GROUPED]).splitlines()[1:] == [
        "  rank 0 waits for rank 1 in send c to 1",
        "  rank 1 waits for rank 2 in send z to 2",
        "  rank 2 waits for rank 0 in w = all_reduce of ranks 0 2",
        "put messages that cross into one group, on each rank",
    ]
    assert finishing(tasks) == ["asynchronous", "2-buffered", "1-buffered"]


def test_collectives_of_crossing_groups() -> None:
    def reduce(value: str, *ranks: int) -> Collective:
        return Collective(value, "all_reduce", ranks)

    a, b, c = reduce("a", 0, 1), reduce("b", 0, 2), reduce("c", 1, 2)
    assert reason({0: [a, b], 1: [c, a], 2: [b, c]}) == (
        "ranks wait for each other forever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in a = all_reduce of ranks 0 1\n"
        "  rank 1 waits for rank 2 in c = all_reduce of ranks 1 2\n"
        "  rank 2 waits for rank 0 in b = all_reduce of ranks 0 2\n"
        "put the collectives of all groups into one order"
    )
    check({0: [a, b], 1: [a, c], 2: [b, c]})
    check({0: [a, b], 1: [c, a], 2: [b, c]}, channels=())  # of each group the order is right


# -- cost ------------------------------------------------------------------------------------------------------------


def test_it_is_linear_in_the_tasks() -> None:
    def work(n: int) -> int:
        """Function calls for a column of n ranks that hand 20 values on: most wait for their turn again and again."""
        tasks: Tasks = {rank: [] for rank in range(n)}
        for value, rank in itertools.product("abcdefghijklmnopqrst", range(n - 1)):
            tasks[rank].append(Send(value, rank + 1))
            tasks[rank + 1].append(Receive(value, rank))
        return function_calls(lambda: check(tasks, MODELS), builtins=True)

    assert 6 * work(20) < work(160) < 10 * work(20)


def test_strictness_orders_the_models() -> None:
    for loose, strict in itertools.combinations(MODELS, 2):
        assert loose.looser(strict) and not strict.looser(loose)
