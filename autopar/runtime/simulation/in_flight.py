"""Run the collectives that simulated ranks have started and not waited for.

A rank goes on after a start. The collective runs when all members of its group have started it. Each group runs its
collectives in the order in which its members start them, and every member must start the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from autopar.errors import SimulationError

Group = tuple[tuple[int, ...], str | None]  # the ranks, and the stream on which they run it


class Ticket(NamedTuple):
    """What a start gives to its wait: the group, the number of the collective in it, and its name."""

    group: Group
    number: int
    name: str


class Started(Protocol):
    """A rank at a collective, with its operand."""

    @property
    def instruction(self) -> Any: ...

    @property
    def operand(self) -> torch.Tensor: ...


@dataclass
class InFlight:
    """The collectives that are under way.

    Args:
        collective: runs one on the arrivals of its members, in the order of the group.
    """

    collective: Callable[[Sequence[int], Sequence[Any]], Mapping[int, torch.Tensor]]
    _posted: dict[Group, dict[int, deque[Started]]] = field(default_factory=dict)
    _started: dict[tuple[Group, int], int] = field(default_factory=dict)  # group, rank → how many it has started
    _finished: dict[Group, int] = field(default_factory=dict)
    _results: dict[tuple[Group, int, int], torch.Tensor] = field(default_factory=dict)

    def start(self, rank: int, members: tuple[int, ...], stream: str | None, arrival: Started) -> Ticket:
        """Post the operand of a rank; run the collective if the rank is the last of its members."""
        group = (members, stream)
        posted = self._posted.setdefault(group, {member: deque() for member in members})
        posted[rank].append(arrival)
        number = self._started[group, rank] = self._started.get((group, rank), -1) + 1
        while all(posted.values()):
            finished = self._finished[group] = self._finished.get(group, -1) + 1
            arrivals = [posted[member].popleft() for member in members]
            for member, result in self.collective(members, arrivals).items():
                self._results[group, finished, member] = result
        return Ticket(group, number, arrival.instruction.name)

    def result(self, rank: int, ticket: Ticket) -> torch.Tensor | None:
        """Return what a collective has given to a rank, once; ``None`` if it has not run yet."""
        return self._results.pop((ticket.group, ticket.number, rank), None)

    def complete(self, values: Mapping[int, dict[str, Any]]) -> None:
        """Put the results of what nothing has waited for in the place of the tickets. ``values``: rank → values."""
        for rank, own in values.items() if self._results else ():
            for name, value in own.items():
                if isinstance(value, Ticket) and (result := self.result(rank, value)) is not None:
                    own[name] = result

    def late(self, ticket: Ticket) -> list[int]:
        """Return the members that have not started a collective yet."""
        return [rank for rank in ticket.group[0] if self._started.get((ticket.group, rank), -1) < ticket.number]

    def check_empty(self) -> None:
        """Raise ``SimulationError`` if a collective was started by some of its members alone."""
        for (members, _), posted in self._posted.items():
            for rank, queue in posted.items():
                if queue:
                    others = ", ".join(str(member) for member in members if not posted[member])
                    name = queue[0].instruction.name
                    raise SimulationError(f"rank {rank} has started {name}, and ranks {others} of its group never do")
