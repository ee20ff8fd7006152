"""The verifier of pipeline schedules: what is right passes, what is wrong is told, and a brute-force run agrees."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from broken_schedules import FAULTS, changed, disordered, exchanged, passes, places, right, shaken
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interleavings import explored
from schedule_oracle import is_right

from autopar.errors import ScheduleError
from autopar.pipeline import PipelineSchedule, Slot, Task, build
from autopar.pipeline.lowering import with_frees
from autopar.pipeline.memory import memory
from autopar.pipeline.task import REDUCE
from autopar.verify.channels import ALL, ASYNCHRONOUS, BLOCKING, GROUPED, Group, Receive, Send, buffered

randoms = st.randoms(use_true_random=False)


def reason(schedule: PipelineSchedule, **options: object) -> str:
    with pytest.raises(ScheduleError) as found:
        schedule.verify(**options)
    return str(found.value)


# -- what is right -----------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(deadline=None)
@given(right(messages=None))
def test_what_policies_make_is_right_on_all_channels(schedule: PipelineSchedule) -> None:
    found = schedule.verify(channels=ALL)
    kinds = Counter(task.kind for _, _, task in schedule.tasks())
    passes, cut = (
        schedule.stages * schedule.batches,
        sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False)),
    )
    assert found.computations == passes * (3 if kinds["WW"] else 2)
    assert found.messages == (2 * schedule.batches * cut if schedule.has_messages else 0)
    assert found.finishes == (dict.fromkeys((model.name for model in ALL), "") if schedule.has_messages else {})


def test_what_is_told_of_a_right_schedule() -> None:
    assert str(build("1f1b", 3, 4).verify()) == (
        "24 computations, 16 messages; finishes on asynchronous, 1-buffered, grouped, blocking channels\n"
        "  rank 0 → rank 1: at most 3 send and 1 receive buffers\n"
        "  rank 1 → rank 0: at most 3 send and 1 receive buffers\n"
        "  rank 1 → rank 2: at most 2 send and 1 receive buffers\n"
        "  rank 2 → rank 1: at most 2 send and 1 receive buffers"
    )


# -- one fault ---------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("kind", FAULTS)
@settings(deadline=None, max_examples=40)
@given(right(4, 6), randoms)
def test_each_fault_is_told(kind: str, schedule: PipelineSchedule, choose: random.Random) -> None:
    fault = FAULTS[kind](schedule, choose)
    assume(fault is not None)
    broken, words = fault
    text = reason(broken)
    assert all(word in text for word in words), (words, text)


def test_the_order_in_a_slot_counts() -> None:
    own = Task("FW", 0, 0), Task("BW", 0, 0), Task("WW", 0, 0)
    PipelineSchedule(((Slot(own),),), 1, (0,)).verify()
    for wrong in ((own[1], own[0], own[2]), (own[0], own[2], own[1])):
        text = reason(PipelineSchedule(((Slot(wrong),),), 1, (0,)))
        assert text.startswith(
            f"{own[2] if wrong[0] == own[0] else own[1]} of stage 0 comes before the task that it reads:\n  row 0, "
            f"rank 0: "
        ), text


def drawn(text: str, batches: int) -> PipelineSchedule:
    """Two stages on two ranks: a line a row, in it their tasks; reductions where they belong."""
    slots = [[_drawn(word, rank) for rank, word in enumerate(line.split())] for line in text.strip().splitlines()]
    for rank in (0, 1):
        last = max(time for time, row in enumerate(slots) if any(task.kind == "BW" for task in row[rank].tasks))
        slots[last][rank] = replace(slots[last][rank], parameters=((REDUCE, rank),))
    return PipelineSchedule(tuple(map(tuple, slots)), batches, (0, 1))


def _drawn(word: str, rank: int) -> Slot:
    return Slot(
        tuple(
            Task(one[:2], rank, int(one[2:]), -1 if one[1] == "W" else 1 - rank)
            for one in word.strip(".").split("+")
            if one
        )
    )


SWAPPED = """
    FW0 .
    FW1 .
    FS1 FR0
    FS0 FR1
    .   FW0
    BR0 FW1
    .   BW0
    BR1 BW1
    .   BS0
    .   BS1
    BW0 .
    BW1 .
