"""Report the transfers: how many were inserted where, and the bytes that they move."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from rich.table import Column, Table
from rich.text import Text
from torch import fx

from autopar.costs.machine import Machine, machine_of
from autopar.costs.on_hosts import on_hosts
from autopar.ir import transfers
from autopar.ir.hosts import Hosts
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.notebook import TableReport, printed
from autopar.report.hosts import bytes_between_hosts
from autopar.report.lines import TransferLines, lines_of

LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # the number of a layer in a module path


@dataclass(frozen=True)
class TransferRow:
    """Equal transfers at the same place of every layer.

    Attributes:
        transfer, axis, phase: ``all_reduce``, ``tp``, ``forward``; no axis for casts.
        module: path, with ``*`` for numbers of layers.
        source: the user's line that made the transferred value.
        times: how many there are.
        bytes: how many the rank with the largest pieces receives in one step, all transfers of the row together.
    """

    transfer: str
    axis: str
    phase: str
    module: str
    source: str
    times: int
    bytes: int


class Transfers(TableReport, tuple[TransferRow, ...]):
    """The rows, in the order of their first transfers; prints as a table."""

    _programs: tuple[Program, ...]
    _machine: Machine
    _on: Machine
    _hosts: Hosts | None

    @cached_property
    def bytes_between_hosts(self) -> int:
        """The bytes of a rank's collectives and messages between hosts; 0 if all ranks share a host."""
        return sum(bytes_between_hosts(program, self._on, self._hosts) for program in self._programs)

    @cached_property
    def lines(self) -> TransferLines:
        """A line for each transfer: value, user, Layouts, bytes, bytes / bound, price, the user's line."""
        return lines_of(self._programs, self._machine)

    def __str__(self) -> str:
        right = (Column(name, justify="right") for name in ("times", "bytes"))
        table = Table(
            "transfer",
            "axis",
            "phase",
            *right,
            "module",
            Column("line", no_wrap=True, overflow="ellipsis", max_width=60),
        )
        for row in self:
            place = Text(row.module or "the root"), Text(row.source)  # no markup: lines of programs have brackets
            table.add_row(row.transfer, row.axis, row.phase, str(row.times), f"{row.bytes:,}", *place)
        between = f"{self.bytes_between_hosts:,} bytes of a rank's collectives are between hosts\n"
        return printed(table, width=200) + between * (self.bytes_between_hosts > 0)


def transfers_of(
    programs: Program | Sequence[Program], device: torch.device | str = "cpu", on: Machine | None = None,
    hosts: Hosts | None = None,
) -> Transfers:  # fmt: skip
    """Return the transfers of an explicit program, or of several that run one after the other. Linear in the graphs.

    Prices for the device are computed when ``lines`` is read.

    Args:
        on, hosts: the machine that tells which ranks share a host, by default that of the device; or the job's hosts.
    """
    programs = (programs,) if isinstance(programs, Program) else tuple(programs)
    totals: dict[tuple[str, str, str, str, str], tuple[int, int]] = {}
    for node, axis, received in itertools.chain.from_iterable(map(priced, programs)):
        record = record_of(node)
        key = (
            transfers.BY_FUNCTION[node.target].name,
            axis,
            record.phase,
            LAYER.sub("*", record.module),
            record.source,
        )
        times, total = totals.get(key, (0, 0))
        totals[key] = (times + 1, total + received)
    rows = Transfers(TransferRow(*key, times, total) for key, (times, total) in totals.items())
    rows._programs, rows._machine = programs, on_hosts(machine_of(device), hosts)
    rows._on, rows._hosts = on or rows._machine, hosts
    return rows


def bytes_per_axis(program: Program) -> dict[str, int]:
    """Return axis → bytes received in one step by all transfers together."""
    total: dict[str, int] = {}
    for node, axis, received in priced(program):
        if axis and transfers.BY_FUNCTION[node.target].collective:
            total[axis] = total.get(axis, 0) + received
    return total


def priced(program: Program) -> Iterator[tuple[fx.Node, str, int]]:
    """Yield each transfer with its axes and the bytes that the worst rank receives."""
    for node in program.nodes:
        if node.target not in transfers.BY_FUNCTION:
            continue
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        source, result = record_of(operands(node)[0]).type, record_of(node).type
        if isinstance(source, TensorType) and isinstance(result, TensorType) and source.layout is not None:
            bytes = transfers.received(node.target, source, arguments, result)
            yield node, "×".join(transfers.axes_along(node.target, source, arguments, result)), bytes
