"""Report what one rank does in a step: its memory beside what was predicted, its time, and its communication."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from rich.table import Table
from torch import fx

from autopar.ir import transfers
from autopar.ir.mesh import Mesh, ranges_of
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.notebook import TableReport, printed, right
from autopar.runtime.lowering.waits import members, wait_of
from autopar.runtime.recording import RecordedLine, RecordedRun, RecordedSlot
from autopar.scheduling.programs.order import Order
from autopar.step.reports.op_classes import COMMUNICATION, class_of_op

PYTHON = "Python"  # the time between ops
BETWEEN_STAGES = (transfers.send, transfers.recv)


class RankPart(NamedTuple):
    """A program that the rank runs in a step.

    Attributes:
        program: its scheduled program.
        order: the order that was decided, with its times.
        times: how often it runs.
    """

    program: Program
    order: Order | None
    times: int


@dataclass(frozen=True)
class Exchanged:
    """A message of the rank, in the order in which it starts them.

    Attributes:
        part: the program of the step that starts it.
        times: how often the program runs in a step.
        values: the values that the message brings.
        op: the collective, or ``send`` or ``recv``.
        axes: the axes of its group.
        bytes: of this rank's pieces that go in; of ``recv``, that come in.
        ranks: the members of the group, as ``0-7``, or ``1-4089:8`` for each eighth one; of ``send`` and ``recv``, the
            ranks at the other end.
        seconds: what the machine's figures say, each time that it runs; ``None`` where they say nothing.
    """

    part: str
    times: int
    values: tuple[str, ...]
    op: str
    axes: tuple[str, ...]
    bytes: int
    ranks: str
    seconds: float | None


@dataclass(frozen=True, repr=False)
class RankReport(TableReport):
    """What one rank does in a step; prints as tables. Sizes are in bytes, times in seconds.

    Attributes:
        rank, mesh: which rank of which mesh.
        predicted, measured: the most memory in use at once.
        held: of ``measured``, what stays between steps: parameters, buffers, the optimizer's state, the batch.
        seconds: the time of a step on this machine, without waiting for other ranks.
        classes: class of ops → its part of ``seconds``.
        communication: the messages of a step.
        source: where the seconds of messages are from.
        alone: whether there were no other ranks, so that nothing was exchanged.
    """

    rank: int
    mesh: Mesh
    predicted: int
    measured: int
    held: int
    seconds: float
    classes: Mapping[str, float]
    communication: tuple[Exchanged, ...]
    source: str
    alone: bool

    @property
    def apart(self) -> float:
        """How far the measured memory is from the predicted one, as a fraction of it."""
        return self.measured / self.predicted - 1 if self.predicted else 0.0

    @property
    def memory(self) -> str:
        """Predicted and measured memory, in words."""
        return f"memory: predicted {self.predicted:,} bytes, measured {self.measured:,}: {self.apart:+.1%}"

    def figures(self) -> dict[str, object]:
        """Return what is printed, as data."""
        return {
            "rank": self.rank, "coordinates": dict(self.mesh.coordinates(self.rank)), "predicted": self.predicted,
            "measured": self.measured, "held": self.held, "seconds": self.seconds, "classes": dict(self.classes),
            "communication": [asdict(row) for row in self.communication], "source": self.source, "alone": self.alone,
        }  # fmt: skip

    def __str__(self) -> str:
        times = Table("ops", right("ms"), right("of all"))
        for name, seconds in self.classes.items():
            times.add_row(name, f"{seconds * 1e3:,.3f}", f"{seconds / self.seconds:.1%}")
        sent = Table("part", "values", "collective", "axes", "ranks", *map(right, ("times", "bytes", "ms")))
        for row in self.communication:
            first, *more = row.values
            values = first + f" and {len(more)} more" * bool(more)
            ms = "" if row.seconds is None else f"{row.seconds * 1e3:,.3f}"
            sent.add_row(row.part, values, row.op, " ".join(row.axes), row.ranks, f"{row.times}", f"{row.bytes:,}", ms)
        at = " ".join(f"{axis}={index}" for axis, index in self.mesh.coordinates(self.rank).items())
        return (
            f"rank {self.rank} ({at}) of {self.mesh}\n"
            f"{self.memory}; {self.held:,} of them stay between steps\n"
            f"a step takes {self.seconds * 1e3:,.3f} ms on this machine{self._without}\n"
            f"{printed(times, sent, width=160)}ms of communication: {self.source}\n"
        )

    @property
    def _without(self) -> str:
        return ", without its communication: there are no other ranks, and nothing is exchanged" if self.alone else ""


def time_by_class(
    runs: Iterable[RecordedRun], programs: Iterable[Program], slots: Sequence[RecordedSlot] = ()
) -> tuple[dict[str, float], float]:
    """Return class of ops → seconds in a recorded step, most first, and the seconds of the step.

    ``slots``: where the step has stages, what the rank has done in the slots of its schedule and around them.
    """
    kinds = {
        node.name: class_of_op(node) for program in programs for node in program.nodes if node.op == "call_function"
    }
    lines, found = [line for run in runs for line in run.lines], defaultdict[str, float](float)
    for line in lines:
        kind = kinds.get(line.name, PYTHON) if line.kind == "compute" else COMMUNICATION
        found[kind] += line.end - line.begin
    if slots:
        found[COMMUNICATION] += sum(slot.end - slot.begin for slot in slots if slot.kind != "compute")
    spans: list[RecordedLine | RecordedSlot] = [*lines, *slots]
    whole = max(span.end for span in spans) - min(span.begin for span in spans) if spans else 0.0
    found[PYTHON] += max(0.0, whole - sum(found.values()))
    return dict(sorted(found.items(), key=lambda row: -row[1])), whole


def exchanged(parts: Mapping[str, RankPart]) -> Iterator[Exchanged]:
    """Yield the messages of a rank in a step, in their order. ``parts``: by the names of the programs."""
    for name, (program, order, times) in parts.items():
        messages = list(_messages(program))
        seconds = iter(_seconds(order, program, sum(row[0].target not in BETWEEN_STAGES for row in messages)))
        for row in messages:
            duration = None if row[0].target in BETWEEN_STAGES else next(seconds)
            yield _exchanged(name, times, program, row, duration)


def _messages(program: Program) -> Iterator[list[fx.Node]]:
    """Yield the lines that start each message of a scheduled program."""
    started = [node for node in program.nodes if _exchanges(node)]
    for _, nodes in groupby(started, lambda node: record_of(node).message or node):
        yield list(nodes)


def _exchanges(node: fx.Node) -> bool:
    """Return whether a line starts a message; a redistribute without axes exchanges nothing."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective:
        return False
    return bool(transfers.arguments(node.target, node.args, node.kwargs).get("axis", 1))


