"""What a schedule is made of, however it is made; and files of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.pipeline import PipelineSchedule, Slot, Task, build


def test_lists_become_tuples() -> None:
    schedule = build("1f1b", 2, 3)
    other = PipelineSchedule([list(row) for row in schedule.slots], np.int64(3), iter([0, 1]), "1f1b")
    assert other == schedule and hash(other) == hash(schedule)


FORWARD, BACKWARD = Slot((Task("FW", 0, 0),)), Slot((Task("BW", 0, 0),))


@pytest.mark.parametrize(
    ("slots", "batches", "rank_of", "text"),
    [
        ([[FORWARD], [BACKWARD]], 1, (), "a schedule has at least one stage"),
        ([[FORWARD], [BACKWARD]], 1, (1,), r"the stages are on ranks \[1\]: number the ranks from 0 without gaps"),
        ([[FORWARD], [BACKWARD]], 0, (0,), "at least one micro-batch, not 0"),
        ([[FORWARD, BACKWARD]], 1, (0,), "row 0 has 2 slots, but there are 1 ranks"),
        ([[Slot((Task("FW", 1, 0),))]], 1, (0,), "row 0, rank 0: FW00 of stage 1: there is no stage 1, only 0 to 0"),
        ([[Slot((Task("FW", 0, 1),))]], 1, (0,), "there is no micro-batch 1, only 0 to 0"),
        ([[Slot(), FORWARD]], 1, (0, 1), "row 0, rank 1: FW00 of stage 0, but that stage is on rank 0"),
        (
            [[Slot((Task("QW", 0, 0),))]],
            1,
            (0,),
            r"row 0, rank 0: Task\(kind='QW', .* is no task; a Task has one of the kinds BR, BS, BW, FR, FS, FW, WW",
        ),
        ([[Slot((Task("", 0, 0),))]], 1, (0,), "is no task"),
        ([[Slot(("FW0",))]], 1, (0,), "'FW0' is no task"),
        ([[Slot(free=("x",))]], 1, (0,), "the buffer of 'x' is released, but that is no send"),
        (
            [[Slot(parameters=("REDUCE_GRAD",))]],
            1,
            (0,),
            "'REDUCE_GRAD' among the parameters must be a name and a stage",
        ),
    ],
)
def test_what_no_table_has(slots: object, batches: int, rank_of: tuple[int, ...], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        PipelineSchedule(slots, batches, rank_of)


def test_wrong_types() -> None:
    for rank_of in (None, 0, "01", [0.0], [True]):
        with pytest.raises(TypeError, match="rank_of"):
            PipelineSchedule([[FORWARD], [BACKWARD]], 1, rank_of)
    with pytest.raises(TypeError, match="row 0, rank 0: this must be a Slot with tuples of tasks, not 3"):
        PipelineSchedule([[3]], 1, (0,))
    with pytest.raises(TypeError, match="a Slot with tuples of tasks"):
        PipelineSchedule([[Slot([Task("FW", 0, 0)])]], 1, (0,))
    with pytest.raises(ScheduleError, match="the name of a schedule must be printable"):
        PipelineSchedule([[FORWARD], [BACKWARD]], 1, (0,), "a\0")
    with pytest.raises(TypeError, match="recompute is True or False, not 3"):
        build("1f1b", 2, 2, recompute=3)
    schedule = build("1f1b", 2, 2)
    with pytest.raises(TypeError, match="batch is a whole number, not '0'"):
        schedule.events("0", 0, "F")
    with pytest.raises(ScheduleError, match="there is no stage -1, only 0 to 1"):
        schedule.slot(0, -1)
    with pytest.raises(TypeError, match=r"channels are those of autopar\.verify\.channels"):
        schedule.verify(channels=["blocking"])


def test_a_slot_of_a_stage_has_that_stages_tasks() -> None:
    schedule = build("zb-v", 2, 2)
    for time, row in enumerate(schedule.slots):
        found = [task for stage in range(4) for task in schedule.slot(time, stage).tasks]
        assert sorted(found) == sorted(task for slot in row for task in slot.tasks)


def test_a_wrong_schedule_is_not_saved(tmp_path: Path) -> None:
    good = build("1f1b", 2, 2)
    wrong = PipelineSchedule(
        [row for row in good.slots if not any(task.kind == "BW" and task.batch for slot in row for task in slot.tasks)],
        2,
        (0, 1),
    )
    for name in ("a.json", "a.csv"):
        with pytest.raises(ScheduleError, match="BW01 of stage"):
            wrong.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ScheduleError, match="BW01 of stage"):
        wrong.events(0, 0, "F")


def test_files(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2, recompute=True)
    schedule.save(tmp_path / "a.json")
    assert PipelineSchedule.load(tmp_path / "a.json") == schedule
    schedule.save(tmp_path / "a.CSV")
    assert not PipelineSchedule.load(tmp_path / "a.CSV").recompute, "a CSV has no place for it"
    assert PipelineSchedule.load(tmp_path / "a.CSV", recompute=True).recompute
    (tmp_path / "b.json").write_text("\ufeff" + (tmp_path / "a.json").read_text(), encoding="utf-8")
    assert PipelineSchedule.load(tmp_path / "b.json") == schedule
    assert PipelineSchedule.from_csv("\ufeff0F0,0B0").batches == 1
    with pytest.raises(TypeError, match="JSON contains recompute itself"):
        PipelineSchedule.load(tmp_path / "a.json", recompute=True)
    with pytest.raises(ValueError, match=r"stored as \.json, or as \.csv"):
        schedule.save(tmp_path / "a.txt")
    (tmp_path / "c.csv").write_bytes(b"\xff\xfe0")
    with pytest.raises(ScheduleError, match=r"c\.csv: the file is not text in UTF-8"):
        PipelineSchedule.load(tmp_path / "c.csv")
    for options, error, text in (
        ({"batches": 0}, ScheduleError, "batches=0; there is at least one"),
        ({"ranks": "x"}, TypeError, "ranks is a whole number"),
    ):
        with pytest.raises(error, match=text):
            PipelineSchedule.from_csv("0F0,0B0", **options)
    for wrong in (None, b"{}"):
        with pytest.raises(
            TypeError, match=r"^a CSV is a text, not .*; read a file with PipelineSchedule\.load\(path\)$"
        ):
            PipelineSchedule.from_csv(wrong)
        with pytest.raises(
            TypeError, match=r"^a document is a text, not .*; read a file with PipelineSchedule\.load\(path\)$"
        ):
            PipelineSchedule.from_json(wrong)


def test_it_prints_what_it_is() -> None:
    assert str(build("1f1b", 1, 1, messages=False)) == "1f1b on 1 rank, 1 micro-batch\nFW00    BW00    "
    assert (
        repr(build("zb-v", 2, 3)) == "PipelineSchedule(batches=3, rank_of=(0, 1, 1, 0), name='zb-v', recompute=False)"
    )
    assert build("zb-v", 2, 3).title == "zb-v on 2 ranks, 4 stages, 3 micro-batches"


def test_a_slot_that_is_not_there_is_refused() -> None:
    schedule = build("1f1b", 2, 2)
    rows = len(schedule.slots)
    for time in (rows, 9999, -1):
        with pytest.raises(
            ScheduleError,
            match=rf"^there is no row {time}, only 0 to {rows - 1}; len\(schedule\.slots\) is the number of rows$",
        ):
            schedule.slot(time, 0)
    for stage in (2, -1):
        with pytest.raises(ScheduleError, match=rf"^there is no stage {stage}, only 0 to 1$"):
            schedule.slot(0, stage)
    with pytest.raises(TypeError, match=r"^slot: time is a whole number, not 0\.5$"):
        schedule.slot(0.5, 0)
    assert schedule.slot(rows - 1, 0) == schedule.slot(rows - 1, 0) and schedule.slot(0, 0).compute
    with pytest.raises(ScheduleError, match=r"^there is no row 0, since the schedule is empty; "):
        PipelineSchedule((), 1, (0,)).slot(0, 0)
