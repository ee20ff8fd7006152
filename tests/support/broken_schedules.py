"""Pipeline schedules for the verifier: right ones, ones with a known fault, and ones that were changed at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, Slot, Task, build
from autopar.pipeline.dataflow import reads, source
from autopar.pipeline.lowering import with_frees
from autopar.pipeline.task import EMPTY, REDUCE, other_end

Place = tuple[int, int]  # row, rank


@st.composite
def right(draw: st.DrawFn, ranks: int = 6, batches: int = 12, *, messages: bool | None = True,
          frees: bool | None = None, recompute: bool | None = None) -> PipelineSchedule:  # fmt: skip
    """A policy's schedule, lowered in either way. ``None``: with or without."""

    def choice(given: bool | None) -> bool:
        return draw(st.booleans()) if given is None else given

    name = draw(st.sampled_from(sorted(POLICIES)))
    chunks = POLICIES[name].chunks or (1, 2, 3)
    made = build(name, draw(st.integers(1, ranks)), draw(st.integers(1, batches)), draw(st.sampled_from(chunks)),
                 messages=False, recompute=choice(recompute))  # fmt: skip
    if not choice(messages):
        return made
    made = made.with_messages(latest=draw(st.booleans()))
    return with_frees(made) if choice(frees) else made


def passes(schedule: PipelineSchedule) -> bool:
    """Whether the verifier takes it for right."""
    try:
        schedule.verify()
    except ScheduleError:
        return False
    return True


def changed(schedule: PipelineSchedule, slots: Mapping[Place, Slot]) -> PipelineSchedule:
    """The schedule with other slots in some places."""
    return replace(schedule, slots=tuple(
        tuple(slots.get((time, rank), slot) for rank, slot in enumerate(row)) for time, row in enumerate(schedule.slots)
    ))  # fmt: skip


def places(schedule: PipelineSchedule, kinds: str = "FW FS FR BW BS BR WW") -> list[tuple[int, int, Task]]:
    return [(time, rank, task) for time, rank, task in schedule.tasks() if task.kind in kinds.split()]


def without(slot: Slot, task: Task) -> Slot:
    return replace(slot, tasks=tuple(one for one in slot.tasks if one != task))


def exchanged(schedule: PipelineSchedule, one: tuple[int, int, Task], other: tuple[int, int, Task]) -> PipelineSchedule:
    """Two tasks of one rank change places."""
    (time, rank, first), (later, _, second) = one, other
    swap = {first: second, second: first}
    slots = {}
    for at in {time, later}:
        slot = schedule.slots[at][rank]
        slots[at, rank] = replace(slot, tasks=tuple(swap.get(task, task) for task in slot.tasks))
    return changed(schedule, slots)


# -- faults: each makes a wrong schedule and what its error must say, or nothing where there is no place for it
# ------------

Fault = Callable[[PipelineSchedule, random.Random], "tuple[PipelineSchedule, tuple[str, ...]] | None"]


def _drop(kinds: str) -> Fault:
    def fault(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
        found = places(schedule, kinds)
        if not found or (kinds == "WW" and len(found) == 1):  # without any, the backward makes both gradients
            return None
        time, rank, task = choose.choice(found)
        return changed(schedule, {(time, rank): without(schedule.slots[time][rank], task)}), (
            task.where,
            f"rank {rank}",
        )

    return fault


def _double(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]]:
    time, rank, task = choose.choice(places(schedule))
    again = choose.choice([at for at, row in enumerate(schedule.slots) if row[rank].tasks])
    slot = schedule.slots[again][rank]
    return changed(schedule, {(again, rank): replace(slot, tasks=(*slot.tasks, task))}), (
        task.where, f"in row {min(time, again)} and in row {max(time, again)} of rank {rank}"
    )  # fmt: skip