"""


def test_messages_are_told_with_their_rows() -> None:
    """All sends after what they send, all receives before their readers, and the wrong tensor in both."""
    schedule = drawn(SWAPPED, 2)
    assert reason(schedule) == (
        "message 1 from rank 0 to rank 1 is not the same on both:\n"
        "  rank 0: send FS01 of stage 0 to 1\n"
        "      row 2: FS01 of stage 0 to stage 1\n"
        "  rank 1: receive FS00 of stage 0 from 0\n"
        "      row 2: FR00 of stage 1 from stage 0\n"
        "give both ranks the same order"
    )
    exchanged(schedule, *places(schedule, "FS")).verify()


# -- buffers -----------------------------------------------------------------------------------------------------------


def released(schedule: PipelineSchedule) -> list[tuple[int, int, Task]]:
    return [
        (time, rank, send)
        for time, row in enumerate(schedule.slots)
        for rank, slot in enumerate(row)
        for send in slot.free
    ]


def moved(schedule: PipelineSchedule, place: tuple[int, int, Task], row: int) -> PipelineSchedule:
    """A release in another row."""
    time, rank, send = place
    less = replace(
        schedule.slots[time][rank], free=tuple(one for one in schedule.slots[time][rank].free if one != send)
    )
    schedule = changed(schedule, {(time, rank): less})
    return changed(
        schedule, {(row, rank): replace(schedule.slots[row][rank], free=(*schedule.slots[row][rank].free, send))}
    )


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(right(4, 8, frees=True), randoms)
def test_releases_are_tight(schedule: PipelineSchedule, choose: random.Random) -> None:
    """Each buffer is released in the first slot that may: in no earlier row, in any later."""
    for place in released(schedule)[:: max(1, len(released(schedule)) // 6)]:
        time, rank, send = place
        busy = [row for row in range(time) if schedule.slots[row][rank].tasks]
        for row in {busy[-1], choose.randrange(busy[-1] + 1)}:
            assert reason(moved(schedule, place, row)).startswith(
                f"row {row}, rank {rank}: the buffer of {send.where} is released before "
            )
        moved(schedule, place, choose.randrange(time, len(schedule.slots))).verify()


@pytest.mark.simulated
@settings(deadline=None)
@given(right(4, 8, frees=False, recompute=False))
def test_forwards_that_run_again_read_what_they_sent(schedule: PipelineSchedule) -> None:
    without, again = with_frees(schedule), with_frees(replace(schedule, recompute=True).known_right())
    again.verify()
    early = replace(without, recompute=True)
    if sooner := set(released(without)) - set(released(again)):
        assert all(send.kind == "FS" for _, _, send in sooner)
        assert "which runs its forward again, in row" in reason(early)
    else:
        early.verify()


AT_ONCE = """
    FW0     .
    FS0     FR0
    .       FW0
    .       BW0
    BR0     BS0
    FW1+BW0 .
    FS1     FR1
    .       FW1
    .       BW1
    BR1     BS1
    BW1     .
