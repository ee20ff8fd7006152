"""Report the memory of a whole step on one rank.

The report covers the last micro-batch, the update, and the inputs of the other micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from rich.table import Table
from torch import fx

from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import ValueRole, belongs_to_step, gradient_name, roles_in
from autopar.notebook import printed, right
from autopar.report.liveness import START, Storage, size
from autopar.report.memory import MemoryReport, report_of, tables
from autopar.runtime.lowering.lifetimes import lifetimes
from autopar.runtime.lowering.lower import Lowered

STATE, COPIES, UNDER_WAY = "optimizer state", "copies", "under way"
SUMS = (ValueRole.GRADIENT, ValueRole.LOSS)
TRANSIENT = (*SUMS, ValueRole.COPY)  # values that live during a step alone


class StepMemory(MemoryReport):
    """A row for each phase of the last micro-batch, and one for the update. Prints as tables.

    The last micro-batch takes as much memory as any other. Where parameters have low-precision copies, the first row,
    ``copies``, is about making them.

    Attributes:
        held: bytes that stay between steps: parameters, buffers, the optimizer's state, the batch, and what crosses the
            end of a step.
        kept: these bytes by kind.
        host: bytes of the optimizer's state that are in host memory; no row contains them.
        lifetimes: the storages of the last micro-batch and the update, from which their rows were computed, and one of
            the inputs of the other micro-batches.
    """

    kept: Counter[str]
    host: int = 0

    def __str__(self) -> str:
        away = f"; beside them, {self.host:,} of the optimizer's state are in host memory" if self.host else ""
        return f"{tables(self)}bytes of one rank, {self.held:,} of them between steps too{away}\n"


class StageMemory(StepMemory):
    """The memory of one rank of a step on stages: one row, for the slots. Prints as a table.

    Attributes:
        rank: the rank.
        lifetimes: ``None``: the schedule of the slots decides them.
        kept: of the bytes that stay between steps, those of the ``inputs``.
    """

    rank: int

    @property
    def kinds(self) -> Mapping[str, int]:
        """The bytes at the peak, by kind."""
        return self[0].kinds

    def __str__(self) -> str:
        table = Table("kind", right("bytes"))
        for kind, bytes in self.kinds.items():
            table.add_row(kind, f"{bytes:,}")
        return (
            f"{printed(table, width=80)}{self.peak:,} bytes of rank {self.rank} at most, {self.held:,} of them between "
            f"steps\n"
        )


def memory_of_step(
    last: Program, lowered: Lowered, microbatches: int, offload: bool = False, on_cpu: bool = True
) -> StepMemory:
    """Return the memory of a step on one rank, in bytes.

    Args:
        last: the merged program of the last micro-batch and the update, of this rank; ``lowered``: the function that
            runs it.
        offload: whether the optimizer's state is in host memory.
        on_cpu: whether the ranks are on CPU, where gathers are gloo's.
    """
    placeholders = {name_of(node): node for node in last.placeholders}
    roles = roles_in(last)
    values, parameters = {name: role for name, (role, _) in roles.items()}, {of for _, of in roles.values()}
    kinds = {node.name: _kind(name, node, values, parameters) for name, node in placeholders.items()}
    away = {
        node
        for name, node in placeholders.items()
        if offload and kinds[node.name] == STATE and not belongs_to_step(name)
    }
    staying = {
        node.name
        for name, node in placeholders.items()
        if values.get(name) not in TRANSIENT and record_of(node).role != "seed" and kinds[node.name] != UNDER_WAY
    }
    batch = sum(
        size(record_of(node).type)
        for name, node in placeholders.items()
        if record_of(node).role == "input" and not belongs_to_step(name)
    )
    lives = lifetimes(last, lowered, staying, kinds, on_cpu)
    storages = [storage for storage in lives.storages if storage.node not in away]
    if others := batch * (microbatches - 1):
        storages.append(Storage(last.output, others, "inputs", START, len(lives.ops)))
    report = report_of(replace(lives, storages=tuple(storages)))
    memory = StepMemory(report)
    memory.held, memory.lifetimes, memory.kept = report.held, report.lifetimes, Counter()
    memory.host = sum(storage.bytes for storage in lives.storages if storage.node in away)
    for storage in storages:
        if storage.born == START and storage.dies == len(lives.ops):
            memory.kept[storage.kind] += storage.bytes
        if storage.born == START and storage.kind == UNDER_WAY:
            memory.kept[storage.kind] += storage.bytes
            memory.held += storage.bytes
    return memory


def with_copies(memory: StepMemory, program: Program, lowered: Lowered, on_cpu: bool) -> StepMemory:
    """Add the row of the program that makes the low-precision copies.

    ``program``: of one rank. Its operands stay between steps.
    """
    lives = lifetimes(program, lowered, {node.name for node in program.placeholders}, {}, on_cpu)
    report = report_of(lives)
    peak = max(report, key=lambda row: row.bytes)
    kinds = {
        **memory.kept,
        **{kind: bytes for kind, bytes in peak.kinds.items() if kind in ("activations", "transfers")},
    }
    extended = StepMemory((replace(peak, phase=COPIES, bytes=memory.held + report.made, kinds=kinds), *memory))
    vars(extended).update(vars(memory))
    return extended


def _kind(name: str, node: fx.Node, values: Mapping[str, ValueRole], parameters: Collection[str]) -> str:
    """Return the kind of memory that a placeholder takes.

    Args:
        values: the role of each value of the step.
        parameters: the names of the trained parameters.
    """
    role = record_of(node).role
    if record_of(node).started or values.get(name) is ValueRole.BEFORE:
        return UNDER_WAY
    if values.get(name) in SUMS:
        return "gradients"
    if role == "param" or gradient_name(name) in values or name in parameters:
        return "parameters"
    if role == "state":
        return STATE if name in values else "buffers"
    return {"buffer": "buffers"}.get(role, "inputs")
