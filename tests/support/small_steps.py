"""Make small random steps, and find the shortest of all orders by trying each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

from autopar.scheduling import Line, Op, Part, simulate
from autopar.scheduling.simulation import Issue

STREAMS = ("compute", "compute", "dp", "tp")


def random_step(random: random.Random, ops: int, startup: float = 0.0, *, whole: bool = False) -> list[Op]:
    """Return ops that read earlier ones. ``whole``: no collective can be cut or fused."""
    made = []
    for i in range(ops):
        stream = random.choice(STREAMS)
        communicates = stream != "compute"
        made.append(
            Op(
                f"op{i}",
                stream,
                random.randint(0, 6) + startup * communicates,
                tuple(f"op{j}" for j in range(i) if random.random() < 0.3),
                bytes=random.randint(1, 8) if communicates and not whole else 0,
                memory=random.randint(0, 4),
            )
        )
    return made


def orders(ops: list[Op]) -> Iterator[list[Op]]:
    """Yield each order in which every op stands after what it reads."""

    def extend(order: list[Op]) -> Iterator[list[Op]]:
        names = {op.name for op in order}
        if len(order) == len(ops):
            yield order
        for op in ops:
            if op.name not in names and names.issuperset(op.before):
                yield from extend([*order, op])

    return extend([])


def lines_of(order: list[Op]) -> list[Line]:
    """Return the lines of an order, with each wait right before the first reader."""
    lines: list[Line] = []
    under_way: dict[str, tuple[Part, ...]] = {}

    def wait(names: list[str]) -> None:
        lines.extend(Line("wait", under_way.pop(name)) for name in names if name in under_way)

    for op in order:
        wait(list(op.before))
        part = (Part(op.name, 0, 0 if op.computes else op.bytes),)
        lines.append(Line("compute" if op.computes else "start", part))
        if not op.computes:
            under_way[op.name] = part
    wait(list(under_way))
    return lines


def alive(ops: list[Op], lines: list[Line] | tuple[Line, ...]) -> int:
    """Return the most bytes of results alive in a line, counted line by line."""
    first = {part.op: place for place, line in reversed(list(enumerate(lines))) for part in line.parts}
    last = {part.op: place for place, line in enumerate(lines) for part in line.parts}
    readers = {op.name: [other.name for other in ops if op.name in other.after] for op in ops}
    until = {name: max([last[reader] for reader in some], default=len(lines)) for name, some in readers.items()}
    return max(
        (sum(op.memory for op in ops if first[op.name] <= place <= until[op.name]) for place in range(len(lines))),
        default=0,
    )


def shortest(ops: list[Op], issue: Issue, startup: float, memory: float = inf) -> float:
    """Return the seconds of the shortest order of whole collectives that fits into the memory."""
    found = inf
    for order in orders(ops):
        lines = lines_of(order)
        if alive(ops, lines) <= memory:
            found = min(found, simulate(ops, lines, issue, startup=startup).makespan)
    return found
