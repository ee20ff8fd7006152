"""The deadlock verifier: schedules that are right by construction, broken ones, and all interleavings of small ones."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import channels, localize
from autopar.channels import (
    ALL,
    ASYNCHRONOUS,
    BLOCKING,
    GROUPED,
    Channels,
    Collective,
    Group,
    Receive,
    Send,
    Task,
    buffered,
    check,
    check_programs,
    creation_order,
    tasks_of,
)
from autopar.errors import AutoparError, ChannelError
from autopar.localize import LocalPrograms
from autopar.mesh import Mesh
from autopar.program import Program

Tasks = dict[int, list[Task]]
MODELS = (ASYNCHRONOUS, buffered(2), buffered(1), GROUPED, BLOCKING)


def reason(tasks: Mapping[int, Sequence[Task]], models: Sequence[Channels] = ALL) -> str:
    with pytest.raises(ChannelError) as found:
        check(tasks, models)
    return str(found.value)


def passes(tasks: Mapping[int, Sequence[Task]], models: Sequence[Channels]) -> bool:
    try:
        check(tasks, models)
    except ChannelError:
        return False
    return True


def finishing(tasks: Mapping[int, Sequence[Task]]) -> list[str]:
    """The models on which the ranks finish, each asked alone."""
    return [model.name for model in MODELS if passes(tasks, [model])]


# -- schedules that are right by construction ------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 4, length: int = 12) -> Tasks:
    """One global order of collectives and messages, as each rank sees it."""
    tasks: Tasks = {rank: [] for rank in range(ranks)}
    for number in range(draw(st.integers(0, length))):
        value = draw(st.sampled_from((f"v{number}", "again")))
        members = draw(st.permutations(range(ranks)))
        if draw(st.booleans()):
            group = tuple(sorted(members[: draw(st.integers(1, ranks))]))
            op = draw(st.sampled_from(("all_reduce", "all_gather")))
            for rank in group:
                tasks[rank].append(Collective(value, op, group))
        else:
            sender, receiver = members[:2]
            tasks[sender].append(Send(value, receiver, number))
            tasks[receiver].append(Receive(value, sender, number))
    return tasks


@given(schedules(), st.randoms(use_true_random=False))
def test_a_global_order_finishes_on_all_channels(tasks: Tasks, choose: random.Random) -> None:
    check(tasks, MODELS)
    check({rank: _grouped(own, choose) for rank, own in tasks.items()}, MODELS)


def _grouped(tasks: Sequence[Task], choose: random.Random) -> list[Task]:
    """Some neighbouring messages put into one group: that only posts them earlier."""
    found: list[Task] = []
    for task in tasks:
        last = found[-1] if found else None
        if isinstance(task, Collective) or choose.random() < 0.4:
            found.append(task)
        elif isinstance(last, Group):
            found[-1] = Group((*last.tasks, task))
        else:
            found.append(Group((task,)))
    return found


def test_nothing_at_all_finishes() -> None:
    check_programs({})
    for model in MODELS:
        for tasks in ({}, {0: [], 1: []}, {0: [Group(())], 1: []}):
            check(tasks, [model])


# -- all interleavings of small schedules ----------------------------------------------------------------------------


def explored(tasks: Mapping[int, Sequence[Task]], model: Channels) -> set[bool]:
    """The ends of all interleavings: whether all ranks finished, each message received as what it was sent as.

    A state is, of each rank, its step and what of that is not done; and, of each pair, the messages on their way.
    """
    steps: dict[int, list[tuple]] = {rank: [] for rank in tasks}
    for rank, own in tasks.items():
        for task in own:
            inner = task.tasks if isinstance(task, Group) else (task,)
            steps[rank] += [inner] if model.together else [(one,) for one in inner]
        steps[rank] = [step for step in steps[rank] if step]
    room = 10**9 if model.capacity is None else model.capacity
    ranks = sorted(tasks)
    start = (tuple((0, tuple(steps[r][0]) if steps[r] else ()) for r in ranks), ())
    ends, seen, todo = set(), {start}, [start]

    def without(at: dict, rank: int, task: Task) -> None:
        step, left = at[rank]
        place = left.index(task)
        left = (*left[:place], *left[place + 1 :])
        if not left and (step := step + 1) < len(steps[rank]):
            left = steps[rank][step]
        at[rank] = step, left

    def heads(left: Sequence[Task]) -> list[Task]:
        """The first open send to each rank, the first open receive from each, and a collective."""
        keys = [(type(t), getattr(t, "to", None), getattr(t, "source", None)) for t in left]
        return [t for place, t in enumerate(left) if keys.index(keys[place]) == place]

    while todo:
        state = todo.pop()
        at, queues = dict(zip(ranks, state[0], strict=True)), dict(state[1])
        following = []
        for rank in ranks:
            for task in heads(at[rank][1]):
                new, on_way = dict(at), dict(queues)
                if isinstance(task, Collective):
                    if all(m in at and task in at[m][1] for m in task.ranks) and len(set(task.ranks)) == len(task.ranks):
                        for member in task.ranks:
                            without(new, member, task)
                        following.append((new, on_way))
                elif isinstance(task, Send):
                    queue = queues.get((rank, task.to), ())
                    if len(queue) < room:
                        on_way[rank, task.to] = (*queue, (task.value, task.bytes))
                        without(new, rank, task)
                        following.append((new, on_way))
                    elif room == 0 and task.to in at and task.to != rank:
                        for other in heads(at[task.to][1]):
                            if isinstance(other, Receive) and other.source == rank:
                                if (other.value, other.bytes) != (task.value, task.bytes):
                                    return {False}
                                without(new, rank, task), without(new, task.to, other)
                                following.append((new, on_way))
                elif queue := queues.get((task.source, rank), ()):
                    if queue[0] != (task.value, task.bytes):
                        return {False}
                    on_way[task.source, rank] = queue[1:]
                    without(new, rank, task)
                    following.append((new, on_way))
        if not following:
            ends.add(not any(left for _, left in at.values()) and not any(queues.values()))
        for new, on_way in following:
            state = tuple(new[r] for r in ranks), tuple(sorted((pair, q) for pair, q in on_way.items() if q))
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return ends


_peers = st.sampled_from(((0, 1), (1, 0), (0, 2), (2, 1)))


@st.composite
def disordered(draw: st.DrawFn) -> Tasks:
    """Both ends of every task, in an order of its own on each rank, sometimes with a fault; small."""
    ends: dict[int, list[tuple[float, Task]]] = {0: [], 1: [], 2: []}
    unsure = draw(st.floats(0, 3))
    for number in range(draw(st.integers(1, 5))):
        value = f"v{draw(st.integers(0, number))}"

        def put(rank: int, task: Task, place: int = number) -> None:
            ends[rank].append((place + unsure * draw(st.floats(0, 1)), task))

        if draw(st.integers(0, 3)) == 0:
            group = draw(st.sampled_from(((0, 1), (1, 2), (0, 2), (0, 1, 2))))
            for rank in group:
                put(rank, Collective(value, "all_reduce", group))
        else:
            sender, receiver = draw(_peers)
            put(sender, Send(value, receiver, 1)), put(receiver, Receive(value, sender, 1))
    tasks = {rank: [task for _, task in sorted(own, key=lambda pair: pair[0])] for rank, own in ends.items()}
    if draw(st.integers(0, 4)) == 0 and (rank := draw(st.integers(0, 2))) in tasks and tasks[rank]:
        place = draw(st.integers(0, len(tasks[rank]) - 1))
        tasks[rank][place : place + 1] = [tasks[rank][place]] * draw(st.sampled_from((0, 2)))
    choose = draw(st.randoms(use_true_random=False))
    return {rank: _grouped(own, choose) for rank, own in tasks.items()} if draw(st.booleans()) else tasks


def test_it_says_what_all_interleavings_say() -> None:
    verdicts: Counter[tuple[str, bool]] = Counter()

    @settings(max_examples=400)
    @given(disordered())
    def compare(tasks: Tasks) -> None:
        for model in MODELS:
            ends = explored(tasks, model)
            assert len(ends) == 1, "one run decides for all"
            (finished,) = ends
            assert passes(tasks, [model]) == finished, model.name
            verdicts[model.name, finished] += 1
        alone = finishing(tasks)
        assert passes(tasks, MODELS) == (len(alone) == len(MODELS))
        assert alone == [model.name for model in MODELS][: len(alone)], "what finishes with less room finishes with more"

    compare()
    assert all(verdicts[model.name, verdict] >= 20 for model in MODELS for verdict in (False, True)), verdicts


# -- channels that differ --------------------------------------------------------------------------------------------


def test_crossing_sends_finish_with_room_or_in_a_group() -> None:
    crossing: Tasks = {0: [Send("x", 1), Receive("y", 1)], 1: [Send("y", 0), Receive("x", 0)]}
    assert finishing(crossing) == ["asynchronous", "2-buffered", "1-buffered"]
    assert reason(crossing, [BLOCKING]) == (
        "ranks wait for each other for ever on blocking channels (both ends of a message wait for each other, and a rank does one after the other):\n"
        "  rank 0 waits for rank 1 in send x to 1\n"
        "  rank 1 waits for rank 0 in send y to 0\n"
        "put the messages of all ranks into one order, or group those that cross and post groups together"
    )
    grouped = {rank: [Group(tuple(own))] for rank, own in crossing.items()}  # type: ignore[arg-type]
    assert finishing(grouped) == ["asynchronous", "2-buffered", "1-buffered", "grouped"]
    assert "on grouped, 1-buffered, asynchronous channels they finish; put the messages of all ranks into one order" in reason(grouped)
    turned = {**crossing, 1: crossing[1][::-1]}
    assert len(finishing(turned)) == len(MODELS)


def test_receives_first_finish_only_in_a_group() -> None:
    tasks: Tasks = {0: [Receive("y", 1), Send("x", 1)], 1: [Receive("x", 0), Send("y", 0)]}
    assert reason(tasks) == (
        "ranks wait for each other for ever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in receive y from 1\n"
        "  rank 1 waits for rank 0 in receive x from 0\n"
        "send earlier what another rank waits for"
    )
    assert finishing({rank: [Group(tuple(own))] for rank, own in tasks.items()}) == [m.name for m in MODELS[:-1]]  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_k_messages_fit_and_one_more_does_not(k: int) -> None:
    def full(n: int) -> Tasks:
        """Both ranks send n messages before they receive any."""
        return {me: [Send(f"v{i}", 1 - me) for i in range(n)] + [Receive(f"v{i}", 1 - me) for i in range(n)] for me in (0, 1)}

    check(full(k), [buffered(k)])
    assert reason(full(k + 1), [buffered(k), ASYNCHRONOUS]) == (
        f"ranks wait for each other for ever on {k}-buffered channels (a send waits while {k} before it are unreceived):\n"
        f"  rank 0 waits for rank 1 in send v{k} to 1\n"
        f"  rank 1 waits for rank 0 in send v{k} to 0\n"
        f"on asynchronous channels they finish; receive earlier, or make room for more than {k}"
    )
    check(full(k + 1), [buffered(k + 1)])
    with pytest.raises(ValueError, match=r"buffered\(0\) holds no message; without buffers channels are GROUPED or BLOCKING"):
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
    ring: Tasks = {0: [], **{me: [Send(f"to{me % 3 + 1}", me % 3 + 1), Receive(f"to{me}", (me - 2) % 3 + 1)] for me in (3, 2, 1)}}
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
        1: [Group((Receive("a", 0), Send("b", 0))), Send("z", 2), Group((Receive("c", 0), Receive("d", 0), Receive("e", 0)))],
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
        "ranks wait for each other for ever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in a = all_reduce of ranks 0 1\n"
        "  rank 1 waits for rank 2 in c = all_reduce of ranks 1 2\n"
        "  rank 2 waits for rank 0 in b = all_reduce of ranks 0 2\n"
        "put the collectives of all groups into one order"
    )
    check({0: [a, b], 1: [a, c], 2: [b, c]})
    check({0: [a, b], 1: [c, a], 2: [b, c]}, channels=())  # of each group the order is right


# -- tasks that do not fit -------------------------------------------------------------------------------------------

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
        "rank 0 does b = all_reduce once, rank 2 never; rank 0 does b = all_gather never, rank 2 once; let both do it as often",
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
        "rank 3 runs a collective of a group it is not in:\n  rank 3: a = all_reduce of ranks 0 1 2\nleave it out there",
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


@given(schedules(), st.data())
def test_one_fault_is_found_on_all_channels(tasks: Tasks, data: st.DataObject) -> None:
    """A task dropped, doubled or renamed on one rank."""
    shared = {rank: [i for i, t in enumerate(own) if not (isinstance(t, Collective) and len(t.ranks) == 1)] for rank, own in tasks.items()}
    places = [(rank, i) for rank, found in shared.items() for i in found]
    if not places:
        return
    rank, i = data.draw(st.sampled_from(places))
    task = tasks[rank][i]
    renamed = {
        Collective: lambda: Collective("other", task.op, task.ranks),
        Send: lambda: Send("other", task.to),
        Receive: lambda: Receive("other", task.source),
    }[type(task)]()
    for fault in ([], [task, task], [renamed]):
        broken = {**tasks, rank: [*tasks[rank][:i], *fault, *tasks[rank][i + 1 :]]}
        for model in MODELS:
            assert not passes(broken, [model])


# -- local programs --------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden" / "localize"


def local_programs(name: str) -> dict[int, Program]:
    program = Program.parse((GOLDEN / f"{name}.txt").read_text().partition("---\n")[0])
    return dict(LocalPrograms(program, Program.verify))


def one_each(programs: Mapping[int, Program], edit: Callable[[int, str], str] = lambda rank, text: text) -> dict[int, Program]:
    """The programs read back from text, so that none shares its graph."""
    return {rank: Program.parse(edit(rank, str(program))) for rank, program in programs.items()}


def swapped(text: str, first: str, second: str) -> str:
    """The lines of two values change places."""
    lines = text.splitlines(keepends=True)
    i, j = (next(k for k, line in enumerate(lines) if line.startswith(f"  {name} :")) for name in (first, second))
    lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.txt"))])
def test_localized_programs_finish(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = local_programs(name)
    check_programs(programs)
    check({rank: tasks_of(program) for rank, program in programs.items()})
    monkeypatch.setattr(channels.programs, "_tasks", lambda *arguments: pytest.fail("equal sequences need no tasks"))
    check_programs(one_each(programs))


def test_tasks_come_phase_by_phase_in_the_order_of_the_graph() -> None:
    text = "program local on dp=2 tp=2 at dp=1 tp=0\n  x : f32[4] = input\n  d : f32[4] = tangent(0)\n"
    text += "forward:\n  a : f32[4] = all_reduce(x, tp)\nbackward:\n  b : f32[4] = all_reduce(d, dp)\nforward:\n"
    text += "  c : f32[8] = all_gather(x, 0, dp, sizes=[4, 4])\n  p : f32[4] = pend(x, tp)\n  return c\n"
    program = Program.parse(text)
    wanted = [Collective("a", "all_reduce", (2, 3)), Collective("c", "all_gather", (0, 2)), Collective("b", "all_reduce", (0, 2))]
    assert tasks_of(program) == wanted
    assert [task.ranks for task in tasks_of(program.at({"dp": 0, "tp": 1}))] == [(0, 1), (1, 3), (1, 3)]  # type: ignore[union-attr]


def test_two_collectives_swapped_on_one_rank() -> None:
    programs = local_programs("column_row_pair")
    broken = one_each(programs, lambda rank, text: swapped(text, "mm_3_dp", "view_1_dp") if rank == 2 else text)
    with pytest.raises(ChannelError) as found:
        check_programs(broken)
    assert str(found.value) == (
        "collective 1 of ranks 0 2 is not the same on both:\n"
        "  rank 0: mm_3_dp = all_reduce of ranks 0 2\n"
        "      mm_3_dp : f32[128 64] = all_reduce(mm_3, dp)\n"
        "  rank 2: view_1_dp = all_reduce of ranks 0 2\n"
        "      view_1_dp : f32[128] = all_reduce(view_1, dp)\n"
        "give both ranks the same order"
    )


def test_crossing_axes_in_programs_quote_their_lines() -> None:
    """Of each group the order is right; two ranks of four have their tp collective first."""
    programs = local_programs("column_row_pair")
    broken = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp") if rank in (0, 3) else text)
    with pytest.raises(ChannelError) as found:
        check_programs(broken)
    assert str(found.value) == (
        "ranks wait for each other for ever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in mm_2_tp = all_reduce of ranks 0 1\n"
        "      mm_2_tp : f32[16 64] = all_reduce(mm_2, tp)\n"
        "  rank 1 waits for rank 3 in view_dp = all_reduce of ranks 1 3\n"
        "      view_dp : f32[64] = all_reduce(view, dp)\n"
        "  rank 3 waits for rank 2 in mm_2_tp = all_reduce of ranks 2 3\n"
        "      mm_2_tp : f32[16 64] = all_reduce(mm_2, tp)\n"
        "  rank 2 waits for rank 0 in view_dp = all_reduce of ranks 0 2\n"
        "      view_dp : f32[64] = all_reduce(view, dp)\n"
        "put the collectives of all groups into one order"
    )
    half = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp") if rank in (0, 1) else text)
    check_programs(half)  # both ranks of one tp group: they wait for nobody who waits for them


def test_a_rank_without_a_program() -> None:
    programs = local_programs("column_row_pair")
    del programs[3]
    with pytest.raises(ChannelError, match=r"collective 1 of ranks 1 3 is not the same on both:\n(.|\n)*\n  rank 3: none at all\n"):
        check_programs(programs)


def test_programs_of_another_rank_or_level() -> None:
    programs = local_programs("column_row_pair")
    with pytest.raises(ChannelError, match=r"the program given as that of rank 0 is at {'dp': 0, 'tp': 1}, which is rank 1"):
        check_programs({**programs, 0: programs[1]})
    explicit = Program.parse((GOLDEN / "column_row_pair.txt").read_text().partition("---\n")[0])
    with pytest.raises(ChannelError, match="in the local programs of all ranks; this one is explicit"):
        check_programs({0: explicit})


STAGES = """\
program local on pp=2 dp=2 tp=2 at pp={} dp={} tp={}
stage s0 on dp=2 tp=2
stage s1 on dp=2 tp=2 ranks 4 5 6 7
  x : f32[4] = input
