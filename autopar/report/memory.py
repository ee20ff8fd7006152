"""Report a rank's memory: for each phase its peak, the op at the peak, and the values and modules that use most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.table import Column, Table
from rich.text import Text

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES
from autopar.ir.text.printer import print_op
from autopar.notebook import TableReport, printed
from autopar.report.arena import arena
from autopar.report.liveness import KINDS, START, Lifetimes, Storage, liveness

LARGEST = 5  # how many values and modules are listed


@dataclass(frozen=True)
class PhasePeak:
    """The op of a phase at which most memory is in use; sizes are in bytes.

    Attributes:
        phase: ``forward``, ``backward`` or ``update``.
        bytes: all memory in use, including what the caller holds.
        line, module, source: the op's line in the program, its module and the user's line.
        kinds: parameters, activations, … → bytes.
        values, modules: the largest values, with their views, and the modules with most; without what the caller holds.
    """

    phase: str
    bytes: int
    line: str
    module: str
    source: str
    kinds: Mapping[str, int]
    values: tuple[tuple[str, int], ...]
    modules: tuple[tuple[str, int], ...]


class MemoryReport(TableReport, tuple[PhasePeak, ...]):
    """A row for each phase, in their order; prints as tables.

    Attributes:
        held: bytes that the caller holds all the time: parameters, states, inputs.
        lifetimes: the storages from which the report was computed.
    """

    held: int
    lifetimes: Lifetimes | None = None

    @cached_property
    def arena(self) -> int:
        """The bytes of a static plan, with a fixed place for each storage that the caller does not hold."""
        assert self.lifetimes is not None
        return arena([storage for storage in self.lifetimes.storages if storage.born != START]).bytes

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return max((row.bytes for row in self), default=self.held)

    @property
    def made(self) -> int:
        """The peak without what the caller holds: what the allocator provides during the step."""
        return self.peak - self.held

    def phase(self, name: str) -> PhasePeak:
        """Return the row of a phase; ``KeyError`` if the program has none."""
        for row in self:
            if row.phase == name:
                return row
        raise KeyError(f"no phase {name!r} in the program; it has {', '.join(row.phase for row in self)}")

    def __str__(self) -> str:
        return (
            f"{tables(self)}bytes of one rank, {self.held:,} of them held by the caller; "
            f"with fixed places, the {self.made:,} that are made and in use at the peak take {self.arena:,}\n"
        )


def tables(rows: Sequence[PhasePeak]) -> str:
    """Return the peak of each phase by kinds, and the largest values and modules there, as tables."""
    kinds = [kind for kind in KINDS if any(row.kinds.get(kind) for row in rows)]
    table = Table("phase", *(Column(name, justify="right") for name in ("peak", *kinds)))
    for row in rows:
        table.add_row(row.phase, *(f"{n:,}" for n in (row.bytes, *(row.kinds.get(kind, 0) for kind in kinds))))
    most = Table("phase", Column("at", no_wrap=True, overflow="ellipsis", max_width=60),
                 Column("line", no_wrap=True, overflow="ellipsis", max_width=40), "largest values",
                 "most in modules")  # fmt: skip
    for row in rows:
        # no markup: lines of programs have brackets
        texts = (row.line, row.source, _listed(row.values), _listed(row.modules))
        most.add_row(row.phase, *map(Text, texts))
    return printed(table, most, width=200)


def memory_of(program: Program, kept: Collection[str] | None = None, kinds: Mapping[str, str] | None = None, *,
              in_place: bool = True) -> MemoryReport:  # fmt: skip
    """Return the memory that a rank's program needs; arguments as for ``liveness``. Linear in the graph."""
    return report_of(liveness(program, kept, kinds, in_place=in_place))


def report_of(lifetimes: Lifetimes) -> MemoryReport:
    """Return the report of these lifetimes."""
    in_use = lifetimes.held()
    last: dict[str, int] = {}
    for position, node in enumerate(lifetimes.ops):
        phase = record_of(node).phase
        if phase not in last or in_use[position] > in_use[last[phase]]:
            last[phase] = position
    report = MemoryReport(_row(lifetimes, phase, last[phase], in_use[last[phase]]) for phase in PHASES if phase in last)
    report.held = sum(
        storage.bytes for storage in lifetimes.storages if storage.born == START and storage.dies == len(lifetimes.ops)
    )
    report.lifetimes = lifetimes
    return report


def _row(lifetimes: Lifetimes, phase: str, position: int, bytes: int) -> PhasePeak:
    op, live = lifetimes.ops[position], list(lifetimes.at(position))
    record = record_of(op)
    allocated = [storage for storage in live if storage.born != START]
    values = sorted(((storage.node.name, storage.bytes) for storage in allocated), key=lambda row: -row[1])
    return PhasePeak(phase, bytes, print_op(lifetimes.program, op).strip(), record.module, record.source,
                     _sums((storage.kind, storage) for storage in live), tuple(values[:LARGEST]),
                     tuple(_sums((record_of(storage.node).module or "the root", storage)
                                 for storage in allocated).items())[:LARGEST])  # fmt: skip


def _sums(rows: Iterable[tuple[str, Storage]]) -> dict[str, int]:
    """Return key → bytes, the largest first."""
    total: dict[str, int] = {}
    for key, storage in rows:
        total[key] = total.get(key, 0) + storage.bytes
    return dict(sorted(total.items(), key=lambda row: -row[1]))


def _listed(rows: Iterable[tuple[str, int]]) -> str:
    return "\n".join(f"{name} {bytes:,}" for name, bytes in rows)
