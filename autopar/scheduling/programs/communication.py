"""Report how the communication of a call or a step is scheduled: makespan, bound, and exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Column, Table

from autopar.notebook import TableReport, printed
from autopar.scheduling.programs.order import Order
from autopar.scheduling.simulation import Schedule

APPROXIMATE = "approximate: gloo may end collectives of a group in another order than that in which they start"


@dataclass(frozen=True)
class CommunicationPart:
    """One function, and how often it runs.

    Attributes:
        name: the part of the step, and the phases: ``last: forward backward update``.
        times: how often it runs.
        schedule: its schedule, with the bound.
    """

    name: str
    times: int
    schedule: Schedule


@dataclass(frozen=True, repr=False)
class Communication(TableReport):
    """The schedules of all functions of a call or a step; prints as a table. Times are in seconds.

    Functions run one after the other, and each is complete when it ends. So times and bounds add up.

    Attributes:
        parts: the functions, in the order in which they run.
        source: where the durations are from, in words.
        approximate: whether collectives of a stream may end in another order than that in which they start, as on bare
            gloo. The simulated streams are in order.
        notes: remarks.
    """

    parts: tuple[CommunicationPart, ...]
    source: str = ""
    approximate: bool = False
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        orders: Mapping[str, tuple[Order, int]], *, in_order: bool = True, notes: tuple[str, ...] = ()
    ) -> Communication:
        """Report orders: name of the part → its order, and how often it runs.

        Args:
            in_order: whether each stream ends its collectives in the order in which they are started.
        """
        parts = [
            CommunicationPart(f"{name}: {' '.join(function.phases)}".removeprefix(": "), times, schedule)
            for name, (order, times) in orders.items()
            for function, schedule in zip(order.functions, order.schedules, strict=True)
            if function.lines and times
        ]
        sources = dict.fromkeys(order.source for order, _ in orders.values())
        words = () if in_order else (APPROXIMATE,)
        return Communication(tuple(parts), ", ".join(filter(None, sources)), not in_order, (*words, *notes))

    def in_turn(self) -> list[tuple[str, Schedule]]:
        """Return each run of a function in turn: the name of the part, and its schedule."""
        return [(part.name, part.schedule) for part in self.parts for _ in range(part.times)]

    @property
    def makespan(self) -> float:
        """Seconds of all functions together."""
        return sum(part.times * part.schedule.makespan for part in self.parts)

    @property
    def bound(self) -> float:
        """Seconds; no order of the functions' ops takes less."""
        return sum(part.times * part.schedule.bound for part in self.parts)

    @property
    def exposed(self) -> float:
        """Exposed communication: the seconds in which computation waits for it."""
        return sum(part.times * part.schedule.exposed for part in self.parts)

    @property
    def ratio(self) -> float:
        """The makespan divided by the bound; 1 if both are 0."""
        return self.makespan / self.bound if self.bound else 1.0

    def __str__(self) -> str:
        right = (Column(name, justify="right") for name in ("times", "ms", "bound", "ratio", "exposed ms", "messages"))
        table = Table("function", "policy", *right)
        for part in self.parts:
            made = part.schedule
            messages = sum(line.kind == "start" for line in made.lines)
            numbers = (f"{part.times}", f"{made.makespan * 1e3:,.3f}", f"{made.bound * 1e3:,.3f}", f"{made.ratio:.3f}",
                       f"{made.exposed * 1e3:,.3f}", f"{messages}")  # fmt: skip
            table.add_row(part.name, made.policy, *numbers)
        lines = [
            f"{self.makespan * 1e3:,.3f} ms, bound {self.bound * 1e3:,.3f} ms, ratio {self.ratio:.3f}, exposed "
            f"{self.exposed * 1e3:,.3f} ms; durations: {self.source}",
            *self.notes,
        ]
        return printed(table) + "".join(f"{line}\n" for line in lines)