forward:
  joint : f32[4] = all_reduce(x, dp)
  both : f32[4] = all_reduce(joint, pp)
  return both
"""


def staged() -> dict[int, Program]:
    """Each stage reduces over its two axes at once, then the stages with each other; a graph a stage."""
    mesh, programs = Mesh(pp=2, dp=2, tp=2), {}
    for stage in (0, 1):
        program = Program.parse(STAGES.format(stage, 0, 0))
        node = program.node("joint")
        node.args, node.kwargs = (node.args[0], ("tp", "dp")), {"stage": f"s{stage}"}
        for rank in mesh.ranks[4 * stage : 4 * stage + 4]:
            programs[rank] = program.at(mesh.coordinates(rank))
    return programs


def test_joint_groups_lie_on_their_stage() -> None:
    programs = staged()
    assert tasks_of(programs[5]) == [Collective("joint", "all_reduce", (4, 6, 5, 7)), Collective("both", "all_reduce", (1, 5))]
    assert creation_order(programs.values()) == [(0, 2, 1, 3), (0, 4), (1, 5), (2, 6), (3, 7), (4, 6, 5, 7)]
    check_programs(programs)


def test_a_collective_of_a_stage_that_the_rank_is_not_on() -> None:
    programs = staged()
    line = r"rank 4 cannot take part in a collective:\n  joint : f32\[4\] = all_reduce\(.*\)\n"
    with pytest.raises(ChannelError, match=line + r"rank 4 is not on the mesh \(dp=2 tp=2\), whose ranks are 0-3"):
        check_programs({**programs, 4: programs[0].at(programs[4].coordinates)})
    for program in programs.values():
        program.node("joint").kwargs = {"stage": "s0"}
    with pytest.raises(ChannelError, match=line + "rank 4 is not on the mesh"):  # all alike, and still wrong
        check_programs(programs)
    programs[4].node("joint").kwargs = {"stage": "s9"}
    with pytest.raises(ChannelError, match=line + "there is no stage 's9'"):
        check_programs(programs)


def test_equal_sequences_on_other_meshes_are_not_alike() -> None:
    """The same lines on stages of other ranks mean other groups."""
    programs = staged()
    other = Program.parse(STAGES.format(1, 1, 1).replace("ranks 4 5 6 7", "ranks 4 5 7 6"))
    node = other.node("joint")
    node.args, node.kwargs = (node.args[0], ("tp", "dp")), {"stage": "s1"}
    with pytest.raises(ChannelError, match="collective 1 of ranks 4 6 5 7 is not the same on both"):
        check_programs({**programs, 7: other})
    turned = "program local on dp=2 ranks {} at dp=0\n  x : f32[4] = input\nforward:\n  y : f32[4] = all_reduce(x, dp)\n  return y\n"
    with pytest.raises(ChannelError, match="collective 1 of ranks 0 1 is not the same on both"):
        check_programs({0: Program.parse(turned.format("0 1")), 1: Program.parse(turned.format("1 0"))})


EXCHANGES = """program explicit on rank=3
stage a on dp=2
stage b on tp=2 ranks 1 2
  x : f32[4/dp] @a = input
  y : f32[4/tp] @b = input
