"""Put the updates of parameters that nothing reads at the end of a schedule, so that they run as one op.

wait w_dp                      wait w_dp
compute adamw                  wait v_dp
wait v_dp               →      compute adamw
compute adamw_1                compute adamw_1
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


def with_waits(ops: Sequence[Op], issued: Sequence[Line]) -> list[Line]:
    """Return lines that compute and start with the waits that they need: each before the first reader, the others at
    the end."""
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
