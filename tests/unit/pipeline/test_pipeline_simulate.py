"""The simulation against times that are corrected until nothing is violated; what it counts; and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, Slot, Task, build
from autopar.pipeline.dataflow import reads
from autopar.pipeline.memory import Sizes
from autopar.pipeline.optimiser import optimise
from autopar.pipeline.simulate import Times


@st.composite
def drawn(draw: st.DrawFn) -> tuple[PipelineSchedule, Times]:
    policy = draw(st.sampled_from(sorted(POLICIES)))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    v = draw(st.integers(1, 3)) if POLICIES[policy].chunks is None else None
    schedule = build(policy, p, m, v)
    some = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    times = Times(draw(some), draw(some), draw(some), draw(some)[1:], rendezvous=draw(st.booleans()))
    return schedule.without_messages().with_messages(latest=draw(st.booleans())), times


def relaxed(schedule: PipelineSchedule, times: Times) -> dict[Task, tuple[float, float]]:
    """Begin and end of each task: what must come after what is repaired until it all does."""
    split = any(task.kind == "WW" for _, _, task in schedule.tasks())
    rank_of = schedule.rank_of
    lasts: dict[Task, float] = {}
    before: dict[Task, set[Task]] = {}
    link: dict[tuple[int, int], Task] = {}
    own: dict[int, list[Task]] = {rank: [] for rank in range(schedule.ranks)}
    for row in schedule.slots:
        newest = {rank: tasks[-1:] for rank, tasks in own.items()}  # both ends of a message are in one row
        for rank, slot in enumerate(row):
            for task in slot.send:
                ends = rank, rank_of[task.peer]
                lasts[task] = times.transfer[min(task.stage, task.peer)]
                before[task] = {*newest[rank], *([link[ends]] if ends in link else [])}
                if times.rendezvous:
                    before[task].update(newest[rank_of[task.peer]])
                link[ends] = task
            for task in slot.compute:
                f, b, w = times.forward[task.stage], times.backward[task.stage], times.weight[task.stage]
                lasts[task] = {"FW": f, "BW": b if split else b + w, "WW": w}[task.kind]
                before[task] = set(own[rank][-1:])
                for need in reads(task, schedule.stages):
                    if rank_of[need.stage] != rank:
                        need = Task(need.kind[0] + "S", need.stage, need.batch, task.stage)
                    before[task].add(need)
                own[rank].append(task)
    start = dict.fromkeys(lasts, 0.0)
    wrong = True
    while wrong:
        wrong = False
        for task, needed in before.items():
            earliest = max((start[one] + lasts[one] for one in needed), default=0.0)
            if start[task] < earliest:
                start[task], wrong = earliest, True
    return {task: (start[task], start[task] + lasts[task]) for task in start}


@pytest.mark.simulated
@settings(deadline=None)
@given(drawn())
def test_tasks_begin_when_they_can(made: tuple[PipelineSchedule, Times]) -> None:
    schedule, times = made
    simulation = schedule.simulate(times)
    spans = [*(span for own in simulation.computed for span in own), *simulation.sent]
    expected = relaxed(schedule, times)
    assert {span.op: (span.start, span.end) for span in spans} == expected
    work = [sum(span.end - span.start for span in own) for own in simulation.computed]
    computed = [[expected[span.op] for span in own] for own in simulation.computed]
    first, last = min(own[0][0] for own in computed), max(own[-1][1] for own in computed)
    assert simulation.makespan == last - first and list(simulation.work) == work
    assert simulation.bubble == last - first - max(work)
    assert simulation.span == max(own[-1][1] - own[0][0] for own in computed)
    assert simulation.bubble_rate == (simulation.bubble / (last - first) if last > first else 0)
    assert simulation.span_bubble_rate == ((simulation.span - max(work)) / simulation.span if simulation.span else 0)


@pytest.mark.simulated
@settings(deadline=None)
@given(drawn())
def test_exposed_is_what_ranks_wait_for_messages_on_their_way(made: tuple[PipelineSchedule, Times]) -> None:
    """A message could be there when its sender has come to the send; what is waited after that, it was on its way."""
    schedule, times = made
    simulation = schedule.simulate(times)
    sends: dict[tuple[str, int, int], float] = {}
    done = [0] * schedule.ranks
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            for task in slot.send:
                sends[task.kind[0], task.peer, task.batch] = simulation.computed[rank][done[rank] - 1].end
        done = [n + len(slot.compute) for n, slot in zip(done, row, strict=True)]
    for rank, own in enumerate(simulation.computed):
        waited = before = 0.0
        for span in own:
            key = span.op.kind[0], span.op.stage, span.op.batch
            if key in sends:
                waited += span.start - max(before, sends[key])
            before = span.end
        assert simulation.exposed[rank] == waited
    assert not any(schedule.simulate(Times(times.forward, times.backward, times.weight, 0)).exposed)


def test_a_message_travels_while_ranks_compute() -> None:
    simulation = build("1f1b", 2, 2).simulate(Times(2, 3, 1, 5))
    first = simulation.sent[0]
    assert (first.op, first.stream, first.start, first.end) == (Task("FS", 0, 0, 1), (0, 1), 2, 7)
    assert [span.start for span in simulation.computed[1]] == [7, 9, 13, 15]


def test_a_message_may_wait_for_both_its_ranks() -> None:
    rows = (
        {0: Task("FW", 0, 0)}, {0: Task("FS", 0, 0, 1)}, {1: Task("FR", 1, 0, 0)}, {1: Task("FW", 1, 0)},
        {1: Task("BW", 1, 0)}, {1: Task("BS", 1, 0, 0)}, {0: Task("BR", 0, 0, 1)}, {0: Task("BW", 0, 0)},
    )  # fmt: skip
    reduces = {Task("BW", stage, 0): (("REDUCE_GRAD", stage),) for stage in (0, 1)}
    table = tuple(
        tuple(Slot((row[rank],), parameters=reduces.get(row[rank], ())) if rank in row else Slot() for rank in (0, 1))
        for row in rows
    )
    schedule = PipelineSchedule(table, 1, (0, 1))  # each receive is in a later row
    alone, both = (schedule.simulate(Times(transfer=1.0, rendezvous=which)) for which in (False, True))
    assert alone.sent == both.sent and alone.makespan == both.makespan  # no rank computes before it receives
    times = Times(forward=[2, 1, 1, 3], backward=[5.5, 3, 3, 2], weight=0, transfer=0.25)
    run, met = (build("1f1b", 4, 8).simulate(replace(times, rendezvous=which)) for which in (False, True))
    assert (run.makespan, met.makespan) == (68.5, 70.25)


def test_times_of_another_length_are_refused() -> None:
    schedule = build("1f1b", 3, 2)
    for times, text in (
        (Times(forward=[1, 2]), "forward has 2 numbers, and there are 3 stages"),
        (Times(transfer=[1, 2, 3]), "transfer has 3 numbers, and there are 2 pairs of neighbouring stages"),
    ):
        with pytest.raises(ScheduleError, match=text):
            schedule.simulate(times)
    with pytest.raises(ScheduleError, match="boundary has 1 numbers, and there are 2 pairs"):
        schedule.simulate(Times(), Sizes(boundary=[1]))


def test_what_is_no_time() -> None:
    for number in (-1, float("nan"), 10**400):
        with pytest.raises(ScheduleError, match=r"Times\(weight=…\) is .*: a finite number from 0"):
            Times(weight=number)
    for wrong in ("123", None, True):
        with pytest.raises(TypeError, match=r"Times\(backward=…\) is a number"):
            Times(backward=wrong)
    schedule = build("1f1b", 2, 2)
    for arguments in ((2,), (Sizes(),), (None, Times())):
        with pytest.raises(TypeError, match=r"is a (Times|Sizes), not"):
            schedule.simulate(*arguments)
    with pytest.raises(ScheduleError, match="at_once is of tasks of the schedule, not 'F0'"):
        schedule.simulate(at_once=["F0"])


@pytest.mark.long
@settings(deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 4), st.integers(1, 6), *[st.integers(0, 5)] * 4)
def test_a_forward_that_runs_again_takes_its_time(policy: str, p: int, m: int, f: int, b: int, w: int, c: int) -> None:
    again = build(policy, p, m, recompute=True).simulate(Times(f, b, w, c))
    assert again.computed == build(policy, p, m).simulate(Times(f, f + b, w, c)).computed


def test_a_wrong_schedule_is_not_simulated() -> None:
    table = ((Slot((Task("FW", 0, 0),)),), (Slot((Task("BW", 0, 1),)),))
    with pytest.raises(ScheduleError, match="BW00 of stage 0 is missing on rank 0: add it"):
        PipelineSchedule(table, 2, (0,)).simulate()


def test_a_schedule_without_messages_gets_them() -> None:
    assert build("zb-h1", 4, 8, messages=False).simulate().makespan == build("zb-h1", 4, 8).simulate().makespan


@pytest.mark.parametrize("p", (2, 3, 4, 6))
@pytest.mark.parametrize("overlap", (0.0, 0.25, 0.5, 1.0))
@pytest.mark.parametrize(("f", "b", "w"), ((1, 1, 1), (2, 2, 1), (4, 6, 2)))
def test_the_published_bubble_of_dualpipe(p: int, overlap: float, f: int, b: int, w: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with B and W together as B, and two stages a rank (DeepSeek's DualPipeV, 2025)."""
    run = build("dualpipe-v", p, 4 * p).simulate(Times(f, b, w, overlap=overlap))
    both = f + b + w - overlap * min(f, b + w)
    published = (p - 1) * (both + b + w - 3 * w)
    lost = run.makespan - min(run.work)  # of the rank that has most slots of both
    assert lost == pytest.approx(published) if f >= b else lost <= published


