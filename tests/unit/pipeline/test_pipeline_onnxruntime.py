"""ONNX Runtime's schedule: its tables and events, written down and from its rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline import PipelineSchedule, build

COMPUTE = """\
FW00    FW01    FW02                    BW00    FW03    BW01            BW02            BW03    
        FW00    FW01    FW02    BW00            BW01    FW03    BW02            BW03            
                FW00    BW00    FW01    BW01    FW02    BW02    FW03    BW03                    
"""
WITH_MESSAGES = """\
FW00    FS00    FW01    FS01    FW02    FS02                            BR00    BW00            FW03    BR01FS03BW01                    BR02    BW02                    BR03    BW03    
        FR00    FW00    FR01FS00FW01    FR02    FW02    BR00FS01BW00    BS00            BR01FS02BW01    BS01FR03FW03    BR02FS03BW02    BS02            BR03    BW03    BS03            
                        FR00    FW00            BW00    BS00FR01FW01            BW01    BS01FR02FW02            BW02    BS02FR03FW03            BW03    BS03                            
"""  # noqa: E501  # fmt: skip


# pass, stage: for each micro-batch what its slots wait for and record
# written down from this library, so that they stay; test_the_published_events has those that are published
EVENTS = """\
F 0: -1 -1 0 1 | 0 1 2 3 | 2 3 4 5 | 6 7 8 9 | 10 11 12 13 | 14 15 16 17 | 18 19 20 21 | 22 23 24 25
F 1: -1 -1 0 1 | 0 1 2 3 | 2 3 4 5 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | 20 21 22 23 | 24 25 26 27
F 2: -1 -1 0 1 | 2 3 4 5 | 6 7 8 9 | 10 11 12 13 | 14 15 16 17 | 18 19 20 21 | 22 23 24 25 | 26 27 28 29
B 0: 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | 20 21 22 23 | 24 25 26 27 | 26 27 28 29 | 28 29 30 31
B 1: 4 5 6 7 | 6 7 8 9 | 10 11 12 13 | 14 15 16 17 | 18 19 20 21 | 22 23 24 25 | 26 27 28 29 | 28 29 30 31
B 2: 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | 20 21 22 23 | 24 25 26 27 | 28 29 30 31
"""
EVENTS_WITH_MESSAGES = """\
F 0: -1 -1 -1 0 0 1 | -1 -1 1 2 2 3 | -1 -1 3 4 4 5 | -1 -1 7 8 8 9 | -1 -1 10 11 11 12
F 1: -1 0 0 1 1 2 | 1 2 2 3 5 6 | 3 4 4 5 8 9 | 10 11 11 12 12 13 | 14 15 15 16 16 17
F 2: -1 0 0 1 -1 -1 | 2 3 3 4 -1 -1 | 5 6 6 7 -1 -1 | 8 9 9 10 -1 -1 | 11 12 12 13 -1 -1
B 0: 5 6 6 7 -1 -1 | 8 9 9 10 -1 -1 | 11 12 12 13 -1 -1 | 13 14 14 15 -1 -1 | 15 16 16 17 -1 -1
B 1: 5 6 6 7 7 8 | 8 9 9 10 10 11 | 12 13 13 14 14 15 | 16 17 17 18 18 19 | 19 20 20 21 21 22
B 2: -1 -1 1 2 2 3 | -1 -1 4 5 5 6 | -1 -1 7 8 8 9 | -1 -1 10 11 11 12 | -1 -1 13 14 14 15
"""


def printed(schedule: PipelineSchedule, messages: bool) -> str:
    table = schedule.compute_comm_table if messages else schedule.compute_table
    return "".join("".join(str(row[rank]) for row in table) + "\n" for rank in range(schedule.ranks))


def test_the_tables_of_three_stages_and_four_micro_batches() -> None:
    schedule = build("onnxruntime", 3, 4)
    assert printed(schedule, False) == COMPUTE
    assert printed(schedule, True) == WITH_MESSAGES


def test_the_published_events() -> None:
    """Eight micro-batches on three stages."""
    schedule = build("onnxruntime", 3, 8)
    assert [schedule.events(batch, 2, "F").compute for batch in range(5)] == [
        (-1, -1, 0, 1), (2, 3, 4, 5), (6, 7, 8, 9), (10, 11, 12, 13), (14, 15, 16, 17),
    ]  # fmt: skip
    assert [schedule.events(batch, 1, "B").compute for batch in (6, 7)] == [(26, 27, 28, 29), (28, 29, 30, 31)]
    record = schedule.events(0, 2, "F")
    assert (record.recv_wait, record.recv_record, record.compute_wait, record.compute_record) == (-1, 0, 0, 1)
    assert (record.send_wait, record.send_record) == (-1, -1), "the last stage sends nothing forward"
    assert schedule.events(3, 1, "F").comm == (10, 11, 11, 12, 12, 13)
    assert schedule.events(3, 2, "B").comm == (-1, -1, 10, 11, 11, 12)


def test_all_event_numbers() -> None:
    """Of eight micro-batches in the table of computations, and of five in that with messages."""
    count = 0
    for text, batches, numbers in ((EVENTS, 8, "compute"), (EVENTS_WITH_MESSAGES, 5, "comm")):
        schedule = build("onnxruntime", 3, batches)
        for line in text.splitlines():
            head, rows = line.split(": ")
            direction, stage = head.split()
            for batch, row in enumerate(rows.split(" | ")):
                wanted = tuple(map(int, row.split()))
                assert getattr(schedule.events(batch, int(stage), direction), numbers) == wanted
                count += len(wanted)
    assert count == 8 * 3 * 2 * 4 + 5 * 3 * 2 * 6 == 372


@pytest.mark.simulated
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 30))
def test_events_follow_the_slots_of_a_rank(stages: int, batches: int) -> None:
    """A slot waits for what the slot before it recorded; in the table of computations there are two of each."""
    schedule = build("onnxruntime", stages, batches)
    for table, each in ((schedule.compute_table, 2), (schedule.compute_comm_table, 1)):
        for rank in range(stages):
            busy = [row[rank] for row in table if row[rank].tasks]
            for k, slot in enumerate(busy):
                assert slot.records == tuple(range(k * each, (k + 1) * each))
                assert slot.waits == (tuple(n - each for n in slot.records) if k else (-1,) * each)
                for task in slot.tasks:
                    record = schedule.events(task.batch, task.stage, task.of)
                    if each == 2:
                        assert record.compute == (*slot.waits, *slot.records)
                    else:
                        pair = 2 * "RWS".index(task.action)
                        assert record.comm[pair : pair + 2] == (*slot.waits, *slot.records)


def first_fit(stages: int, batches: int) -> dict[tuple[str, int, int], int]:
    """The rules again, batch by batch: kind, stage, micro-batch → time."""
    when: dict[tuple[str, int, int], int] = {}
    ranges: list[range] = []
    for batch in range(batches):
        way = [("FW", s) for s in range(stages)] + [("BW", s) for s in reversed(range(stages))]
        reached = -1
        for kind, stage in way:
            time = reached + 1
            while (
                any(t == time and key[1] == stage for key, t in when.items())
                or (kind == "FW" and batch and time <= when["FW", stage, batch - 1])
                or sum(time in live for live in ranges) >= stages
            ):
                time += 1
            reached = when[kind, stage, batch] = time
        ranges.append(range(when["FW", 0, batch], reached + 1))
    return when


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 7), st.integers(1, 14))
def test_the_compute_table_is_first_fit(stages: int, batches: int) -> None:
    table = build("onnxruntime", stages, batches).compute_table
    assert len(table) == 2 * stages + 2 * (batches - 1)
    found = {
        (task.kind, task.stage, task.batch): time
        for time, row in enumerate(table)
        for slot in row
        for task in slot.tasks
    }
    assert found == first_fit(stages, batches)


@pytest.mark.simulated
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 7), st.integers(1, 14))
def test_messages_stand_in_the_newest_row_that_may_have_them(stages: int, batches: int) -> None:
    schedule = build("onnxruntime", stages, batches)
    table = schedule.compute_comm_table
    assert len(table) == 2 * (2 * stages + 2 * (batches - 1)) - 1
    assert all(not slot.messages for row in table[::2] for slot in row)
    assert all(not slot.compute for row in table[1::2] for slot in row)
    time = {task: t for t, row in enumerate(table) for slot in row for task in slot.tasks}
    for task, t in time.items():
        if task.kind[1] == "R":
            use = next(time[one] for one in time if one.kind == task.kind[0] + "W" and one[1:3] == task[1:3])
            for newer in range(t + 2, use, 2):  # a newer row has something from that stage, or to this one
                assert any(
                    (one.kind[1] == "R" and one.peer == task.peer) or (one.kind[1] == "S" and one.peer == task.stage)
                    for slot in table[newer] for one in slot.tasks
                )  # fmt: skip
            send = next(
                one
                for one in time
                if one.kind == task.kind[0] + "S" and one.batch == task.batch and one.peer == task.stage
            )
            assert time[send] == t and send.stage == task.peer


@pytest.mark.long
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(20, 30))
def test_its_memory_is_not_that_of_1f1b(stages: int, batches: int) -> None:
    simulation = build("onnxruntime", stages, batches).simulate()
    assert simulation.makespan == build("1f1b", stages, batches).simulate().makespan
    assert simulation.memory.live == tuple(min(stages, 2 * (stages - s) - 1) for s in range(stages))


def test_there_are_no_events_of_what_is_not_there() -> None:
    schedule = build("onnxruntime", 2, 2)
    for batch, stage, of in ((2, 0, "F"), (0, 2, "B"), (0, 0, "W"), (0, 0, "X")):
        with pytest.raises(ScheduleError, match=f"no {of}W0{batch} on stage {stage}; a pass is F"):
            schedule.events(batch, stage, of)