forward:
  x_b : f32[4/dp] @a = send(x, b)
  x_b_b : f32[4/tp] @b = recv(x_b, b, splits=((tp,),))
  y_a : f32[4/tp] @b = send(y, a)
  y_a_a : f32[4/dp] @a = recv(y_a, a, splits=((dp,),))
  return (x_b_b, y_a_a)
"""


def test_exchanges_between_stages_are_messages() -> None:
    """Rank 1 lies on both: it sends and receives in one go."""
    programs = dict(LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify()))
    assert tasks_of(programs[0]) == [Group((Send("x_b_b", 1, 8),)), Group((Receive("y_a_a", 1, 8),))]
    assert tasks_of(programs[1]) == [Group((Receive("x_b_b", 0, 8), Send("x_b_b", 2, 8))), Group((Send("y_a_a", 0, 8), Receive("y_a_a", 2, 8)))]
    check_programs(programs)


def test_exchanges_in_another_order_on_one_rank() -> None:
    programs = dict(LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify()))
    lines = str(programs[1]).splitlines(keepends=True)
    first = next(k for k, line in enumerate(lines) if "recv" in line)
    lines[first : first + 2] = lines[first + 1], lines[first]
    broken = {**programs, 1: Program.parse("".join(lines))}
    with pytest.raises(ChannelError) as caught:
        check_programs(broken)
    assert str(caught.value) == ORDERED_OTHERWISE


ORDERED_OTHERWISE = """\
ranks wait for each other for ever on asynchronous channels (only receives wait):
  rank 1 waits for rank 2 in receive y_a_a from 2
      y_a_a : f32[2] = recv(y, a, splits=((dp,),), shape=(4,), source=((tp,),), home=b)
  rank 2 waits for rank 1 in receive x_b_b from 1
      x_b_b : f32[2] = recv(None, b, splits=((tp,),), shape=(4,), source=((dp,),), home=a)