def test_a_forward_and_a_backward_in_one_slot_wait_for_both() -> None:
    schedule = build("dualpipe-v", 2, 6)
    times = Times(3, 2, 2, 5)
    alone, overlapped = (schedule.simulate(replace(times, overlap=share)) for share in (0.0, 1.0))
    slots = [slot.compute for row in schedule.slots for slot in row if {"FW", "BW"} <= {t.kind for t in slot.compute}]
    assert slots
    spans = {span.op: span for own in overlapped.computed for span in own}
    arrived = {(span.op.of, span.op.peer, span.op.batch): span.end for span in overlapped.sent}
    for tasks in slots:
        first, last = spans[tasks[0]], spans[tasks[-1]]
        assert last.end - first.start == 4  # F + B + W - min(F, B + W)
        assert all(arrived.get((task.of, task.stage, task.batch), 0.0) <= first.start for task in tasks)
    assert sum(overlapped.work) == sum(alone.work) - 3 * len(slots)
    with pytest.raises(ScheduleError, match=r"^Times\(overlap=…\) is 1.5: one number, from 0 to 1$"):
        Times(overlap=1.5)
    with pytest.raises(ScheduleError, match=r"^Times\(overlap=…\) is \(0.5, 0.5\): one number, from 0 to 1$"):
        Times(overlap=[0.5, 0.5])  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"^optimise: overlap=0.5: it makes orders of passes that run one after"):
        optimise(Times(overlap=0.5), 2, 4)
