"""Write the order in which a program runs as JSON, and read it back; the times of schedules are read when asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, overload

from autopar.scheduling.lines import KINDS, Line, Part
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.order import Order
from autopar.scheduling.scheduled import Schedule
from autopar.scheduling.simulation import Simulation, Span


def order_to_json(order: Order) -> dict[str, Any]:
    return {
        "functions": [
            [list(each.phases), _lines(each.lines), sorted(each.late), each.stage] for each in order.functions
        ],
        "schedules": json.dumps(list(map(_schedule, order.schedules)), separators=(",", ":")),
        "source": order.source,
        "across": list(order.across),
    }


def order_of(content: Mapping[str, Any]) -> Order:
    functions = tuple(
        FunctionLines(tuple(phases), _lines_of(lines), frozenset(late), stage)
        for phases, lines, late, stage in content["functions"]
    )
    schedules: Any = Schedules(content["schedules"], len(functions))
    return Order(functions, schedules, content["source"], tuple(content["across"]))


def _lines(lines: Sequence[Line]) -> list[Any]:
    """Return the lines; an op that computes is one part, and begins with its name."""
    return [[KINDS.index(line.kind), *(value for part in line.parts for value in part)] for line in lines]


def _lines_of(rows: Sequence[Sequence[Any]]) -> tuple[Line, ...]:
    return tuple(Line(KINDS[row[0]], _parts(row[1:])) for row in rows)


def _parts(values: Sequence[Any]) -> tuple[Part, ...]:
    if len(values) == 3:
        return (Part(*values),)
    return tuple(Part(*values[k : k + 3]) for k in range(0, len(values), 3))


def _schedule(made: Schedule) -> list[Any]:
    spans = [[[list(part) for part in span.parts], span.stream, span.begin, span.end] for span in made.spans]
    return [
        made.policy, made.issue, _lines(made.lines), spans, made.makespan, made.exposed, made.bound, made.memory,
        sorted(made.late), made.start_seconds,
    ]  # fmt: skip


def _schedule_of(row: Sequence[Any]) -> Schedule:
    policy, issue, lines, spans, makespan, exposed, bound, memory, late, start_seconds = row
    simulation = Simulation(
        tuple(Span(tuple(Part(*part) for part in parts), *rest) for parts, *rest in spans), makespan, exposed
    )
    return Schedule(policy, issue, _lines_of(lines), simulation, bound, memory, frozenset(late), start_seconds)


class Schedules(Sequence[Schedule]):
    """The schedules of an order, which are read from their text once somebody asks for one."""

    def __init__(self, text: str, count: int) -> None:
        self._text, self._count = text, count
        self._read: tuple[Schedule, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Schedule: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Schedule]: ...

    def __getitem__(self, index: int | slice) -> Schedule | Sequence[Schedule]:
        if self._read is None:
            self._read = tuple(map(_schedule_of, json.loads(self._text)))
        return self._read[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
