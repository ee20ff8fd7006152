"""The memory of a whole step on one rank: that of each of its programs, and what the step holds meanwhile for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.liveness import size
from autopar.program import Program, record_of
from autopar.report.memory import MemoryReport, PhasePeak, tables
from autopar.step.copies import COPY
from autopar.step.micro import LOSS, gradient_name
from autopar.step.program import Step


class StepMemory(tuple[PhasePeak, ...]):
    """A row for each phase of ``micro``, and for the update; prints as tables.

    Attributes:
        held: bytes that stay between steps: parameters, buffers, the optimizer's state, and the batch.
    """

    held: int

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return max(row.bytes for row in self)

    @property
    def made(self) -> int:
        """What the allocator gives out during a step."""
        return self.peak - self.held

    def phase(self, name: str) -> PhasePeak:
        """The row of ``forward``, ``backward`` or ``update``."""
        return next(row for row in self if row.phase == name)

    def __str__(self) -> str:
        return f"{tables(self)}bytes of one rank, {self.held:,} of them between steps too\n"


def memory_of_step(local: Step, micro: MemoryReport, update: MemoryReport) -> StepMemory:
    """The memory of the step whose programs of one rank are ``local``, of those of ``micro`` and of ``update``."""
    taken, ended = _placeholders(local.micro), _placeholders(local.update)
    copies = {name.removesuffix(COPY) for name in _placeholders(local.copy) if name.endswith(COPY)} if local.copy else set()
    masters = {name: n for name, (n, role) in ended.items() if name in copies or (role == "state" and name not in taken)}
    kinds = {name: "parameters" if name in copies else "optimizer state" for name in masters}
    stays = {name: n for name, (n, role) in taken.items() if role in ("param", "buffer", "state", "input") and not _is_sum(name) and name not in copies}
    batch = sum(n for name, (n, role) in taken.items() if role == "input" and not name.startswith("."))
    others = batch * (local.microbatches - 1)  # of the batch, the other micro-batches
    in_micro = {**_total(masters, kinds), "inputs": others}
    behind = {name: n for name, n in stays.items() if name not in ended and taken[name][1] != "input"}
    in_update = {**_total(behind, {name: _kind(taken[name][1]) for name in behind}), "inputs": others + batch}
    rows = [*(_beside(row, in_micro) for row in micro), *(_beside(row, in_update) for row in update if row.phase == "update")]
    found = StepMemory(rows)
    found.held = sum(stays.values()) + sum(masters.values()) + others
    return found


def _placeholders(program: Program) -> dict[str, tuple[int, str]]:
    """The user's name → bytes, role."""
    return {record_of(node).name or node.name: (size(record_of(node).type), record_of(node).role) for node in program.placeholders}


def _is_sum(name: str) -> bool:
    return name == LOSS or name.endswith(gradient_name(""))


def _kind(role: str) -> str:
    return {"param": "parameters", "input": "inputs"}.get(role, "buffers")


def _total(sizes: Mapping[str, int], kinds: Mapping[str, str]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, n in sizes.items():
        total[kinds[name]] = total.get(kinds[name], 0) + n
    return total


def _beside(row: PhasePeak, more: Mapping[str, int]) -> PhasePeak:
    kinds = {kind: row.kinds.get(kind, 0) + more.get(kind, 0) for kind in {**row.kinds, **more}}
    return replace(row, bytes=row.bytes + sum(more.values()), kinds={kind: n for kind, n in kinds.items() if n})