send earlier what another rank waits for"""


def test_local_programs_are_checked_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes together, though one rank was asked for."""
    checked: list[list[int]] = []
    monkeypatch.setattr(localize, "check_programs", lambda programs: checked.append(sorted(programs)))
    local = LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify())
    assert not checked
    _ = local[2]
    assert checked == [[0, 1, 2]]


# -- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_created_in_an_order_that_no_rank_decides() -> None:
    programs = local_programs("column_row_pair")
    wanted = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert creation_order(programs.values()) == wanted
    assert all(creation_order([program]) == wanted for program in programs.values()), "a rank asks with its own"
    shuffled = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp"))
    assert creation_order(reversed(shuffled.values())) == wanted


def test_groups_of_one_rank_are_not_created() -> None:
    program = Program.parse(
        "program local on dp=2 tp=1 at dp=0 tp=0\n  x : f32[4] = input\nforward:\n"
        "  a : f32[4] = all_reduce(x, tp)\n  b : f32[4] = all_reduce(x, dp)\n  return a, b\n"
    )
    assert creation_order([program]) == [(0, 1)]
    check_programs({0: program, 1: program.at({"dp": 1, "tp": 0})})
    check({0: tasks_of(program), 1: tasks_of(program.at({"dp": 1, "tp": 0}))})


