"""The memory of a whole step on one rank: that of the last micro-batch with the update, and of the batch beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import ValueRole, belongs_to_step, gradient_name, roles_in
from autopar.report.liveness import START, size
from autopar.report.memory import PhasePeak, report_of, tables
from autopar.runtime.lowering.lifetimes import lifetimes
from autopar.runtime.lowering.lower import Lowered

STATE, COPIES = "optimizer state", "copies"
SUMS = (ValueRole.GRADIENT, ValueRole.LOSS)
TRANSIENT = (*SUMS, ValueRole.COPY)  # values that live during a step alone


class StepMemory(tuple[PhasePeak, ...]):
    """A row for each phase of the last micro-batch, which has all that the others have, and for the update; before them one for the
    low-precision copies of parameters, ``copies``, where there are some. Prints as tables.

    Attributes:
        held: bytes that stay between steps: parameters, buffers, the optimizer's state, and the batch.
        kept: what is held, by kinds.
        host: bytes of the optimizer's state that are in host memory, and in none of the rows.
    """

    held: int
    kept: Counter[str]
    host: int

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return max(row.bytes for row in self)

    @property
    def made(self) -> int:
        """What the allocator gives out during a step."""
        return self.peak - self.held

    def phase(self, name: str) -> PhasePeak:
        """The row of ``forward``, ``backward``, ``update`` or ``copies``."""
        return next(row for row in self if row.phase == name)

    def __str__(self) -> str:
        beside = f"; beside them, {self.host:,} of the optimizer's state are in host memory" if self.host else ""
        return f"{tables(self)}bytes of one rank, {self.held:,} of them between steps too{beside}\n"


def memory_of_step(last: Program, lowered: Lowered, microbatches: int, offload: bool = False, on_cpu: bool = True) -> StepMemory:
    """The memory of a step, of its last micro-batch and update on one rank, joined, and the function that they are lowered to.

    ``offload``: what the optimizer keeps of its parameters is in host memory. ``on_cpu``: the ranks are on CPU, where gathers are gloo's.
    """
    placeholders = {name_of(node): node for node in last.placeholders}
    values = {name: role for name, (role, _) in roles_in(last).items()}
    kinds = {node.name: _kind(name, node, values) for name, node in placeholders.items()}
    away = {node for name, node in placeholders.items() if offload and kinds[node.name] == STATE and not belongs_to_step(name)}
    kept = {node.name for name, node in placeholders.items() if values.get(name) not in TRANSIENT and record_of(node).role != "seed"}
    batch = sum(size(record_of(node).type) for name, node in placeholders.items() if record_of(node).role == "input" and not belongs_to_step(name))
    lives = lifetimes(last, lowered, kept, kinds, on_cpu)
    report = report_of(replace(lives, storages=tuple(one for one in lives.storages if one.node not in away)))
    found = StepMemory(_beside(row, "inputs", batch * (microbatches - 1)) for row in report)
    found.held = report.held + batch * (microbatches - 1)
    found.host = sum(size(record_of(node).type) for node in away)
    found.kept = Counter({"inputs": batch * (microbatches - 1)})
    for one in report.lifetimes.storages:
        if one.born == START and one.dies == len(lives.ops):
            found.kept[one.kind] += one.bytes
    return found


def with_copies(memory: StepMemory, program: Program, lowered: Lowered, on_cpu: bool) -> StepMemory:
    """The same, with what making the low-precision copies needs: ``program`` is that of a rank. What it takes is held between steps."""
    lives = lifetimes(program, lowered, {node.name for node in program.placeholders}, {}, on_cpu)
    report = report_of(lives)
    made = max(report, key=lambda row: row.bytes)
    kinds = {**memory.kept, **{kind: bytes for kind, bytes in made.kinds.items() if kind in ("activations", "transfers")}}
    found = StepMemory((replace(made, phase=COPIES, bytes=memory.held + report.made, kinds=kinds), *memory))
    found.held, found.host, found.kept = memory.held, memory.host, memory.kept
    return found


def _kind(name: str, node: fx.Node, values: Mapping[str, ValueRole]) -> str:
    """The kind of memory that a placeholder takes. ``values``: the role of each value of the step."""
    role = record_of(node).role
    if values.get(name) in SUMS:
        return "gradients"
    if role == "param" or gradient_name(name) in values:
        return "parameters"
    if role == "state":
        return STATE if name in values else "buffers"
    return {"buffer": "buffers"}.get(role, "inputs")


def _beside(row: PhasePeak, kind: str, bytes: int) -> PhasePeak:
    return replace(row, bytes=row.bytes + bytes, kinds={**row.kinds, kind: row.kinds.get(kind, 0) + bytes}) if bytes else row
