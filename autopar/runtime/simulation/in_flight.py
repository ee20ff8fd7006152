"""Run what simulated ranks exchange: the collectives of groups, and messages from one rank to another.

A rank goes on after a start. The collective runs when all members of its group have started it. Each group runs its
collectives in the order in which its members start them, and every member must start the same ones. A rank that waits
yields an ``Until``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.transfers import Meshes
from autopar.runtime.simulation.effects import RankPosition, chunk

Group = tuple[tuple[int, ...], str | None]  # the ranks, and the stream on which they run it
Channel = tuple[int, int, int | None]  # sender, receiver, and the tag of a message that has one


@dataclass(frozen=True)
class Instruction:
    """One node, ready to run: ``values[name] = function(*args, **kwargs)`` with names looked up."""

    name: str
    node: fx.Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: Any = None  # the axis or axes of a collective; ``BETWEEN`` for an exchange between stages
    stage: str | None = None  # the stage whose mesh has the axes
    started: bool = False  # the collective is only started
    span: tuple[int, int] | None = None  # the elements that a chunk of it sends
    program: Program | None = None  # the program of the node, for errors that quote its line


@dataclass(frozen=True)
class Until:
    """A rank that waits for other ranks.

    Attributes:
        ready: returns whether it can go on.
        words: what it waits for.
        ranks: the ranks that it waits for, or a function that returns them.
    """

    ready: Callable[[], bool]
    words: str
    ranks: Sequence[int] | Callable[[], Sequence[int]]

    def __str__(self) -> str:
        ranks = self.ranks() if callable(self.ranks) else self.ranks
        return f"waits in {self.words} for ranks {', '.join(map(str, ranks))}"


class Ticket(NamedTuple):
    """What a start gives to its wait: the group, the number of the collective in it, and its name."""

    group: Group
    number: int
    name: str


@dataclass
class InFlight:
    """What is under way between the ranks."""

    _posted: dict[Group, dict[int, deque[tuple[Instruction, Any]]]] = field(default_factory=dict)  # with its operand
    _started: dict[tuple[Group, int], int] = field(default_factory=dict)  # group, rank → how many it has started
    _finished: dict[Group, int] = field(default_factory=dict)
    _results: dict[tuple[Group, int, int], torch.Tensor] = field(default_factory=dict)
    _mail: dict[Channel, deque[tuple[str, torch.Tensor]]] = field(default_factory=lambda: defaultdict(deque))

    def clear(self) -> None:
        """Forget all that is under way."""
        for under_way in (self._posted, self._started, self._finished, self._results, self._mail):
            under_way.clear()

    # -- collectives -----------------------------------------------------------------------------------------------

    def start(self, rank: int, step: Instruction, operand: Any, meshes: Meshes) -> Ticket:
        """Post the operand of a rank; run the collective if the rank is the last of its members."""
        members = meshes[step.stage].group(rank, step.axis)
        group = members, record_of(step.node).stream
        posted = self._posted.setdefault(group, {member: deque() for member in members})
        posted[rank].append((step, operand))
        number = self._started[group, rank] = self._started.get((group, rank), -1) + 1
        while all(posted.values()):
            finished = self._finished[group] = self._finished.get(group, -1) + 1
            arrivals = [posted[member].popleft() for member in members]
            for member, result in zip(members, _collective(members, arrivals, meshes), strict=True):
                self._results[group, finished, member] = result
        return Ticket(group, number, step.name)

    def has_run(self, rank: int, ticket: Ticket) -> bool:
        """Return whether a collective has run, and its result was not taken."""
        return (ticket.group, ticket.number, rank) in self._results

    def result(self, rank: int, ticket: Ticket) -> torch.Tensor:
        """Return what a collective has given to a rank, once."""
        return self._results.pop((ticket.group, ticket.number, rank))

    def complete(self, values: Mapping[int, dict[str, Any]]) -> None:
        """Put the results of what nothing has waited for in the place of the tickets. ``values``: rank → values."""
        for rank, own in values.items() if self._results else ():
            for name, value in own.items():
                if isinstance(value, Ticket) and self.has_run(rank, value):
                    own[name] = self.result(rank, value)

    def late(self, ticket: Ticket) -> list[int]:
        """Return the members that have not started a collective yet."""
        return [rank for rank in ticket.group[0] if self._started.get((ticket.group, rank), -1) < ticket.number]

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, channel: Channel, message: torch.Tensor, name: str = "") -> None:
        """Send a message; those of a channel are received in their order. ``name``: of the value that is sent."""
        self._mail[channel].append((name, message))

    def has_come(self, channel: Channel) -> bool:
        """Return whether a message of a channel can be received."""
        return bool(self._mail.get(channel))

    def receive(self, channel: Channel) -> tuple[str, torch.Tensor]:
        """Return the next message of a channel, with its name."""
        return self._mail[channel].popleft()

    def check_empty(self) -> None:
        """Raise ``SimulationError`` if a collective was started by some of its members alone, or a message is left."""
        for (members, _), posted in self._posted.items():
            for rank, queue in posted.items():
                if queue:
                    others = ", ".join(str(member) for member in members if not posted[member])
                    name = queue[0][0].name
                    raise SimulationError(f"rank {rank} has started {name}, and ranks {others} of its group never do")
        for (sender, receiver, _), messages in self._mail.items():
            if messages:
                name, _ = messages[0]
                what = f"{name}, which" if name else "what"
                raise SimulationError(f"rank {receiver} never receives {what} rank {sender} has sent to it")


def _collective(
    group: Sequence[int], arrivals: Sequence[tuple[Instruction, Any]], meshes: Meshes
) -> Sequence[torch.Tensor]:
    """Run a collective of a group in which all its members have arrived, with their operands."""
    first, _ = arrivals[0]
    for member, (other, _) in zip(group, arrivals, strict=True):
        if (other.name, other.function, other.span) != (first.name, first.function, first.span):
            raise SimulationError(
                f"ranks of one group over {first.axis} meet in different collectives:\n"
                f"    rank {group[0]}: {first.name} = {first.node.format_node()}\n"
                f"    rank {member}: {other.name} = {other.node.format_node()}"
            )
    mesh = meshes[first.stage]
    positions = [RankPosition(meshes, member, mesh.coordinates(member)) for member in group]
    operands, arguments = [operand for _, operand in arrivals], [step.kwargs["arguments"] for step, _ in arrivals]
    if first.span is None:
        results: list[torch.Tensor] = first.function(operands, arguments, positions)
        return results
    return chunk(first.node.target, operands, arguments, first.span, positions)
