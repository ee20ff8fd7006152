"""The deadlock verifier on random schedules: right by construction, with one fault, and as all interleavings say."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from channel_programs import MODELS, Tasks, finishing, grouped, passes, schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from interleavings import explored

from autopar.verify.channels import Collective, Group, Receive, Send, Task, check
from autopar.verify.channels.programs import check_programs


@pytest.mark.simulated
@settings(deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_a_global_order_finishes_on_all_channels(tasks: Tasks, choose: random.Random) -> None:
    check(tasks, MODELS)
    check({rank: grouped(own, choose) for rank, own in tasks.items()}, MODELS)


@pytest.mark.simulated
@settings(deadline=None)
@given(schedules(), st.data())
def test_one_fault_is_found_on_all_channels(tasks: Tasks, data: st.DataObject) -> None:
    """A task dropped, doubled or renamed on one rank."""
    shared = {
        rank: [i for i, t in enumerate(own) if not (isinstance(t, Collective) and len(t.ranks) == 1)]
        for rank, own in tasks.items()
    }
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


@pytest.mark.long
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
        assert alone == [model.name for model in MODELS][: len(alone)], (
            "what finishes with less room finishes with more"
        )

    compare()
    assert all(verdicts[model.name, verdict] >= 20 for model in MODELS for verdict in (False, True)), verdicts
