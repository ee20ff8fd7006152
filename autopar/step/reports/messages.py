"""List the messages between stages that one rank sends and receives in a step, by the lines of its programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from autopar.ir import transfers
from autopar.ir.mesh import stage_number
from autopar.ir.nodes import record_of, tensor_type
from autopar.ir.program import Program
from autopar.notebook import TableReport, printed, right
from autopar.runtime.lowering.packing import packing, size_of

SLOTS = {"forward": "F", "backward": "B"}


class RankMessage(NamedTuple):
    """What a rank exchanges with another one by one line of a program.

    Attributes:
        program: the program, as in ``step.local(rank)``.
        slot: in which slots of the schedule it goes, once for each micro-batch, as ``FS@0>1``; empty where it is sent
            once, by a program of all stages.
        value: the line.
        peer: the other rank.
        sent: whether this rank sends it.
        bytes: how many; in a slot, each value begins at a multiple of 16 of them.
    """

    program: str
    slot: str
    value: str
    peer: int
    sent: bool
    bytes: int


@dataclass(frozen=True, repr=False)
class RankMessages(TableReport):
    """The messages of a rank in a step; prints as a table.

    Attributes:
        rank: the rank.
        rows: the messages. Those of one slot and peer go together.
    """

    rank: int
    rows: tuple[RankMessage, ...]

    @staticmethod
    def of(programs: Mapping[str, Program]) -> RankMessages:
        """Return the messages of a rank. Linear in its programs. ``programs``: by name, not empty."""
        rank = next(iter(programs.values())).rank
        return RankMessages(rank, tuple(row for name, program in programs.items() for row in _rows(name, program)))

    def __str__(self) -> str:
        table = Table("program", "slot", "value", "", right("rank"), right("bytes"))
        for row in self.rows:
            table.add_row(
                row.program, row.slot, row.value, "to" if row.sent else "from", f"{row.peer}", f"{row.bytes:,}"
            )
        return (
            f"{printed(table)}messages of rank {self.rank} in a step; those with a slot go once for each micro-batch\n"
        )


def _rows(name: str, program: Program) -> Iterator[RankMessage]:
    for node in program.nodes:
        if node.target not in (transfers.send, transfers.recv):
            continue
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        size, goes = tensor_type(node).dtype.itemsize, ("", "")
        if name == "micro":
            home, target = stage_number(arguments["home"]), stage_number(arguments["stage"])
            slot = SLOTS[record_of(node).phase]
            goes = f"{slot}S@{home}>{target}", f"{slot}R@{target}<{home}"
        plan = packing(transfers.Ends.of(arguments, program.meshes), program.rank)
        for where, ends, sent in ((goes[0], plan.sends, True), (goes[1], plan.receives, False)):
            for peer, places in ends:
                yield RankMessage(name, where, node.name, peer, sent, size_of(places) * size)
