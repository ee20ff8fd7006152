"""What the steps of captures run is known by objects that live as long as it does; a wrong timetable is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

from autopar.errors import VerifyError
from autopar.step.running import KnownRuns, StepRuns
from autopar.timetable import Entry, Position, Timetable


class _Micro:
    """Stands for a compiled micro-batch."""


def _runs(*lines: Entry) -> StepRuns:
    table = Timetable(1, (Position((0,), (), lines),))
    return StepRuns(table, table, None, {}, (), {None: {}}, {None: {}}, cast(Any, None))


MICRO = Entry("micro", batch=0, takes=("inputs",), hands=("sums",))


def test_no_later_object_gets_the_runs_of_a_dropped_one() -> None:
    known, micro = KnownRuns(), _Micro()
    runs = known.of(micro, None, lambda: _runs(MICRO))
    assert known.of(micro, None, lambda: _runs(MICRO)) is runs
    alive = weakref.ref(micro)
    del micro
    gc.collect()
    assert alive() is not None
    known.clear()
    gc.collect()
    assert alive() is None


def test_a_step_is_refused_whose_timetable_is_wrong() -> None:
    with pytest.raises(VerifyError, match="takes sums, and no run before it hands them on"):
        _runs(Entry("micro", batch=0, takes=("inputs", "sums")))
