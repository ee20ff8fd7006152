"""Timetables as text: what each rule makes of them, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import TextError, VerifyError
from autopar.pipeline import POLICIES, Slot, build
from autopar.pipeline.lowering import with_frees
from autopar.timetable import Entry, Position, Timetable
from autopar.timetable.entry import GROUPS, Line
from autopar.timetable.rules import cross, empty, end_of_crossing, hoist_counts, join_update, of_step

Rule = Callable[[Sequence[Line]], Sequence[Line]]


def text(lines: Sequence[Line], batches: int = 3) -> str:
    """The lines of a table of two ranks, without its head."""
    table = Timetable(batches, (Position((0, 1), (), tuple(lines)),))
    assert Timetable.parse(str(table)) == table
    return "\n".join(line.strip() for line in str(table).splitlines()[2:])


def lines(written: str) -> tuple[Line, ...]:
    rows = "\n".join(f"  {line.strip()}" for line in written.strip().splitlines())
    return Timetable.parse(f"timetable of 3 micro-batches, 1 stage\nranks 0 1\n{rows}").positions[0].lines


STEP = """\
copy hands copies
count takes batches hands counts
micro 0 takes inputs copies counts hands sums
micro 1 takes inputs copies counts sums hands sums
micro 2 takes inputs copies counts sums hands sums
update takes sums"""
HOISTED = """\
copy hands copies
first 0 takes batches inputs copies hands counts sums
micro 1 takes inputs copies counts sums hands sums
micro 2 takes inputs copies counts sums hands sums
update takes sums"""
JOINED = """\
copy hands copies
first 0 takes batches inputs copies hands counts sums
inner 1 takes inputs copies counts sums hands sums
last 2 takes inputs copies counts sums"""
BEHIND = """\
turn.first 0 takes batches inputs started hands copies counts sums
inner 1 takes inputs copies counts sums hands sums
turn.last 2 takes inputs copies counts sums hands started"""
ALONE = """\
copy hands copies
turn.first_alone 0 takes batches inputs copies hands counts sums
inner 1 takes inputs copies counts sums hands sums
turn.last 2 takes inputs copies counts sums hands started"""
EMPTIED = """\
copy hands copies
first 0 takes batches inputs copies hands counts sums empties batches inputs
inner 1 takes inputs copies counts sums hands sums empties inputs
last 2 takes inputs copies counts sums empties inputs copies counts"""
RULES: list[tuple[Rule, str, str]] = [
    (hoist_counts, STEP, HOISTED), (join_update, HOISTED, JOINED), (lambda rows: cross(rows, True), JOINED, BEHIND),
    (lambda rows: cross(rows, False), JOINED, ALONE), (empty, JOINED, EMPTIED), (empty, EMPTIED, EMPTIED),
    (hoist_counts, "micro 0 takes inputs hands sums\nupdate takes sums",
     "micro 0 takes inputs hands sums\nupdate takes sums"),
    (join_update, "micro 0 takes inputs hands sums\nupdate takes sums", "last 0 takes inputs"),
    (lambda rows: cross(rows, True), "last 0 takes inputs", "turn 0 takes inputs started hands started"),
    (lambda rows: cross(rows, False), "last 0 takes inputs", "turn.begin 0 takes inputs hands started"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(RULES)))
def test_rules(number: int) -> None:
    rule, before, after = RULES[number]
    assert text(rule(lines(before))) == after


def test_the_lines_of_a_step() -> None:
    assert text(of_step(3, copy=True, count=True)) == STEP
    assert text(of_step(1), 1) == "micro 0 takes inputs hands sums\nupdate takes sums"
    assert text(end_of_crossing(), 0) == "turn.finish takes started"


@given(batches=st.integers(1, 6), copy=st.booleans(), count=st.booleans(), behind=st.sampled_from((None, True, False)))
def test_rules_keep_the_batches_and_what_is_handed_on(batches: int, copy: bool, count: bool, behind: Any) -> None:
    made: Sequence[Line] = of_step(batches, copy=copy, count=count and batches > 1)
    for rule in (hoist_counts, join_update, lambda rows: rows if behind is None else cross(rows, behind), empty):
        made = rule(made)
        table = Timetable(batches, (Position((0,), (), tuple(made)),))
        table.verify()
        assert Timetable.parse(str(table)) == table
        assert [line.batch for line in made if isinstance(line, Entry) and line.batch is not None] == [*range(batches)]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_slots_of_schedules(policy: str) -> None:
    """Each task, release and action on parameters is printed, and parsed."""
    schedule = with_frees(build(policy, 3, 6))
    positions = []
    for at, stages in enumerate(schedule.stages_of):
        slots = [row[at] for row in schedule.slots if row[at]]
        positions.append(Position((at,), stages, (Entry("copy", stage=stages[0], hands=("copies",)), *slots)))
    table = Timetable(6, tuple(positions), schedule.name)
    table.verify()
    again = Timetable.parse(str(table))
    assert again == table and again.stages == schedule.stages
    found = [line.tasks for position in again.positions for line in position.lines if isinstance(line, Slot)]
    assert sum(map(len, found)) == sum(len(slot.tasks) for row in schedule.slots for slot in row)


NAMES = st.text("abcdefgh", min_size=1, max_size=6).filter(lambda name: name not in ("free", "takes"))
CHOSEN = st.lists(st.sampled_from(list(GROUPS)), unique=True).map(lambda found: tuple(g for g in GROUPS if g in found))


@given(program=NAMES, part=st.sampled_from(("whole", "forward", "first alone")), stage=st.none() | st.integers(0, 99),
       batch=st.none() | st.integers(0, 99), takes=CHOSEN, hands=CHOSEN, empties=CHOSEN)  # fmt: skip
def test_lines_print_and_parse(**fields: Any) -> None:
    entry = Entry(**fields)
    assert text([entry]) == str(entry)


@pytest.mark.parametrize(("written", "words"), [
    ("update takes sums", "update takes sums\n  takes sums, and no run before it hands them on"),
    ("copy hands copies\nmicro 0 takes inputs copies empties inputs copies\nmicro 1 takes inputs copies",
     "micro 1 takes inputs copies\n  takes copies, which were freed by an earlier run:\nmicro 0 takes inputs copies "
     "empties inputs copies"),
    ("micro 0 takes inputs empties sums", "micro 0 takes inputs empties sums\n  empties sums, which it does not take"),
    ("micro 0 takes inputs\nmicro 1 takes inputs\nmicro 1 takes inputs",
     "micro-batch 1 runs 2 times, and each runs once"),
    ("micro 0 takes inputs\nmicro 1 takes inputs", "micro-batch 2 runs 0 times, and each runs once"),
])  # fmt: skip
def test_what_is_wrong_is_quoted(written: str, words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        Timetable(3, (Position((0,), (), lines(written)),)).verify()
    assert str(caught.value) == words


ONE, TWO = "timetable of 1 micro-batch, 1 stage", "timetable of 3 micro-batches, 2 stages"
RANKS = "the ranks of a position are written as 'ranks 0-3' or 'ranks 0 1, stage 0', before its lines"


@pytest.mark.parametrize(("written", "words"), [
    ("table of 3", "line 1: the header is 'timetable of 4 micro-batches, 1 stage'\n    table of 3"),
    (f"{ONE}\n  copy", f"line 2: {RANKS}\n      copy"),
    (f"{ONE}\nranks a", f"line 2: {RANKS}\n    ranks a"),
    (f"{ONE}\nranks 1-", "line 2: '1-' is neither a rank nor ranks, as 0-3 or 1-9:2\n    ranks 1-"),
    (f"{TWO}\nranks 0, stage 0", f"line 1: the timetable has 1 stages\n    {TWO}"),
    (f"{ONE}\nranks 0\n  FX00@1", "line 3: 'FX00@1' in 'FX00@1' is no task: a task is written as FW00@1, FS00@1>2 or "
     "FR00@1<0\n      FX00@1"),
    (f"{ONE}\nranks 0\n  micro 0 takes hats", "line 3: 'hats' in 'micro 0 takes hats' is none of "
     f"{', '.join(GROUPS)}, behind takes, hands, empties\n      micro 0 takes hats"),
    (f"{ONE}\nranks 0\n  micro! 0", "line 3: a run is written as 'inner 1 takes counts sums hands sums', and not "
     "'micro! 0'\n      micro! 0"),
])  # fmt: skip
def test_text_that_is_no_timetable(written: str, words: str) -> None:
    with pytest.raises(TextError) as caught:
        Timetable.parse(written)
    assert str(caught.value) == words


def test_ranks() -> None:
    table = Timetable(0, (Position((0, 1, 2, 3), (0,), ()), Position((4, 6, 8), (1,), (Entry("call"),))))
    assert Timetable.parse(str(table)) == table and "ranks 4-8:2, stage 1" in str(table)
    assert table.of(6) == (Entry("call"),) and table.of(0) == ()
    with pytest.raises(ValueError, match=r"the timetable has no rank 5; it is of 0-4 6 8"):
        table.of(5)