def _other_order(kinds: str) -> Fault:
    """Two messages of one rank with the same other rank change places: the i-th sent is not the i-th received."""

    def fault(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
        found = places(schedule, kinds)
        choose.shuffle(found)
        for one in found:
            for other in found:
                if (
                    one is not other
                    and one[1] == other[1]
                    and schedule.rank_of[one[2].peer] == schedule.rank_of[other[2].peer]
                ):
                    return exchanged(schedule, one, other), (f"rank {one[1]}", "row ")
        return None

    return fault


def _receive_and_use(
    schedule: PipelineSchedule, choose: random.Random
) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
    if not (found := places(schedule, "FR BR")):
        return None
    time, rank, receive = choose.choice(found)
    use = Task(receive.kind[0] + "W", receive.stage, receive.batch)
    later = next(at for at, _, task in schedule.tasks() if task == use)
    return exchanged(schedule, (time, rank, receive), (later, rank, use)), (f"rank {rank}", "row ")


def _send_early(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
    """A send in the slot that makes what it sends, or before."""
    if not (found := places(schedule, "FS BS")):
        return None
    time, rank, send = choose.choice(found)
    made = next(at for at, _, task in schedule.tasks() if task == Task(send.kind[0] + "W", send.stage, send.batch))
    early = choose.randint(0, made)
    slot = schedule.slots[early][rank]
    return changed(schedule,
                   {(time, rank): without(schedule.slots[time][rank], send),
                    (early, rank): replace(slot, tasks=(*slot.tasks, send))}), (
        send.where, f"row {early}, rank {rank}", f"row {made}, rank {rank}"
    )  # fmt: skip


def _other_peer(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
    if not (found := places(schedule, "FS FR BS BR")):
        return None
    time, rank, message = choose.choice(found)
    other = message._replace(peer=choose.choice([stage for stage in range(schedule.stages) if stage != message.peer]))
    slot = schedule.slots[time][rank]
    new = replace(slot, tasks=tuple(other if task == message else task for task in slot.tasks))
    return changed(schedule, {(time, rank): new}), (
        other.where,
        f"row {time}, rank {rank}",
        f"its peer is stage {message.peer}",
    )


def _for_nobody(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
    """Both ends of a message that no computation reads: the last stage's output, or the gradient of the input."""
    if schedule.ranks == 1:
        return None
    (kind, stage, peer) = choose.choice((("F", schedule.stages - 1, 0), ("B", 0, schedule.stages - 1)))
    if schedule.rank_of[stage] == schedule.rank_of[peer]:
        peer = next(other for other, rank in enumerate(schedule.rank_of) if rank != schedule.rank_of[stage])
    send, receive = Task(kind + "S", stage, 0, peer), Task(kind + "R", peer, 0, stage)
    row = tuple(
        Slot(tuple(task for task in (send, receive) if schedule.rank_of[task.stage] == rank))
        for rank in range(schedule.ranks)
    )
    if any(task[:3] == receive[:3] for _, _, task in schedule.tasks()):
        row = tuple(without(slot, receive) for slot in row)  # what is received there is another message
    broken = replace(schedule, slots=(*schedule.slots, row))
    return broken, ("nobody needs this message", f"row {len(schedule.slots)}, rank ", f"stage {stage}")


def _reductions(schedule: PipelineSchedule) -> list[tuple[int, int, int]]:
    return [
        (time, rank, stage)
        for time, row in enumerate(schedule.slots)
        for rank, slot in enumerate(row)
        for _, stage in slot.parameters
    ]


def _reduce(how: str) -> Fault:
    def fault(schedule: PipelineSchedule, choose: random.Random) -> tuple[PipelineSchedule, tuple[str, ...]] | None:
        time, rank, stage = choose.choice(_reductions(schedule))
        slot = schedule.slots[time][rank]
        less = {(time, rank): replace(slot, parameters=tuple(one for one in slot.parameters if one[1] != stage))}
        if how == "missing":
            # computations alone: nothing is said of reductions
            if not (broken := changed(schedule, less)).has_messages:
                return None
            return broken, (f"rank {rank}: the gradients of stage {stage} are reduced never", f"row {time}:", REDUCE)
        if how == "twice":
            later = choose.randint(time, len(schedule.slots) - 1)
            other = schedule.slots[later][rank]
            return changed(schedule,
                           {(later, rank): replace(other, parameters=(*other.parameters, (REDUCE, stage)))}), (
                f"stage {stage}", f"rank {rank}", f"rows {time} and {later}"
            )  # fmt: skip
        early = choose.randrange(time)
        other = schedule.slots[early][rank]
        return changed(schedule,
                       {**less, (early, rank): replace(other, parameters=(*other.parameters, (REDUCE, stage)))}), (
            f"row {early}, rank {rank}", f"stage {stage}", f"its last gradient in row {time}"
        )  # fmt: skip

    return fault


FAULTS: dict[str, Fault] = {
    "a computation is missing": _drop("FW BW"),
    "a gradient of weights is missing": _drop("WW"),
    "one end of a message is missing": _drop("FS FR BS BR"),
    "a task twice": _double,
    "sent in another order": _other_order("FS BS"),
    "received in another order": _other_order("FR BR"),
    "read before it is received": _receive_and_use,
    "sent before it is made": _send_early,
    "another peer": _other_peer,
    "for nobody": _for_nobody,
    "not reduced": _reduce("missing"),
    "reduced twice": _reduce("twice"),
    "reduced early": _reduce("early"),
}


# -- changed at random: some stay right --------------------------------------------------------------------------------


def shaken(schedule: PipelineSchedule, choose: random.Random) -> PipelineSchedule:
    """One thing done at random to one rank: something dropped, doubled, moved, or two things exchanged."""
    rank = choose.randrange(schedule.ranks)
    slots = {(time, rank): row[rank] for time, row in enumerate(schedule.slots)}
    busy = [place for place, slot in slots.items() if slot]
    at = choose.choice(busy)
    near = choose.choice([place for place in slots if abs(place[0] - at[0]) <= 2])
    what = choose.choice(("tasks", "tasks", "free", "parameters"))
    here = list(getattr(slots[at], what))
    how = choose.choice(("slots", "swap", "shuffle", "move", "drop", "double", "next"))
    if how == "slots":
        slots[at], slots[near] = slots[near], slots[at]
    elif how == "next":  # a rank's slots move one row on, where that is free
        if slots[busy[-1]] and (last := len(schedule.slots) - 1) and not slots[last, rank]:
            for time in range(last, at[0], -1):
                slots[time, rank] = slots[time - 1, rank]
            slots[at] = EMPTY
    elif here:
        one = choose.choice(here)
        rest = tuple(other for other in here if other != one)
        there = list(getattr(slots[near], what))
        if how == "drop":
            slots[at] = replace(slots[at], **{what: rest})
        elif how == "double":
            slots[near] = replace(slots[near], **{what: (*there, one)})
        elif how == "shuffle":
            choose.shuffle(here)
            slots[at] = replace(slots[at], **{what: tuple(here)})
        elif how == "move" or not there:
            slots[at] = replace(slots[at], **{what: rest})
            slots[near] = replace(slots[near], **{what: (*getattr(slots[near], what), one)})
        else:
            other = choose.choice(there)
            swap = {one: other, other: one}
            for place in {at, near}:
                slots[place] = replace(
                    slots[place], **{what: tuple(swap.get(each, each) for each in getattr(slots[place], what))}
                )
    return changed(schedule, slots)


@st.composite
def disordered(draw: st.DrawFn) -> PipelineSchedule:
    """Right computations in an order of its own, on any ranks. Each message is somewhere after it was made and before
    it is read, in which order it may be, some of them in one slot: some schedules finish on no channels, or on few.
    Small.
    """
    rank_of = draw(st.sampled_from(((0, 1), (0, 1, 0), (0, 1, 1, 0), (0, 1, 2), (0, 0, 1), (1, 0))))
    batches, choose, unsure = (
        draw(st.integers(1, 3)),
        draw(st.randoms(use_true_random=False)),
        draw(st.sampled_from((0.0, 0.5, 1.0))),
    )
    last = draw(st.sampled_from(("BW", "WW")))
    passes = [
        Task(kind, stage, batch)
        for kind in ("FW", "BW", "WW")[: 2 + (last == "WW")]
        for stage in range(len(rank_of))
        for batch in range(batches)
    ]
    when: dict[Task, float] = {}
    while left := [task for task in passes if task not in when]:
        when[choose.choice([task for task in left if all(need in when for need in reads(task, len(rank_of)))])] = len(
            when
        )
    for task in passes:
        if (receive := source(task, rank_of)) is not None:
            made = when[Task(task.kind, receive.peer, task.batch)]
            way = when[task] - made
            sent = when[other_end(receive)] = made + way * (0.5 + unsure * choose.uniform(-0.45, 0.45))
            when[receive] = min(max(sent + choose.uniform(-1, 1) * unsure * way, sent - 3), when[task] - 1e-3 * way)
    together = draw(st.sampled_from((0.0, 0.7)))
    slots: list[list[Slot]] = []
    newest: dict[int, int] = {}  # rank → row of its newest slot, where that is one of messages
    done: dict[int, int] = {}  # stage → row of its newest gradient
    for task in sorted(when, key=lambda task: (when[task], task)):
        rank = rank_of[task.stage]
        if task.kind[1] == "W":
            newest.pop(rank, None)
        elif rank in newest and choose.random() < together:
            slot = slots[newest[rank]][rank]
            slots[newest[rank]][rank] = Slot((*slot.tasks, task))
            continue
        else:
            newest[rank] = len(slots)
        if task.kind == last:
            done[task.stage] = len(slots)
        slots.append([Slot((task,)) if one == rank else EMPTY for one in range(max(rank_of) + 1)])
    for stage, row in done.items():
        slots[row][rank_of[stage]] = replace(slots[row][rank_of[stage]], parameters=((REDUCE, stage),))
    return PipelineSchedule(tuple(map(tuple, slots)), batches, rank_of)
