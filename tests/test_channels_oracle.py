"""The deadlock verifier on random schedules: right by construction, with one fault, and as all interleavings say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from channel_programs import MODELS, Tasks, finishing, grouped, passes, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.verify.channels import Channels, Collective, Group, Receive, Send, Task, check
from autopar.verify.channels.programs import check_programs


@settings(deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_a_global_order_finishes_on_all_channels(tasks: Tasks, choose: random.Random) -> None:
    check(tasks, MODELS)
    check({rank: grouped(own, choose) for rank, own in tasks.items()}, MODELS)


@settings(deadline=None)
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
    return {rank: grouped(own, choose) for rank, own in tasks.items()} if draw(st.booleans()) else tasks


def test_it_says_what_all_interleavings_say() -> None:
    verdicts: Counter[tuple[str, bool]] = Counter()

    @settings(max_examples=400, deadline=None)
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
