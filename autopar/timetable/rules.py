"""Change a timetable by rules, each of which takes the lines of one position: join runs, shift them, empty boxes.

The programs that several runs become one of are made elsewhere (``step.compiling.merged_programs``, ``step.across``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.timetable.entry import Entry, Line


def of_step(batches: int, *, copy: bool = False, count: bool = False) -> list[Line]:
    """Return the lines of a step on one stage: each program once, and ``micro`` once for each micro-batch.

        copy hands copies
        count takes batches hands counts
        micro 0 takes inputs copies counts hands sums
        micro 1 takes inputs copies counts sums hands sums
        update takes sums

    Args:
        copy: whether parameters have low-precision copies.
        count: whether the losses are divided by counts of all micro-batches.
    """
    made = ("copies",) * copy + ("counts",) * count
    lines: list[Line] = [Entry("copy", hands=("copies",))] * copy
    lines += [Entry("count", takes=("batches",), hands=("counts",))] * count
    for batch in range(batches):
        takes = ("inputs", *made, *(("sums",) if batch else ()))
        lines.append(Entry("micro", batch=batch, takes=takes, hands=("sums",)))
    return [*lines, Entry("update", takes=("sums",))]


def hoist_counts(lines: Sequence[Line]) -> list[Line]:
    """Run the counts together with the first of several micro-batches, so that they are reduced while it computes.

    count takes batches hands counts
    micro 0 takes inputs counts hands sums        →     first 0 takes batches inputs hands counts sums
    micro 1 takes inputs counts sums hands sums         micro 1 takes inputs counts sums hands sums
    """
    names = [line.program for line in lines if isinstance(line, Entry)]
    if "count" not in names or names.count("micro") < 2:
        return list(lines)
    joined: list[Line] = []
    for line in lines:
        if isinstance(line, Entry) and line.what == ("micro", "whole") and line.batch == 0:
            line = line._replace(program="first").with_groups(
                takes={"batches", *line.takes} - {"counts"}, hands={"counts", *line.hands}
            )
        if not (isinstance(line, Entry) and line.program == "count"):
            joined.append(line)
    return joined


def join_update(lines: Sequence[Line]) -> list[Line]:
    """Run the last micro-batch together with the update, so that gradients are reduced while the backward goes on.

        micro 0 takes inputs hands sums               →     inner 0 takes inputs hands sums
        micro 1 takes inputs sums hands sums                last 1 takes inputs sums
        update takes sums

    The micro-batches between the first and the last one are called inner ones.
    """
    *others, update = lines
    *others, last = others
    assert isinstance(update, Entry) and isinstance(last, Entry)
    inner = (
        line._replace(program="inner") if isinstance(line, Entry) and line.program == "micro" else line
        for line in others
    )
    return [*inner, last._replace(program="last", hands=update.hands)]


def cross(lines: Sequence[Line], behind: bool) -> list[Line]:
    """Shift a step over its end: its last collectives are started, and the next step waits for them.

        copy hands copies                             →     turn.first 0 takes inputs started hands copies sums
        inner 0 takes inputs copies hands sums              inner 1 takes inputs copies sums hands sums
        inner 1 takes inputs copies sums hands sums         turn.last 2 takes inputs copies sums hands started
        last 2 takes inputs copies sums

    ``behind``: whether a step before has left something under way. Without one, the first run leaves out the end of
    that step, and the copies are made as in any step.
    """
    names = [line.program for line in lines if isinstance(line, Entry)]
    runs = [line for line in lines if isinstance(line, Entry) and line.batch is not None]
    copies = {"copies"} if "copy" in names and behind else set()  # the step makes them when the last one has ended
    shifted: list[Line] = []
    for line in lines:
        if line is runs[0]:
            takes = {*runs[0].takes} - copies | ({"started"} if behind else set())
            if len(runs) == 1:
                part, hands = "whole" if behind else "begin", {"started"}
            else:
                part, hands = "first" if behind else "first alone", {*runs[0].hands} | copies
            line = Entry("turn", part, batch=0).with_groups(takes=takes, hands=hands)
        elif line is runs[-1]:
            line = Entry("turn", "last", batch=runs[-1].batch, takes=runs[-1].takes, hands=("started",))
        if not (behind and isinstance(line, Entry) and line.program == "copy"):
            shifted.append(line)
    return shifted


def cross_update(lines: Sequence[Line], *, behind: bool) -> list[Line]:
    """Shift a step whose micro-batches are slots over its end: the next step begins with the end of its update.

        copy hands copies                             →     turn.finish takes started
        FW00@0                                              copy hands copies
        …                                                   FW00@0
        update takes sums                                   …
                                                            turn.last takes sums hands started

    ``behind``: as of ``cross``.
    """
    *others, update = lines
    assert isinstance(update, Entry)
    last = update._replace(program="turn", part="last", hands=("started",))
    return [*(end_of_crossing() if behind else []), *others, last]


def end_of_crossing() -> list[Line]:
    """Return the lines that complete a step that has left something under way."""
    return [Entry("turn", "finish", takes=("started",))]


def empty(lines: Sequence[Line]) -> list[Line]:
    """Let the last run that takes something free its memory while it goes on, instead of when the step ends.

        inner 0 takes inputs copies hands sums        →     inner 0 takes inputs copies hands sums empties inputs
        last 1 takes inputs copies sums                     last 1 takes inputs copies sums empties inputs copies

    Inputs belong to one micro-batch. Sums are replaced by each run that takes them, and are never kept.
    """
    emptied: list[Line] = []
    taken: set[object] = set()
    for line in reversed(lines):
        if isinstance(line, Entry):
            kept = {group: (group, line.batch if group == "inputs" else None, line.stage) for group in line.takes}
            free = tuple(group for group in line.takes if group != "sums" and kept[group] not in taken)
            taken |= set(kept.values())
            line = line._replace(empties=free)
        emptied.append(line)
    return emptied[::-1]
