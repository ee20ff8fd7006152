"""Price an explicit program: the sum over its ops and transfers, one after the other, in whole nanoseconds.

Ops are priced by ``op_prices`` on the rank with the largest pieces, transfers by ``prices.step_price``. The ops of all
stages are added up, as if one rank ran them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.table import Column, Table
from torch import fx

from autopar.costs.machine import Machine, machine_from
from autopar.costs.op_prices import OpPrices, nanoseconds
from autopar.costs.prices import step_price
from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, TensorType
from autopar.notebook import TableReport, printed
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound

REMEDIES = {  # level → what to do instead
    "traced": "run the passes over it, autopar.passes.run_passes(program, autopar.passes.pipeline(mesh))",
    "placed": "run the reshard pass over it, autopar.passes.run_passes(program, [autopar.passes.Reshard()])",
    "local": "price the explicit program that it was made from",
    "scheduled": "price the explicit program that it was made from",
}


class Programs(Protocol):
    """A training step, or one stage of it: its programs by name, and how often a step runs each.

    ``autopar.step.program.Step`` is one.
    """

    @property
    def runs(self) -> Mapping[str, tuple[Program, int]]: ...


@dataclass(frozen=True)
class PriceRow:
    """Equal ops, or equal transfers along the same axes, of one phase.

    Attributes:
        phase: ``forward``, ``backward`` or ``update``.
        name: the op or the transfer, ``mm``, ``all_reduce``.
        axis: the axes of a transfer, ``"tp"``, ``"dp tp"``; empty for ops, casts and transfers between stages.
        kind: ``op``, ``exchange`` for transfers in which ranks communicate, ``local`` for the others.
        times: how many there are, with the repetitions of their program.
        nanoseconds: of all together.
    """

    phase: str
    name: str
    axis: str
    kind: str
    times: int
    nanoseconds: int


@dataclass(frozen=True, repr=False)
class ProgramPrice(TableReport):
    """What a program costs on a machine; prints as a table.

    The sums ``by_…`` are in seconds, and of all ops and transfers, hidden or not.

    Attributes:
        machine: the machine's name.
        rows: ops and transfers, the dearest first.
        overlap: the fraction of the communication that is hidden behind computation.
        notes: remarks on the machine's figures.
    """

    machine: str
    rows: tuple[PriceRow, ...]
    overlap: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def nanoseconds(self) -> int:
        """The sum of all rows, less the hidden fraction of the exchanges."""
        exchanged = sum(row.nanoseconds for row in self.rows if row.kind == "exchange")
        return sum(row.nanoseconds for row in self.rows) - round(self.overlap * exchanged)

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    @property
    def by_phase(self) -> dict[str, float]:
        """Phase → seconds, the dearest first."""
        return _sums((row.phase, row) for row in self.rows)

    @property
    def by_axis(self) -> dict[str, float]:
        """Axes of transfers, ``"tp"`` or ``"dp tp"``, → seconds; casts and messages between stages have none."""
        return _sums((row.axis, row) for row in self.rows if row.axis)

    @property
    def by_op(self) -> dict[str, float]:
        """Op → seconds."""
        return _sums((row.name, row) for row in self.rows if row.kind == "op")

    @property
    def by_transfer(self) -> dict[str, float]:
        """Transfer → seconds."""
        return _sums((row.name, row) for row in self.rows if row.kind != "op")

    def __str__(self) -> str:
        right = (Column(name, justify="right") for name in ("times", "µs", "of all"))
        table = Table("phase", "op or transfer", "axis", *right)
        total = sum(row.nanoseconds for row in self.rows)
        for row in self.rows:
            if row.nanoseconds:
                numbers = f"{row.times:,}", f"{row.nanoseconds / 1e3:,.1f}", f"{row.nanoseconds / total:.1%}"
                table.add_row(row.phase, row.name, row.axis, *numbers)
        hidden = f", {self.overlap:.0%} of the communication hidden" if self.overlap else ""
        lines = [f"{self.nanoseconds / 1e3:,.1f} µs on {self.machine}{hidden}", *self.notes]
        return printed(table) + "".join(f"{line}\n" for line in lines)


def _sums(rows: Iterable[tuple[str, PriceRow]]) -> dict[str, float]:
    total: dict[str, int] = {}
    for key, row in rows:
        total[key] = total.get(key, 0) + row.nanoseconds
    return {key: count / 1e9 for key, count in sorted(total.items(), key=lambda item: -item[1])}


def price(program: Program | Programs, machine: Machine | str | Path, *, overlap: float = 0.0) -> ProgramPrice:
    """Return what an explicit program costs on a machine: the sum of its ops and transfers. Linear in the graph.

    The price of a training step is that of ``micro`` times the number of micro-batches, and of its other programs once.
    The stages of a pipeline run side by side, and each has a price of its own.

    Args:
        program: an explicit program, as ``parallel.program``, or a step of such programs; or one stage of a step,
            ``step.program.stages[0]``.
        machine: a machine, its name, as ``torch.cuda.get_device_name`` prints it, or the path of a machine file.
        overlap: the fraction of the communication that is hidden behind computation, from 0 to 1.

    Raises:
        ValueError: the program is not explicit, a step has several stages, there is no such machine, or ``overlap`` is
            no fraction.
        RuleError: a rule does not fit a call.
        OSError: the machine file cannot be read.
        TypeError: ``program`` is no program, or ``machine`` no machine.
    """
    if isinstance(overlap, bool) or not isinstance(overlap, (int, float)) or not 0 <= overlap <= 1:
        raise ValueError(f"overlap={shown(overlap)} is no fraction; give a number from 0 to 1")
    on = machine_from(machine)
    if isinstance(program, Program):
        parts = [(1, program)]
    elif stages := getattr(program, "stages", ()):
        raise ValueError(
            f"the {len(stages)} stages of this step run side by side, so the sum of their prices is no time of "
            f"a step: price one of them, step.program.stages[0], and take the whole step from step.pipeline.simulate()"
        )
    elif hasattr(program, "runs"):
        parts = [(times, part) for part, times in program.runs.values()]
    else:
        raise TypeError(f"price takes an explicit program or a step of such programs, not {shown(program)}")
    total: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    without_peak: set[torch.dtype] = set()
    for repeats, part in parts:
        for _, key, cost in _costs(part, on, without_peak):
            times, paid = total.get(key, (0, 0))
            total[key] = times + repeats, paid + repeats * cost
    rows = [PriceRow(*key, times, cost) for key, (times, cost) in total.items()]
    notes = [on.note] * bool(on.note) + [_note(on, dtype) for dtype in sorted(without_peak, key=str)]
    return ProgramPrice(on.name, tuple(sorted(rows, key=lambda row: -row.nanoseconds)), overlap, tuple(notes))


def _note(machine: Machine, dtype: torch.dtype) -> str:
    name = DTYPE_NAMES.get(dtype, str(dtype))
    if stand_in := machine.stand_in(dtype):
        return f"the peak of {name} is not listed: that of {stand_in} stands for it"
    return f"the peak of {name} is not known: {machine.flops(dtype) / 1e12:,.1f} TFLOP/s, from the memory's bandwidth"


def node_prices(program: Program, machine: Machine) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nanoseconds of each op and transfer of an explicit program."""
    for node, _, cost in _costs(program, machine, set()):
        yield node, cost