# -- cost ------------------------------------------------------------------------------------------------------------


def test_64_ranks_that_share_a_graph_take_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(dp=8, tp=8)
    lines = [f"  v{i} : f32[4] = all_reduce(x, {'dp' if i % 2 else 'tp'})\n" for i in range(200)]
    text = f"program local on dp=8 tp=8 at dp=0 tp=0\n  x : f32[4] = input\nforward:\n{''.join(lines)}  return v0\n"
    program = Program.parse(text)
    walks, walk = [], channels.programs._walk
    monkeypatch.setattr(channels.programs, "_walk", lambda program: walks.append(program) or walk(program))
    check_programs({rank: program.at(mesh.coordinates(rank)) for rank in mesh.ranks})
    assert len(walks) == 1


def test_it_is_linear_in_the_tasks() -> None:
    def work(n: int) -> int:
        """Function calls for a column of n ranks that hand 20 values on: most wait for their turn again and again."""
        tasks: Tasks = {rank: [] for rank in range(n)}
        for value, rank in itertools.product("abcdefghijklmnopqrst", range(n - 1)):
            tasks[rank].append(Send(value, rank + 1))
            tasks[rank + 1].append(Receive(value, rank))
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            check(tasks, MODELS)
        finally:
            sys.setprofile(None)
        return calls

    assert 6 * work(20) < work(160) < 10 * work(20)


def test_strictness_orders_the_models() -> None:
    for loose, strict in itertools.combinations(MODELS, 2):
        assert loose.looser(strict) and not strict.looser(loose)
