"""Check a timetable: what a run takes was handed on before, and each micro-batch runs once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.errors import VerifyError
from autopar.timetable.entry import GROUPS, Entry, Line

GIVEN = ("batches", "inputs", "started")  # what is there when a step begins
MICRO = ("micro", "first", "inner", "last", "turn")  # programs that are a micro-batch, or have one


def check(lines: Sequence[Line], batches: int) -> None:
    """Check the lines of one position. Linear in them.

    Raises:
        VerifyError: a run takes what no run before it hands on, or what one has freed; or a micro-batch does not run
            once. It quotes the line.
    """
    there: set[object] = set()
    freed: dict[object, Entry] = {}
    for line in lines:
        if not isinstance(line, Entry):
            there |= {("sums", stage) for task in line.compute for stage in (task.stage, None)}
            there |= {("outputs", None)} if line.compute else set()
            continue
        for group in (*line.takes, *line.hands, *line.empties):
            if group not in GROUPS:
                raise VerifyError(f"{line}\n  there is no {group!r}; runs hand on {', '.join(GROUPS)}")
        for group in line.takes:
            box = _box(line, group)
            if box in freed:
                raise VerifyError(f"{line}\n  takes {group}, which were freed by an earlier run:\n{freed[box]}")
            if group not in GIVEN and not {box, (group, None)} & there:  # without a stage: a message has brought them
                raise VerifyError(f"{line}\n  takes {group}, and no run before it hands them on")
        if left := [group for group in line.empties if group not in line.takes]:
            raise VerifyError(f"{line}\n  empties {left[0]}, which it does not take")
        for group in line.empties:
            freed[_box(line, group)] = line
        for group in line.hands:
            there |= {_box(line, group), (group, None)}
            freed.pop(_box(line, group), None)
    entries = [line for line in lines if isinstance(line, Entry) and line.batch is not None]
    runs = Counter(line.batch for line in entries if line.program in MICRO)
    for batch in range(batches) if runs else ():
        if runs[batch] != 1:
            raise VerifyError(f"micro-batch {batch} runs {runs[batch]} times, and each runs once")


def _box(line: Entry, group: str) -> tuple[object, ...]:
    """Return what identifies the values of a group: those of a stage, of one micro-batch if they are its inputs."""
    return (group, line.stage, line.batch) if group in ("inputs", "kept") else (group, line.stage)