def _costs(
    program: Program, machine: Machine, without_peak: set[torch.dtype]
) -> Iterator[tuple[fx.Node, tuple[str, str, str, str], int]]:
    """Yield each op and transfer, its (phase, name, axis, kind), and its nanoseconds."""
    if program.level != "explicit":
        raise ValueError(f"only explicit programs have a price, and this one is {program.level}: "
                         f"{REMEDIES[program.level]}")  # fmt: skip
    yield from _costs_of_placed(program, machine, without_peak)


def price_of_ops(program: Program, machine: Machine) -> int:
    """Return the nanoseconds of the ops of a placed program: the price of its explicit program without transfers."""
    return sum(cost for *_, cost in _costs_of_placed(program, machine, set()))


def _costs_of_placed(
    program: Program, machine: Machine, without_peak: set[torch.dtype]
) -> Iterator[tuple[fx.Node, tuple[str, str, str, str], int]]:
    """Yield ``_costs``, those of ops of a placed program too."""
    listed = dict(machine.peak)
    prices: dict[object, tuple[int, torch.dtype | None]] = {}
    for node in program.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        record = record_of(node)
        if node.target in transfers.BY_FUNCTION:
            yield node, *_of_transfer(node, machine)
            continue
        bound = bind_node(node)
        types = record.type if isinstance(record.type, tuple) else (record.type,)
        uses = tuple(need for need in record.uses if need is not None)
        key = (bound, uses, types)
        if key not in prices:
            prices[key] = _of_op(bound, node, machine)
        cost, compute = prices[key]
        if compute is not None and DTYPE_NAMES.get(compute) not in listed:
            without_peak.add(compute)
        yield node, (record.phase, bound.rule.op, "", "op"), cost


def _of_op(bound: Bound, node: fx.Node, machine: Machine) -> tuple[int, torch.dtype | None]:
    """Return the nanoseconds of an op, and the dtype of its work, if it has work."""
    record = record_of(node)
    needs = [need for need in record.uses if need is not None]
    results = record.type if isinstance(record.type, tuple) else (record.type,)
    mesh = next(iter(_meshes(node)), None)
    gives: list[DistAttr | None] = [None if result is None else result.attr for result in results]
    split = bound.splits([need.placed.attr for need in needs], gives, mesh) if mesh is not None else {}
    made = OpPrices(
        bound, mesh, [need.dtype for need in needs], [None if r is None else r.dtype for r in results], machine
    )
    return made.price(split), made.compute if bound.terms else None


def _meshes(node: fx.Node) -> Iterator[Mesh]:
    record = record_of(node)
    yield from (need.placed.mesh for need in record.uses if need is not None)
    types = record.type if isinstance(record.type, tuple) else (record.type,)
    yield from (type.layout.mesh for type in types if type is not None and type.layout is not None)


def _of_transfer(node: fx.Node, machine: Machine) -> tuple[tuple[str, str, str, str], int]:
    transfer, record = transfers.BY_FUNCTION[node.target], record_of(node)
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    source, result = record_of(operands(node)[0]).type, record.type
    assert isinstance(source, TensorType) and isinstance(result, TensorType)
    axis = " ".join(transfers.axes_along(node.target, source, arguments, result))
    cost = nanoseconds(step_price(node.target, source, arguments, result, machine))
    return (record.phase, transfer.name, axis, "exchange" if transfer.collective else "local"), cost
