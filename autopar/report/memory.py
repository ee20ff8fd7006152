"""The report of a rank's memory: for each phase its peak, where it is, and what dominates it."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES
from autopar.ir.text.printer import print_node
from autopar.report.arena import arena
from autopar.report.liveness import KINDS, START, Lifetimes, Storage, liveness

LARGEST = 5  # values, and modules, that are listed


@dataclass(frozen=True)
class PhasePeak:
    """The op of a phase while which most memory is in use; sizes are bytes.

    Attributes:
        phase: ``forward``, ``backward`` or ``update``.
        bytes: in use then, what the caller holds included.
        line, module, source: the op's line in the program, its module and the user's line.
        kinds: parameters, activations, … → their share.
        values, modules: the largest values, with all that views them, and the modules that made most; without what the caller holds.
    """

    phase: str
    bytes: int
    line: str
    module: str
    source: str
    kinds: Mapping[str, int]
    values: tuple[tuple[str, int], ...]
    modules: tuple[tuple[str, int], ...]


class MemoryReport(tuple[PhasePeak, ...]):
    """A row for each phase, in their order; prints as tables.

    Attributes:
        held: bytes that the caller holds all the time: parameters, states, inputs.
        lifetimes: what it was made of.
    """

    held: int
    lifetimes: Lifetimes

    @cached_property
    def arena(self) -> int:
        """Bytes that a static plan needs, in which each storage has a fixed place, for what is not held by the caller."""
        return arena([one for one in self.lifetimes.storages if one.born != START]).bytes

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return max((row.bytes for row in self), default=self.held)

    @property
    def made(self) -> int:
        """The peak without what the caller holds: what the allocator gives out during the step."""
        return self.peak - self.held

    def phase(self, name: str) -> PhasePeak:
        """The row of a phase; ``KeyError`` where the program has none."""
        for row in self:
            if row.phase == name:
                return row
        raise KeyError(f"no phase {name!r} in the program; it has {', '.join(row.phase for row in self)}")

    def __str__(self) -> str:
        return (f"{tables(self)}bytes of one rank, {self.held:,} of them held by the caller; with fixed places, the {self.made:,} that are made "
                f"and in use at the peak take {self.arena:,}\n")  # fmt: skip


def tables(rows: Sequence[PhasePeak]) -> str:
    """The peak of each phase by kinds, and what dominates there."""
    kinds = [kind for kind in KINDS if any(row.kinds.get(kind) for row in rows)]
    table = Table("phase", *(Column(name, justify="right") for name in ("peak", *kinds)))
    for row in rows:
        table.add_row(row.phase, *(f"{n:,}" for n in (row.bytes, *(row.kinds.get(kind, 0) for kind in kinds))))
    most = Table("phase", Column("at", no_wrap=True, overflow="ellipsis", max_width=60), Column("line", no_wrap=True, overflow="ellipsis", max_width=40),
                 "largest values", "most in modules")  # fmt: skip
    for row in rows:
        texts = (row.line, row.source, _listed(row.values), _listed(row.modules))  # no markup: lines of programs have brackets
        most.add_row(row.phase, *map(Text, texts))
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(table)
    console.print(most)
    return out.getvalue()


def memory_of(program: Program, kept: Collection[str] | None = None, kinds: Mapping[str, str] | None = None, *,
              in_place: bool = True) -> MemoryReport:  # fmt: skip
    """The memory that a rank's program needs; the arguments are those of ``liveness``. Linear in the graph."""
    return report_of(liveness(program, kept, kinds, in_place=in_place))


def report_of(found: Lifetimes) -> MemoryReport:
    """The memory of such lifetimes."""
    held = found.held()
    last: dict[str, int] = {}
    for position, node in enumerate(found.ops):
        phase = record_of(node).phase
        if phase not in last or held[position] > held[last[phase]]:
            last[phase] = position
    report = MemoryReport(_row(found, phase, last[phase], held[last[phase]]) for phase in PHASES if phase in last)
    report.held = sum(one.bytes for one in found.storages if one.born == START and one.dies == len(found.ops))
    report.lifetimes = found
    return report


def _row(found: Lifetimes, phase: str, position: int, bytes: int) -> PhasePeak:
    op, live = found.ops[position], list(found.at(position))
    record = record_of(op)
    made = [one for one in live if one.born != START]
    values = sorted(((one.node.name, one.bytes) for one in made), key=lambda row: -row[1])
    return PhasePeak(phase, bytes, print_node(found.program, op).strip(), record.module, record.source,
                     _sums((one.kind, one) for one in live), tuple(values[:LARGEST]),
                     tuple(_sums((record_of(one.node).module or "the root", one) for one in made).items())[:LARGEST])  # fmt: skip


def _sums(rows: Iterable[tuple[str, Storage]]) -> dict[str, int]:
    """Key → bytes, the most first."""
    total: dict[str, int] = {}
    for key, one in rows:
        total[key] = total.get(key, 0) + one.bytes
    return dict(sorted(total.items(), key=lambda row: -row[1]))


def _listed(rows: Iterable[tuple[str, int]]) -> str:
    return "\n".join(f"{name} {bytes:,}" for name, bytes in rows)
