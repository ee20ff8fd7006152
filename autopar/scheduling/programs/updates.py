"""Move updates of parameters side by side, so that they run as one op; those that no op reads, to the end.

wait w_dp                      wait w_dp
compute adamw                  wait v_dp
wait v_dp               →      compute adamw
compute adamw_1                compute adamw_1
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from autopar.scheduling.lines import Line
from autopar.scheduling.op import Op


def updates_last(ops: Sequence[Op], lines: Sequence[Line], updates: Collection[str]) -> list[Line]:
    """Return the lines with the given ops at the end, in their order, and waits before first readers. Linear.

    Args:
        updates: ops that no other op reads.
    """
    issued = [line for line in lines if line.kind != "wait"]
    moved = [line for line in issued if line.parts[0].op in updates]
    return with_waits(ops, [*(line for line in issued if line.parts[0].op not in updates), *moved])


def side_by_side(ops: Sequence[Op], lines: Sequence[Line], numbers: Mapping[str, object]) -> list[Line]:
    """Return the lines with updates of equal numbers side by side, where only updates stand between them. Linear.

    Args:
        numbers: update → what updates that run as one op have in common.
    """
    reads = {op.name: op.before for op in ops}
    ordered: list[Line] = []
    for is_update, run in itertools.groupby(lines, lambda line: line.kind == "compute" and line.parts[0].op in numbers):
        members = list(run)
        if is_update:
            groups: dict[object, list[Line]] = {}
            for line in members:
                groups.setdefault(numbers[line.parts[0].op], []).append(line)
            sorted_ = [line for group in groups.values() for line in group]
            place = {line.parts[0].op: k for k, line in enumerate(sorted_)}
            if all(place.get(name, -1) < place[op] for op in place for name in reads[op]):
                members = sorted_
        ordered += members
    return ordered


def with_waits(ops: Sequence[Op], issued: Sequence[Line]) -> list[Line]:
    """Return computations and starts with their waits: each before the first reader of its message, or at the end if
    no op reads it."""
    reads = {op.name: op.before for op in ops}
    open_: dict[str, list[Line]] = {}  # op → its messages that nothing has waited for
    waited: set[Line] = set()
    lines: list[Line] = []

    def wait(name: str) -> None:
        for message in open_.pop(name, ()):
            if message not in waited:
                waited.add(message)
                lines.append(Line("wait", message.parts))

    for line in issued:
        for part in line.parts:
            for name in reads[part.op]:
                wait(name)
        lines.append(line)
        if line.kind == "start":
            for part in line.parts:
                open_.setdefault(part.op, []).append(line)
    for name in list(open_):
        wait(name)
    return lines