"""


def test_a_slot_has_waited_for_its_first_computation_alone() -> None:
    """What the second one reads tells the next slot."""
    schedule = with_frees(drawn(AT_ONCE, 2))
    place = (6, 0, Task("FS", 0, 0, 1))
    assert place in released(schedule) and is_right(schedule)
    assert reason(moved(schedule, place, 5)).endswith("has taken place: release it in row 6")
    assert not is_right(moved(schedule, place, 5))


def test_releases_that_make_no_sense() -> None:
    schedule = with_frees(build("1f1b", 2, 3))
    last = len(schedule.slots) - 1
    own, other = Task("FS", 0, 0, 1), Task("BS", 1, 0, 0)
    for send, where in ((Task("FS", 0, 7, 1), "but that rank does not send "
                                              "it"), (other, "but that rank does not send it"),
                        (Task("FR", 1, 0, 0), "but that rank does not send "
                                              "it"), (own, "a second time; leave one out")):  # fmt: skip
        broken = changed(
            schedule, {(last, 0): Slot(schedule.slots[last][0].tasks, (send,), schedule.slots[last][0].parameters)}
        )
        assert (
            reason(broken)
            == f"row {last}, rank 0: the buffer of {send.where} is released{',' * ('but' in where)} {where}"
        )
    alone = build("1f1b", 2, 3, messages=False)
    assert "but that rank does not send it" in reason(changed(alone, {(2, 0): Slot(alone.slots[2][0].tasks, (own,))}))


def test_a_wrong_schedule_stays_wrong() -> None:
    """What is derived of it is no way around the verifier; and releases are made anew."""
    schedule = drawn(SWAPPED, 2)
    for use in (with_frees, PipelineSchedule.simulate, PipelineSchedule.checked):
        with pytest.raises(ScheduleError):
            use(schedule)
    good = with_frees(build("zb-v", 3, 5))
    late = moved(good, released(good)[0], len(good.slots) - 1)
    assert with_frees(late) == with_frees(good) == good
    with pytest.raises(ScheduleError, match="is released before it is sent"):
        memory(moved(good, released(good)[0], 0))


# -- a run by brute force ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_says_what_all_runs_say() -> None:
    verdicts: Counter[bool] = Counter()

    @settings(deadline=None, max_examples=200)
    @given(
        st.one_of(right(2, 3, messages=None), right(2, 3, frees=True), right(3, 2, frees=True), disordered()),
        st.integers(0, 2),
        randoms,
    )
    def compare(schedule: PipelineSchedule, times: int, choose: random.Random) -> None:
        for _ in range(times):
            schedule = shaken(schedule, choose)
        verdict = is_right(schedule)
        assert passes(schedule) == verdict
        verdicts[verdict] += 1

    compare()
    assert min(verdicts[True], verdicts[False]) >= 20, verdicts


# -- progress ----------------------------------------------------------------------------------------------------------


def finishing(schedule: PipelineSchedule) -> list[str]:
    """The channels on which all interleavings of the messages finish."""
    tasks: dict[int, list[Group]] = {rank: [] for rank in range(schedule.ranks)}
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            tasks[rank].append(Group(tuple(
                Send(f"{task.kind[0]}{task.peer} {task.batch}", schedule.rank_of[task.peer]) if task.kind[1] == "S"
                else Receive(f"{task.kind[0]}{task.stage} {task.batch}", schedule.rank_of[task.peer])
                for task in slot.messages
            )))  # fmt: skip
    return [model.name for model in ALL if explored(tasks, model) == {True}]


def told(schedule: PipelineSchedule) -> list[str]:
    return [name for name, cycle in schedule.verify().finishes.items() if not cycle]


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(disordered())
def test_it_says_on_which_channels_all_runs_finish(schedule: PipelineSchedule) -> None:
    if passes(schedule):
        assert told(schedule) == finishing(schedule)


CROSSING = """
    FW0 .
    FS0 FR0
    FW1 FW0
    .   BW0
    FS1 BS0
    BR0 FR1
    BW0 FW1
    .   BW1
    BR1 BS1
    BW1 .
