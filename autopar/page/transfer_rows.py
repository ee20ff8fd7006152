"""List the transfers of all programs of a step with their bytes and seconds; equal ones of all layers are one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.costs.machine import Machine
from autopar.costs.prices import step_price
from autopar.ir import transfers
from autopar.ir.mesh import PIPELINE
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import TensorType
from autopar.page.subject import Messages, Part
from autopar.report.transfers import LAYER, priced


@dataclass
class TransferSum:
    """Equal transfers at the same place of every layer.

    Attributes:
        part: the program.
        transfer, axis, phase: ``all_reduce``, ``tp``, ``forward``.
        module: path, with ``*`` for numbers of layers.
        source: the user's line that made the transferred value.
        times: how many there are in one step.
        bytes: how many the rank with the largest pieces receives in one step.
        seconds: their price in one step.
    """

    part: str
    transfer: str
    axis: str
    phase: str
    module: str
    source: str
    times: int = 0
    bytes: int = 0
    seconds: float = 0.0


def transfer_rows(
    parts: Sequence[Part], machine: Machine, messages: Sequence[Messages] = (), between: Sequence[Part] = ()
) -> list[TransferSum]:
    """Return the rows in the order of their first transfers, and then those of stages. Linear in the graphs.

    ``between``: programs of all stages, of which the transfers between stages are listed.
    """
    rows: dict[tuple[str, ...], TransferSum] = {}
    for part in (*parts, *between):
        for node, axis, received in priced(part.program):
            if node.target is transfers.send or (part in between and not _is_between(node, axis)):
                continue  # a message is counted where it is received
            axis = axis or PIPELINE
            record, source = record_of(node), record_of(operands(node)[0]).type
            assert isinstance(source, TensorType) and isinstance(record.type, TensorType)
            arguments = transfers.arguments(node.target, node.args, node.kwargs)
            name = transfers.BY_FUNCTION[node.target].name
            key = (part.name, name, axis, record.phase, LAYER.sub("*", record.module), record.source)
            row = rows.setdefault(key, TransferSum(*key))
            row.times += part.times
            row.bytes += part.times * received
            row.seconds += part.times * step_price(node.target, source, arguments, record.type, machine)
    sent = [
        TransferSum(f"stage {row.stage}", "send", PIPELINE, row.phase, "", "", row.times, row.bytes, row.seconds)
        for row in messages
    ]
    return [*rows.values(), *sent]


def _is_between(node: fx.Node, axis: str) -> bool:
    """Return whether a transfer goes from stage to stage."""
    return node.target is transfers.recv or PIPELINE in axis.split("×")