def _seconds(order: Order | None, program: Program, count: int) -> list[float | None]:
    """Return the seconds of each message of a rank's program by its schedule, where that has as many messages."""
    names = {node.name for node in program.nodes}
    schedules = () if order is None else order.schedules
    found = [
        span.end - span.begin
        for schedule in schedules
        for line, span in zip((line for line in schedule.lines if line.kind != "wait"), schedule.spans, strict=True)
        if line.kind == "start" and any(part.op in names for part in line.parts)
    ]
    return [*found] if len(found) == count else [None] * count


def _exchanged(part: str, times: int, program: Program, nodes: list[fx.Node], seconds: float | None) -> Exchanged:
    first = nodes[0]
    arguments = transfers.arguments(first.target, first.args, first.kwargs)
    axis = arguments.get("axis")
    axes = () if axis is None else transfers.axes_of(axis)
    between = wait_of(program, first) if first.target in BETWEEN_STAGES else None
    group = program.meshes[None].ranks if axis is None else members(program, first)
    ranks = sorted(group if between is None else between.peers)
    op = transfers.BY_FUNCTION[first.target].name
    return Exchanged(
        part, times, tuple(map(_value, nodes)), op, axes, sum(map(_bytes, nodes)), ranges_of(ranks), seconds
    )


def _value(node: fx.Node) -> str:
    return next((user.name for user in node.users if user.target is transfers.wait), node.name)


def _bytes(node: fx.Node) -> int:
    span = record_of(node).span
    type = tensor_type(next(iter(operands(node)), node))  # what comes in with a message has no operand
    whole = math.prod(type.shape)
    return (whole if span is None else span[1] - span[0]) * type.dtype.itemsize


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())
