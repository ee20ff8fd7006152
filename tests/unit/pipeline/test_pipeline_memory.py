"""The memory of pipeline schedules: when buffers are free, what is in use, and what grows with the micro-batches."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from broken_schedules import changed, disordered, passes, right
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, Task, build
from autopar.pipeline.buffers import NEVER, Flow, release_points
from autopar.pipeline.dataflow import reader
from autopar.pipeline.lowering import with_frees
from autopar.pipeline.memory import RUNNING, Sizes, memory
from autopar.pipeline.simulate import simulate

MiB = 2.0**20


# -- when buffers are free ---------------------------------------------------------------------------------------------


def first_reached(schedule: PipelineSchedule, send: Task) -> int:
    """The first computation of the sender that a path leads to from the reader of the message."""
    edges: dict[Task, list[Task]] = defaultdict(list)
    numbers: dict[Task, int] = {}
    for rank in range(schedule.ranks):
        done: list[Task] = []
        computed = 0
        for row in schedule.slots:
            for task in (*row[rank].send, *row[rank].compute):  # messages are launched before the slot computes
                if done:
                    edges[done[-1]].append(task)
                done.append(task)
                if task.kind[1] == "S":
                    edges[task].append(reader(task))
                else:
                    numbers[task], computed = computed, computed + 1
    todo, seen = [reader(send)], {reader(send)}
    while todo:
        new = [task for task in edges[todo.pop()] if task not in seen]
        seen.update(new)
        todo += new
    return min(
        (
            numbers[task]
            for task in seen
            if task in numbers and schedule.rank_of[task.stage] == schedule.rank_of[send.stage]
        ),
        default=NEVER,
    )


@pytest.mark.simulated
@settings(deadline=None)
@given(st.one_of(right(4, 6), disordered()))
def test_a_buffer_is_free_where_a_path_leads_to(schedule: PipelineSchedule) -> None:
    assume(passes(schedule))
    points = release_points(Flow(schedule))
    assert points == {task: first_reached(schedule, task) for _, _, task in schedule.tasks() if task.kind[1] == "S"}


@pytest.mark.parametrize("ranks", (2, 3, 5, 8))
def test_the_published_rules_for_1f1b(ranks: int) -> None:
    """A forward's buffer is free by the time the gradient of the same micro-batch has come, before the last stage not
    sooner; a backward's with the forward two steps on (PaddlePaddle, pull requests 34086 and 34230).
    """
    for batches in (1, 2, ranks - 1, ranks, 2 * ranks, 3 * ranks + 1):
        schedule = with_frees(build("1f1b", ranks, batches))
        released = {send: slot.compute for row in schedule.slots for slot in row for send in slot.free}
        sends = [task for _, _, task in schedule.tasks() if task.kind[1] == "S"]
        for kind, stage, batch, _ in (send for send in sends if send.kind == "FS"):
            of = max(0, batch - (ranks - 2 - stage))
            assert released.pop(Task(kind, stage, batch, stage + 1)) == (Task("BW", stage, of),)
        for kind, stage, batch, _ in (send for send in sends if send.kind == "BS"):
            forward = batch + 2 + (ranks - 1 - stage)  # what a step computes besides the backward two micro-batches on
            assert released.pop(Task(kind, stage, batch, stage - 1), None) == (
                (Task("FW", stage, forward),) if forward < batches else None
            )
        assert not released


def test_one_step_sooner_is_refused() -> None:
    ranks, batches = 4, 12
    schedule = with_frees(build("1f1b", ranks, batches))
    rows = {task: time for time, _, task in schedule.tasks()}
    for send, sooner, known in (
        (Task("FS", 2, 6, 3), Task("BW", 2, 5), Task("BW", 2, 6)),
        (Task("BS", 2, 6, 1), Task("BW", 2, 7), Task("FW", 2, 9)),
        (Task("BS", 3, 6, 2), Task("BW", 3, 7), Task("FW", 3, 8)),
    ):
        slots = {}
        for time in (rows[known], rows[sooner]):
            slot = schedule.slots[time][send.stage]
            slots[time, send.stage] = replace(
                slot,
                free=(*slot.free, send) if time == rows[sooner] else tuple(one for one in slot.free if one != send),
            )
        with pytest.raises(ScheduleError, match=f"^row {rows[sooner]}, rank {send.stage}: the buffer of {send.where} "
                                                f"is released before that rank can know .* "
                                                f"release it in row {rows[known]}$"):  # fmt: skip
            changed(schedule, slots).verify()


# -- what is in use ----------------------------------------------------------------------------------------------------

Instant = tuple[int, int]  # row, and which of the slot's computations runs; -1: its messages are launched
END = (10**9, 0)


def kept(schedule: PipelineSchedule, held: str = "", pooled: bool = False) -> Iterator[tuple[Task, Instant, Instant]]:
    """All that is ever kept: an activation (FW), what of it is for the weights (WW), a buffer of a message; first and
    last instant."""
    at: dict[Task, Instant] = {}
    freed: dict[Task, Instant] = {}
    for time, row in enumerate(schedule.slots):
        for slot in row:
            at.update((task, (time, -1)) for task in slot.messages)
            at.update((task, (time, i)) for i, task in enumerate(slot.compute))
            freed.update((send, (time, -2)) for send in slot.free if send.kind[0] not in held)
    for task, begin in at.items():
        kind, stage, batch, _ = task
        forward, backward = at[Task("FW", stage, batch)], at[Task("BW", stage, batch)]
        weight = at.get(Task("WW", stage, batch), backward)
        if kind == "FW":
            yield task, begin, backward
        elif kind == "WW":
            yield task, (backward[0], backward[1] + 1), begin
        elif kind[1] == "S":
            yield task, at[Task(kind[0] + "W", stage, batch)], freed.get(task, END)
        elif kind[1] == "R":
            read = weight if kind == "BR" else backward if schedule.recompute else forward
            yield task, begin, weight if pooled else read


@pytest.mark.simulated
@settings(deadline=None, max_examples=60)
@given(st.one_of(right(4, 6), disordered()), st.data(), st.sampled_from(("", "B", "F", "FB")), st.booleans())
def test_memory_is_what_intervals_say(schedule: PipelineSchedule, data: st.DataObject, held: str, pooled: bool) -> None:
    assume(passes(schedule))
    schedule = with_frees(schedule)
    numbers = {
        "activation": schedule.stages,
        "for_weights": schedule.stages,
        "boundary": schedule.stages - 1,
        "fixed": schedule.stages,
        "in_forward": schedule.stages,
        "in_backward": schedule.stages,
        "in_weight": schedule.stages,
    }
    sizes = {
        name: data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n), label=name) for name, n in numbers.items()
    }
    found = memory(schedule, Sizes(**sizes, pooled=pooled), held=held)

    def size(task: Task) -> int:
        if task.kind[1] == "W":
            return sizes["activation" if task.kind == "FW" else "for_weights"][task.stage]
        return sizes["boundary"][min(task.stage, task.peer)]

    for rank in range(schedule.ranks):
        fixed = sum(sizes["fixed"][stage] for stage in schedule.stages_of[rank])
        own = [one for one in kept(schedule, held, pooled) if schedule.rank_of[one[0].stage] == rank]
        running = Counter[Instant]()  # what a pass needs while it runs
        for time, row in enumerate(schedule.slots):
            for i, task in enumerate(row[rank].compute):
                running[time, i] = sizes[RUNNING[task.kind]][task.stage]

        def used(now: Instant, received: bool, own: Any = own) -> int:
            alike = (one for one in own if (one[0].kind[1] == "R") == received)
            return sum(size(task) for task, first, last in alike if first <= now <= last)

        instants = [(time, i) for time, row in enumerate(schedule.slots) for i in range(-1, len(row[rank].compute) + 1)]
        messages = [used(now, True) for now in instants]
        if pooled:
            messages = list(accumulate(messages, max))  # memory of the pool stays
        assert found.peak[rank] == fixed + max(
            used(now, False) + running[now] + bytes for now, bytes in zip(instants, messages, strict=True)
        )
        assert fixed + sum(found.at_peak[rank].values()) == found.peak[rank]


@pytest.mark.simulated
@settings(deadline=None, max_examples=60)
@given(right(4, 6))
def test_buffers_of_channels_are_what_intervals_say(schedule: PipelineSchedule) -> None:
    most: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    messages = [interval for interval in kept(with_frees(schedule)) if interval[0].kind[1] != "W"]
    for _, now, _ in messages:  # where one begins
        counts: Counter[tuple[int, int, str]] = Counter()
        for task, first, last in messages:
            own, peer = schedule.rank_of[task.stage], schedule.rank_of[task.peer]
            counts[(own, peer, "S") if task.kind[1] == "S" else (peer, own, "R")] += first <= now <= last
        for (sender, receiver, end), count in counts.items():
            most[sender, receiver][end] = max(count, most[sender, receiver].get(end, 0))
    assert schedule.verify().buffers == {pair: (ends["S"], ends["R"]) for pair, ends in most.items()}


# -- what grows with the micro-batches ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def schedule_of(name: str, ranks: int, batches: int, chunks: int, recompute: bool) -> PipelineSchedule:
    return build(name, ranks, batches, chunks, recompute=recompute)


def peaks(name: str, ranks: int, batches: int, chunks: int, recompute: bool, sizes: Sizes) -> tuple[float, ...]:
    return memory(schedule_of(name, ranks, batches, chunks, recompute), sizes).peak


@pytest.mark.simulated
@pytest.mark.parametrize(
    "ranks", [2, 3, pytest.param(5, marks=pytest.mark.sweep("two and three ranks show what is constant, and where"))]
)
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_constant_in_the_number_of_micro_batches(name: str, recompute: bool, ranks: int) -> None:
    """Within one boundary tensor from 2p micro-batches on, and exactly from 4p on if they fill the groups of
    interleaved 1F1B; or it grows by what a micro-batch keeps.
    """
    for chunks in POLICIES[name].chunks or (1, 2, 3):
        for activation, boundary in ((0.0, 1.0), (10.0, 1.0), (1.0, 7.0)):
            first, *others = (
                peaks(name, ranks, batches, chunks, recompute, Sizes(activation, boundary=boundary))
                for batches in (2 * ranks, 2 * ranks + 1, 3 * ranks - 1, 4 * ranks + 3, 4 * ranks, 5 * ranks, 9 * ranks)
            )
            if POLICIES[name].constant:
                assert all(
                    abs(other - one) <= boundary for peak in others for one, other in zip(first, peak, strict=True)
                )
                assert others[-3] == others[-2] == others[-1]
            else:
                assert all(other - one >= activation * 7 * ranks for one, other in zip(first, others[-1], strict=True))
                assert others[-1] > first


@pytest.mark.simulated
def test_the_published_growth_of_1f1b() -> None:
    """GPT-2 medium on 8 ranks: one boundary tensor of 16 MiB for each micro-batch, on all stages but the first, where
    the backward's send buffers are kept (PaddlePaddle, pull request 34086: 16.125 MB measured); none where they are
    released.
    """
    sizes = Sizes(activation=100 * MiB, boundary=16 * MiB, fixed=1000 * MiB)
    few, many, most = (build("1f1b", 8, batches) for batches in (16, 64, 256))
    for held, growth in ((("B",), (0.0, *[16 * MiB] * 7)), ((), (0.0,) * 8)):
        one, two, three = (simulate(schedule, sizes=sizes, held=held).peak for schedule in (few, many, most))
        assert tuple((b - a) / 48 for a, b in zip(one, two, strict=True)) == growth
        assert tuple((b - a) / 192 for a, b in zip(two, three, strict=True)) == growth


Live = Callable[[int, int, int, int], float]  # ranks, micro-batches, rank, chunks
LIVE: dict[str, Live] = {
    "gpipe": lambda p, m, r, v: m,
    "1f1b": lambda p, m, r, v: min(m, p - r),
    "eager-1f1b": lambda p, m, r, v: min(m, 2 * (p - r) - 1),
    "interleaved-1f1b": lambda p, m, r, v: min(m, (2 * (p - 1 - r) + (v - 1) * p + 1) / v),
    "looped-bfs": lambda p, m, r, v: m,
    "zb-h1": lambda p, m, r, v: min(m, p),
    "zb-h2": lambda p, m, r, v: min(m, 2 * p - 1),
    "zb-v": lambda p, m, r, v: min(m, p, (m + r + 1) / 2),
    "v-half": lambda p, m, r, v: (p + 2) // 2,
    "v-min": lambda p, m, r, v: (p + 4) // 3,
    "dualpipe-v": lambda p, m, r, v: min(m, p + 1 / 2, (m + r + 1) / 2),
    "onnxruntime": lambda p, m, r, v: min(m, p, 2 * (p - r) - 1),
}


@pytest.mark.simulated
@pytest.mark.parametrize("name", POLICIES)
def test_live_micro_batches(name: str) -> None:
    """In units of a rank's share of the model. Interleaved: with incomplete groups it may be less, until there are 2p
    micro-batches."""
    for p in range(1, 7):
        for m in range(1, 3 * p + 3):
            for v in POLICIES[name].chunks or (1, 2, 3):
                live = memory(build(name, p, m, v)).live
                formula = tuple(LIVE[name](p, m, r, v) for r in range(p))
                if name == "interleaved-1f1b" and m % p and m < 2 * p:
                    assert all(a <= b for a, b in zip(live, formula, strict=True))
                elif name in ("v-half", "v-min"):
                    assert all(a <= min(b, m) for a, b in zip(live, formula, strict=True)), (p, m)
                    if m >= 2 * p:  # the published peak, on all ranks; of a few one micro-batch less
                        assert max(live) == formula[0] and min(live) >= formula[0] - (name == "v-min" and p % 3 == 2), (
                            p,
                            m,
                        )
                else:
                    assert live == formula, (p, m, v)


def test_zb_h1_keeps_as_many_more_as_its_stage_has_before_it() -> None:
    """The published growth over 1F1B is the same from stage to stage (PaddlePaddle, pull request 62865)."""
    for p in (2, 4, 8):
        ones, zeros = (memory(build(name, p, 3 * p)).live for name in ("1f1b", "zb-h1"))
        assert [more - one for one, more in zip(ones, zeros, strict=True)] == list(range(p))


def test_what_is_no_size() -> None:
    for number in (-1, float("inf"), float("nan"), 1e101):
        with pytest.raises(
            ScheduleError, match=r"^Sizes\(boundary=…\) is .*: a finite number from 0, to 1e\+100 at most$"
        ):
            Sizes(boundary=[1.0, number])
    for wrong in (True, "1", b"1", None, {1: 2}, {1.0}, [1.0, None], 1j):
        with pytest.raises(TypeError, match=r"^Sizes\(boundary=…\) is a number, or a list of one for each stage, not"):
            Sizes(boundary=wrong)
    schedule = build("1f1b", 3, 4)
    with pytest.raises(ScheduleError, match=r"^fixed has 2 numbers, and there are 3 stages$"):
        memory(schedule, Sizes(fixed=[1.0, 2.0]))
    with pytest.raises(ScheduleError, match="held is of the passes F and B, not 'X'"):
        memory(schedule, held="X")
    with pytest.raises(TypeError, match="sizes is a Sizes, not 3"):
        memory(schedule, 3)


def test_sizes_may_come_from_anywhere() -> None:
    assert Sizes(
        activation=(n for n in (1, 2)), boundary=np.float32(2), fixed=np.array([1, 2]), for_weights=torch.tensor(0.5)
    ) == Sizes(activation=(1.0, 2.0), boundary=2.0, fixed=(1.0, 2.0), for_weights=0.5)
