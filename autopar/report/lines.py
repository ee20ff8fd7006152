"""Report every single transfer: the value and its user, bytes, price, and the user's line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.table import Column, Table
from rich.text import Text
from torch import fx

from autopar.costs.machine import Machine
from autopar.costs.prices import step_price
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.notebook import TableReport, printed
from autopar.transitions.lower_bound import least_bytes


@dataclass(frozen=True)
class TransferLine:
    """One transfer.

    Attributes:
        name, transfer: the inserted node's name, and that of its function.
        value, users: the value that is transferred, and the nodes that read it afterwards.
        before, after: types, as the program prints them.
        bytes: how many the worst rank receives.
        ratio: at the last transfer of a chain, bytes of the chain / lower bound; else ``None``.
        seconds: the price on the machine.
        phase, module, source: the op's phase and module, and the user's line.
    """

    name: str
    transfer: str
    value: str
    users: tuple[str, ...]
    before: str
    after: str
    bytes: int
    ratio: float | None
    seconds: float
    phase: str
    module: str
    source: str


class TransferLines(TableReport, tuple[TransferLine, ...]):
    """The lines, in the order of the program; prints as a table.

    Attributes:
        machine: the machine whose prices the lines have.
    """

    machine: Machine

    def __str__(self) -> str:
        right = (Column(name, justify="right", no_wrap=True) for name in ("bytes", "/ bound", "µs"))
        table = Table(
            "value", "user", "from", "to", "by", *right, Column("line", no_wrap=True, overflow="ellipsis", max_width=48)
        )
        for line in self:
            users = line.users[0] if line.users else "–"
            users += f" and {len(line.users) - 1} more" if len(line.users) > 1 else ""
            ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
            texts = (line.value, users, line.before, line.after, line.transfer)  # no markup: types have brackets
            numbers = (f"{line.bytes:,}", ratio, f"{line.seconds * 1e6:,.1f}")
            table.add_row(*map(Text, texts), *numbers, Text(line.source))
        note = f" ({self.machine.note})" if self.machine.note else ""
        return f"{printed(table, width=200)}prices are those of {self.machine.name}{note}\n"


def lines_of(programs: Iterable[Program], machine: Machine) -> TransferLines:
    """Return a line for each transfer of explicit programs."""
    lines = TransferLines(line for program in programs for line in _lines(program, machine))
    lines.machine = machine
    return lines


def _lines(program: Program, machine: Machine) -> Iterator[TransferLine]:
    chains: dict[fx.Node, tuple[fx.Node, int]] = {}  # transfer → the first value of its chain, and the bytes so far
    for node in program.nodes:
        if node.target not in transfers.BY_FUNCTION:
            continue
        operand, record = operands(node)[0], record_of(node)
        source, result = record_of(operand).type, record.type
        if not isinstance(source, TensorType) or not isinstance(result, TensorType) or source.layout is None:
            continue
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        received = transfers.received(node.target, source, arguments, result)
        value, before = chains.get(operand, (operand, 0))
        chains[node] = value, before + received
        users = tuple(user.name for user in node.users if user.target not in transfers.BY_FUNCTION)
        yield TransferLine(
            node.name, transfers.BY_FUNCTION[node.target].name, value.name, users, print_type(source),
            print_type(result), received, _ratio(record_of(value).type, result, before + received) if users else None,
            step_price(node.target, source, arguments, result, machine), record.phase, record.module, record.source,
        )  # fmt: skip


def _ratio(source: object, result: TensorType, paid: int) -> float:
    assert isinstance(source, TensorType)
    least = least_bytes(source, result)
    return paid / least if least else 1.0 if not paid else float("inf")