"""
CYCLE = (
    "ranks wait for each other forever on grouped channels (both ends of a message wait for each other, and all of a "
    "group are posted together):\n"
    "  rank 0 waits for rank 1 in send FS01 of stage 0 to 1\n"
    "      row 4: FS01 of stage 0 to stage 1\n"
    "  rank 1 waits for rank 0 in send BS00 of stage 1 to 0\n"
    "      row 4: BS00 of stage 1 to stage 0\n"
    "put messages that cross into one group, on each rank"
)


def test_messages_that_cross_finish_where_there_is_room() -> None:
    schedule = drawn(CROSSING, 2)
    found = schedule.verify(channels=[buffered(1)])
    assert found.finishes["grouped"] == CYCLE == reason(schedule, channels=[GROUPED])
    assert told(schedule) == finishing(schedule) == ["asynchronous", "1-buffered"]
    assert "finishes on asynchronous, 1-buffered channels\non grouped channels ranks wait" in str(found)
    assert "on blocking channels" in reason(schedule, channels=[BLOCKING, ASYNCHRONOUS])


def test_messages_that_cross_in_one_group_finish() -> None:
    rows = CROSSING.replace("    FS1 BS0\n    BR0 FR1\n", "    FS1+BR0 BS0+FR1\n")
    schedule = drawn(rows, 2)
    assert told(schedule) == finishing(schedule) == ["asynchronous", "1-buffered", "grouped"]
    assert "on blocking channels" in schedule.verify(channels=[GROUPED]).finishes["blocking"]


AHEAD = """
    FW0 .
    FS0 FR0
    FW1 FW0
    FS1 BW0
    FW2 BS0
    FS2 FR1
    FW3 FW1
    FS3 BW1
    BR0 BS1
    BW0 FR2
    BR1 FW2
    BW1 BW2
    .   BS2
    BR2 FR3
    BW2 FW3
    .   BW3
    BR3 BS3
    BW3 .
"""


def test_all_forwards_ahead_of_one_by_one_needs_more_room() -> None:
    """Rank 0 as in GPipe, rank 1 as in 1F1B."""
    schedule = drawn(AHEAD, 4)
    assert told(schedule) == finishing(schedule) == ["asynchronous"]
    assert (
        "rank 0 waits for rank 1 in send FS03 of stage 0 to 1"
        in schedule.verify(channels=[buffered(2)]).finishes["1-buffered"]
    )


WAITING = """
    FW0 .
    FS0 FR0
    .   FW0
    BR0 BW0
    FW1 .
    FS1 FR1
    .   FW1
    .   BS0
    .   BW1
    BR1 BS1
    BW0 .
    BW1 .
"""


def test_ranks_that_wait_for_ever_on_all_channels() -> None:
    """Rank 0 waits for a gradient before it sends on; rank 1 for that forward before it sends the gradient."""
    assert reason(drawn(WAITING, 2), channels=()) == (
        "ranks wait for each other forever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in receive BS00 of stage 1 from 1\n"
        "      row 3: BR00 of stage 0 from stage 1\n"
        "  rank 1 waits for rank 0 in receive FS01 of stage 0 from 0\n"
        "      row 5: FR01 of stage 1 from stage 0\n"
        "send earlier what another rank waits for"
    )


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "text"), [
    ("0F0,0UNSHARD,0B0,0REDUCE_GRAD",
     "row 0, rank 0: FW00 of stage 0: its parameters have not been gathered; put UNSHARD of stage 0 into an earlier "
     "row"),
    ("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD",
     "row 2, rank 0: BW00 of stage 0: RESHARD in row 1 has freed its parameters; put UNSHARD of stage 0 into an "
     "earlier row"),
    ("0UNSHARD,0F0,0UNSHARD,0B0,0REDUCE_GRAD",
     "row 1, rank 0: UNSHARD of stage 0 comes after UNSHARD in row 0; leave it out, or put RESHARD before it"),
    ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,0RESHARD",
     "row 2, rank 0: RESHARD of stage 0 comes after RESHARD in row 2; leave it out, or put UNSHARD before it"),
    ("0RESHARD,0UNSHARD,0F0,0B0,0REDUCE_GRAD",
     "row 0, rank 0: RESHARD of stage 0 has nothing to free, the stage has not been gathered; leave it out, or put "
     "UNSHARD before it"),
])  # fmt: skip
def test_parameters_are_gathered_before_they_are_used_and_freed_once(line: str, text: str) -> None:
    assert reason(PipelineSchedule.from_csv(line)) == text


def test_parameters_may_be_gathered_again_and_other_stages_need_not_be() -> None:
    again = "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD"
    assert PipelineSchedule.from_csv(again).verify().computations == 2
    assert PipelineSchedule.from_csv(again + "\n1F0,1B0,1REDUCE_GRAD").verify().computations == 4
